"""RunningSums: the embedded task. It needs no data, is learnt in seconds by a tiny model, and can judge every step."""

import random
import re
from functools import cached_property
from typing import Any

from datasets import Dataset

from ..errors import UsageError
from .base import Split, Task, Verdict

_STEP = re.compile(r"[0-9]\+[0-9]=([0-9])")


class RunningSums(Task):
    """Add digits modulo 10, worked step by step: the prompt `3+5+9=` is completed by `3+5=8;8+9=7;`.

    Source: ours.

    Steps: every step ends with `;`. What follows the last `;` belongs to the last step; a completion without any `;` is
    one step; an empty one has none. Step j is right (1.0) if and only if its text is exactly the prompt's j-th
    equation: the true running sum, the next term, the true result. A step after a wrong one is therefore wrong unless
    it starts from the true sum again; steps beyond the true number of steps are wrong.

    Answer: the result of the last step. A completion that does not end in a well-formed step (`digit+digit=digit;`)
    has no answer and is wrong. "accuracy" asks for the answer alone: a shortcut to the right result is right, and its
    steps are not. All steps right and none missing implies a right answer.

    Args:
        min_terms: fewest digits in a prompt, at least 2.
        max_terms: most digits in a prompt. All lengths are as frequent as the number of prompts of a length (10 to the
            power of its terms) allows.
        train_prompts: prompts to train on.
        validation_prompts: prompts to validate on, none of which is trained on or demonstrated.
        seed: which prompts, and in which order.
    """

    judges_steps = True
    verify_is_pure = True

    def __init__(
        self,
        min_terms: int = 3,
        max_terms: int = 6,
        train_prompts: int = 4000,
        validation_prompts: int = 200,
        seed: int = 0,
    ) -> None:
        if not 2 <= min_terms <= max_terms:
            raise UsageError(
                f"RunningSums has min_terms={min_terms}, max_terms={max_terms}: 2 <= min_terms <= max_terms"
            )
        for name, value in (("train_prompts", train_prompts), ("validation_prompts", validation_prompts)):
            if value < 1:
                raise UsageError(f"RunningSums has {name}={value}: give at least 1")
        existing = sum(10**terms for terms in range(min_terms, max_terms + 1))
        if train_prompts + validation_prompts > existing:
            raise UsageError(
                f"RunningSums is asked for {train_prompts} training and {validation_prompts} validation prompts, but "
                f"only {existing} different ones have {min_terms} to {max_terms} terms: ask for fewer or more terms"
            )
        self.lengths = range(min_terms, max_terms + 1)
        self.train_prompts = train_prompts
        self.validation_prompts = validation_prompts
        self.seed = seed

    @cached_property
    def _digits(self) -> dict[Split, list[tuple[int, ...]]]:
        """The terms of every prompt: drawn without replacement, a length at a time, shuffled together, then cut."""
        generator = random.Random(f"RunningSums/{self.seed}")
        drawn = [
            tuple(int(digit) for digit in f"{number:0{terms}d}")
            for terms, count in zip(self.lengths, self._shares(), strict=True)
            for number in generator.sample(range(10**terms), count)
        ]
        generator.shuffle(drawn)
        return {"validation": drawn[: self.validation_prompts], "train": drawn[self.validation_prompts :]}

    def _shares(self) -> list[int]:
        """Prompts of each length, as equal as possible; short lengths may have too few, longer ones take over."""
        left = self.train_prompts + self.validation_prompts
        shares = []
        for position, terms in enumerate(self.lengths):  # ascending capacity: what a length lacks goes to later ones
            shares.append(min(10**terms, left // (len(self.lengths) - position)))
            left -= shares[-1]
        return shares

    def prompts(self, split: Split) -> Dataset:
        """Columns "prompt", "terms" (the digits) and "answer" (their sum modulo 10)."""
        rows = self._digits[split]
        return Dataset.from_dict(
            {
                "prompt": [_prompt(terms) for terms in rows],
                "terms": [list(terms) for terms in rows],
                "answer": [sum(terms) % 10 for terms in rows],
            }
        )

    def verify(self, completion: str, example: dict[str, Any]) -> Verdict:
        pieces = completion.split(";")
        steps, start = [], 0
        for piece in pieces[:-1]:
            steps.append((start, start + len(piece) + 1))
            start = steps[-1][1]
        if steps:
            steps[-1] = (steps[-1][0], len(completion))
        elif completion:
            steps = [(0, len(completion))]
        right = _equations(example["terms"])
        rewards = [float(j < len(right) and completion[a:b] == right[j]) for j, (a, b) in enumerate(steps)]
        last = _STEP.fullmatch(pieces[-2]) if len(pieces) > 1 and not pieces[-1] else None
        if last is None:
            return Verdict(terms={"accuracy": 0.0}, steps=steps, step_rewards=rewards)
        accuracy = float(int(last[1]) == sum(example["terms"]) % 10)
        span = (len(completion) - 2, len(completion) - 1)
        return Verdict(terms={"accuracy": accuracy}, answer_span=span, steps=steps, step_rewards=rewards)

    def demonstrations(self, count: int, seed: int, error: float) -> Dataset:
        """`count` worked prompts, drawn with replacement, all lengths alike, none from the validation split. In a share
        `error` of the steps the teacher writes a wrong result (any of the nine) and goes on from it."""
        if not 0 <= error <= 1:
            raise UsageError(f"the teacher's error is {error}: give a share between 0 and 1")
        generator = random.Random(f"RunningSums/{self.seed}/demonstrations/{seed}")
        held_out = set(self._digits["validation"])
        prompts: list[str] = []
        completions: list[str] = []
        while len(prompts) < count:
            terms = tuple(generator.randrange(10) for _ in range(generator.choice(self.lengths)))
            if terms in held_out:
                continue
            prompts.append(_prompt(terms))
            completions.append(_worked(terms, error, generator))
        return Dataset.from_dict({"prompt": prompts, "completion": completions})


def _prompt(terms: tuple[int, ...]) -> str:
    return "+".join(map(str, terms)) + "="


def _equations(terms: list[int]) -> list[str]:
    """The right steps, one a term beyond the first."""
    steps, total = [], terms[0]
    for term in terms[1:]:
        result = (total + term) % 10
        steps.append(f"{total}+{term}={result};")
        total = result
    return steps


def _worked(terms: tuple[int, ...], error: float, generator: random.Random) -> str:
    text, total = "", terms[0]
    for term in terms[1:]:
        result = (total + term) % 10
        if generator.random() < error:
            result = (result + generator.randrange(1, 10)) % 10
        text += f"{total}+{term}={result};"
        total = result
    return text
