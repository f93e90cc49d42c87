"""ReasoningGym: the procedural data sets of the package reasoning-gym, each with its own scorer."""

import dataclasses
import hashlib
import json
import logging
import numbers
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy
from datasets import Dataset

from ..errors import RunError, UsageError, nearest
from .answers import JUDGE_SECONDS, Answer, Extract, check_extract, check_readable, extract, one_line, time_limit
from .base import Split, Task, Verdict

log = logging.getLogger(__name__)

RIGHT = 1 - 1e-6  # scorers give exactly 1 for a right answer, and fractions for partly right or merely present ones

MOST_FAILURES = 100  # rows; when as many fail at the beginning, all would

# Their rows depend on the order of Python sets, so on PYTHONHASHSEED (found by running all data sets of 0.1.25 under
# several values).
HASH_SEEDED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})


class ReasoningGym(Task):
    """Any data set of reasoning-gym (https://github.com/open-thought/reasoning-gym), judged by its own scorer.

    Terms: "score" is what the scorer says of the extracted answer (0 if there is none; many scorers give 0.01 or a
    share for a wrong one); "accuracy" is 1 where the score is 1, else 0; "accuracy_strict" is the accuracy under
    `strict_extract`. The answer span is that of `extract`.

    An answer that makes the scorer raise is wrong if the scorer can score the reference answer; if it cannot, or takes
    longer than 5 seconds, the verdict is missing. Mind that a few scorers of reasoning-gym (binary_matrix, n_queens,
    spiral_matrix, string_insertion) `eval` the answer.

    Questions are drawn in order, at most ten times as many as wanted. The first different ones are for validation; the
    rest, without those that are in the validation split, are to train on. Questions to train on may come twice, as the
    data set makes them: without repeats its rarer kinds (short sums, say, of which there are few) would be used up.
    Questions that the data set fails to make, or that cannot be stored, are left out, which is logged.

    Args:
        name: the data set, say chain_sum, gsm_symbolic or countdown.
        options: options of the data set's own configuration, without size and seed. For the data set "composite":
            {"datasets": [{"name": …, "weight": …, "config": {…}}, …]}.
        train_prompts: questions to train on, none of them in the validation split.
        validation_prompts: different questions to validate on.
        seed: which questions.
        system_prompt: a system message that says how to answer. With one, a prompt is a list of chat messages, else
            plain text.
        question_format: a template around the question, with {question} where it goes.
        extract: how the answer is read from a completion: last_number, answer_tags, hashes, boxed or text.
        strict_extract: a second, stricter way to read it, judged too and logged as "accuracy_strict".
    """

    verify_is_pure = True

    def __init__(
        self,
        name: str,
        options: dict[str, Any] | None = None,
        train_prompts: int = 2000,
        validation_prompts: int = 200,
        seed: int = 0,
        system_prompt: str | None = None,
        question_format: str | None = None,
        extract: Extract = "last_number",
        strict_extract: Extract | None = None,
    ) -> None:
        for option, value in (("train_prompts", train_prompts), ("validation_prompts", validation_prompts)):
            if value < 1:
                raise UsageError(f"ReasoningGym has {option}={value}: give at least 1")
        if question_format is not None and "{question}" not in question_format:
            raise UsageError(f"ReasoningGym has question_format={question_format!r}: it must contain {{question}}")
        self.name = name
        self.options = _checked_options(name, options or {})
        self.train_prompts = train_prompts
        self.validation_prompts = validation_prompts
        self.seed = seed
        self.system_prompt = system_prompt
        self.question_format = question_format
        check_extract(extract, "extract")
        check_extract(strict_extract, "strict_extract")
        self.extract: Extract = extract
        self.strict_extract: Extract | None = strict_extract
        self._scorer = self._dataset(10)

    def prompts(self, split: Split) -> Dataset:
        """Columns "prompt", "question", "answer" (the reference, where the data set has one) and "metadata" (JSON; a
        tuple is {"__tuple__": […]} and a mapping with keys that are no text {"__items__": [[key, value], …]})."""
        return Dataset.from_list(self._rows[split])

    def verify(self, completion: str, example: dict[str, Any]) -> Verdict:
        answer = extract(completion, self.extract)
        score = self._score(answer, example)
        terms = {"accuracy": float(score >= RIGHT), "score": score}
        if self.strict_extract is not None:
            strict = extract(completion, self.strict_extract)
            same = (strict and strict.text) == (answer and answer.text)
            terms["accuracy_strict"] = terms["accuracy"] if same else float(self._score(strict, example) >= RIGHT)
        return Verdict(terms=terms, answer_span=answer.span if answer else None)

    def _score(self, answer: Answer | None, example: dict[str, Any]) -> float:
        if answer is None:
            return 0.0
        entry = {
            "question": example["question"],
            "answer": example["answer"],
            "metadata": _unpack(json.loads(example["metadata"])),
        }
        with time_limit(JUDGE_SECONDS, f"the scorer of '{self.name}'"):
            try:
                return float(self._scorer.score_answer(answer.text, entry))
            except Exception as error:
                self._scorer.score_answer(entry["answer"], entry)  # raises too if the fault is not the answer's
                log.debug("the scorer of '%s' cannot read '%s' (%r): wrong", self.name, one_line(answer.text), error)
                return 0.0

    @cached_property
    def _rows(self) -> dict[Split, list[dict[str, Any]]]:
        if self.name in HASH_SEEDED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            log.warning(
                "the questions of reasoning-gym's '%s' differ from process to process: set PYTHONHASHSEED=0 before a "
                "run that is to be repeated or resumed",
                self.name,
            )
        wanted = self.train_prompts + self.validation_prompts
        most = 10 * wanted + 100
        validation: dict[str, dict[str, Any]] = {}
        train: list[dict[str, Any]] = []
        failures: list[str] = []
        drawn = 0
        with _own_random_numbers(self._dataset_seed):
            dataset = self._dataset(most)
            while drawn < most and len(train) < self.train_prompts:
                drawn += 1
                try:
                    row = self._row(dataset[drawn - 1])
                except Exception as error:
                    failures.append(f"row {drawn - 1}: {one_line(repr(error))}")
                    if len(failures) == drawn == MOST_FAILURES:
                        break
                    continue
                if len(validation) < self.validation_prompts:
                    validation.setdefault(row["question"], row)
                elif row["question"] not in validation:
                    train.append(row)
        if len(failures) == drawn:
            raise RunError(
                f"reasoning-gym's '{self.name}' failed on each of {drawn} rows ({failures[0]}): change its options"
            )
        if failures:
            log.warning(
                "%d of %d rows of reasoning-gym's '%s' could not be made or stored and are left out (the first, %s)",
                len(failures),
                drawn,
                self.name,
                failures[0],
            )
        if len(train) < self.train_prompts:
            raise UsageError(
                f"reasoning-gym's '{self.name}' gave {len(validation)} different questions to validate on and "
                f"{len(train)} others to train on in {most} draws, but {self.validation_prompts} and "
                f"{self.train_prompts} are asked for: ask for fewer or widen its options"
            )
        chosen: dict[Split, list[dict[str, Any]]] = {"validation": list(validation.values()), "train": train}
        check_readable((row["answer"] for rows in chosen.values() for row in rows), self.extract, f"'{self.name}'")
        return chosen

    def _row(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Raises whatever comes if the entry cannot be stored."""
        question = entry["question"]
        if not isinstance(entry["answer"], str | None):
            raise TypeError(f"its answer is a {type(entry['answer']).__name__}, not text")
        f"{question}{entry['answer']}".encode()  # half a character cannot be stored
        text = self.question_format.replace("{question}", question) if self.question_format else question
        prompt: Any = text
        if self.system_prompt is not None:
            prompt = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": text}]
        metadata = json.dumps(_pack(entry["metadata"]), default=_plain)
        return {"prompt": prompt, "question": question, "answer": entry["answer"], "metadata": metadata}

    @property
    def _dataset_seed(self) -> int:
        """reasoning-gym seeds row i with seed + i, so neighbouring seeds would share almost all rows."""
        return int.from_bytes(hashlib.blake2b(f"{self.name}/{self.seed}".encode(), digest_size=4).digest(), "big") >> 2

    def _dataset(self, size: int) -> Any:
        from reasoning_gym import create_dataset

        try:
            return create_dataset(self.name, seed=self._dataset_seed, size=size, **self.options)
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise UsageError(
                f"reasoning-gym refuses the options {self.options} of '{self.name}': {reason}; mend data.task.options"
            ) from error


def _checked_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UsageError(f"reasoning-gym has no data set '{name}': {nearest(name, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    for option in options:
        if option in ("size", "seed"):
            raise UsageError(
                f"data.task.options has '{option}': the task sets it; use train_prompts, validation_prompts and seed"
            )
        if option not in known:
            raise UsageError(f"reasoning-gym's '{name}' has no option '{option}': {nearest(option, known)}")
    if name == "composite":
        parts = options.get("datasets") or []
        try:
            return {**options, "datasets": [DatasetSpec(**part) for part in parts]}
        except TypeError as error:
            raise UsageError(
                f"the datasets of reasoning-gym's 'composite' are {parts}: give a list of {{name, weight, config}}"
            ) from error
    return dict(options)


@contextmanager
def _own_random_numbers(seed: int) -> Iterator[None]:
    """A few data sets draw from, or seed, the global generators: give them their own, and put ours back."""
    python, numbers = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


def _pack(value: Any) -> Any:
    """JSON that keeps what JSON cannot: scorers tell tuples from lists and numbers from text."""
    if isinstance(value, tuple):
        return {"__tuple__": [_pack(item) for item in value]}
    if isinstance(value, Fraction):
        return {"__fraction__": str(value)}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _pack(item) for key, item in value.items()}
        return {"__items__": [[_pack(key), _pack(item)] for key, item in value.items()]}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_unpack(item) for item in value["__tuple__"])
        if value.keys() == {"__fraction__"}:
            return Fraction(value["__fraction__"])
        if value.keys() == {"__items__"}:
            return {_unpack(key): _unpack(item) for key, item in value["__items__"]}
        return {key: _unpack(item) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, numbers.Integral):  # sympy's too
        return int(value)
    if isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    raise TypeError(f"reasoning-gym's metadata holds a {type(value).__name__}, which JSON cannot hold")
