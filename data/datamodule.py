"""The rollout datamodule: which prompts a step gets, and how they become a verified RolloutBatch."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Sampler as IndexSampler

from .assemble import Truncated, assemble
from .batch import RolloutBatch
from .budget import BudgetCounter
from .configurable import Configurable
from .errors import RunError, UsageError
from .rewards import Reward, TaskVerdict, check_rewards, combine
from .sampler import Limits, PolicyLike, Purpose, Sampler, Samples
from .schemes import Direct, RolloutRequest, RolloutScheme
from .tasks.base import Split, Task, Verdict
from .verification import Verification

log = logging.getLogger(__name__)


@dataclass
class Validation:
    """How a policy is judged.

    Args:
        prompts: at most this many prompts of the validation split.
        samples: completions a prompt; more than one needs a temperature.
        temperature: 0 = greedy.
        pass_at: values of k for the unbiased pass@k; each needs k <= samples.
        prompts_per_call: prompts given to the sampler at once.
    """

    prompts: int = 200
    samples: int = 1
    temperature: float = 0.0
    pass_at: list[int] = field(default_factory=list)
    prompts_per_call: int = 64

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "prompts_per_call"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"data.validation.{name} is {getattr(self, name)}: give a whole number of at least 1 (to validate "
                    "never, set trainer.limit_val_batches to 0)"
                )
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"data.validation.temperature is {self.temperature}: give 0 (greedy) or a number above")
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                f"data.validation.samples is {self.samples} with greedy decoding, which gives {self.samples} equal "
                "completions: set data.validation.temperature above 0 or data.validation.samples to 1"
            )
        too_large = [k for k in self.pass_at if not 1 <= k <= self.samples]
        if too_large:
            raise UsageError(
                f"data.validation.pass_at has k = {too_large[0]}, but pass@k needs 1 <= k <= data.validation.samples "
                f"({self.samples}): raise data.validation.samples or lower k"
            )


class PromptBatches(IndexSampler[list[int]]):
    """Batches of prompt numbers, shuffled anew each epoch by (seed, epoch), without an incomplete last one.

    `position`, the batches given out so far, is the whole state: a resumed run goes on with the next batch.
    """

    def __init__(self, prompts: int, batch_size: int, seed: int) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0

    def __len__(self) -> int:
        return self.prompts // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self.position, len(self))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.prompts, generator=generator).tolist()
        for batch in range(first, len(self)):
            self.position += 1  # before the yield: a sized loader never runs the code after the last one
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]


class RolloutDataModule(Configurable, L.LightningDataModule):
    """Prompts of a task, and their rollouts under a policy.

    Args:
        task: where prompts and verdicts come from.
        group_size: R, completions of one prompt that are compared with each other.
        prompts_per_step: prompts in one rollout batch.
        sampler: the sampling engine.
        reward: what a completion is worth; several terms are added with their weights.
        scheme: how prompts become rollouts.
        truncated: what happens to completions cut by the length limit: "keep" them as they are, "mask" them out of
            every loss (their reward stays in the group's baseline), or "penalise" their reward.
        truncation_penalty: subtracted from the reward of a truncated completion, with truncated="penalise".
        validation: how the policy is judged.
        validation_sets: further tasks to validate on, by name (logged as val/<name>/...); the task's own validation
            split is then called "task".
        seed: of prompt order and of every sampled token.
    """

    def __init__(
        self,
        task: Task,
        sampler: Sampler,
        group_size: int = 8,
        prompts_per_step: int = 16,
        reward: Reward | list[Reward] | None = None,
        scheme: RolloutScheme | None = None,
        truncated: Truncated = "keep",
        truncation_penalty: float = 0.0,
        validation: Validation | None = None,
        validation_sets: dict[str, Task] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("group_size", group_size), ("prompts_per_step", prompts_per_step)):
            if value < 1:
                raise UsageError(f"data.{name} is {value}: give a whole number of at least 1")
        if truncation_penalty and truncated != "penalise":
            raise UsageError(
                f"data.truncation_penalty is {truncation_penalty} but data.truncated is '{truncated}': "
                "set data.truncated to 'penalise' or the penalty to 0"
            )
        self.task = task
        self.sampler = sampler
        self.group_size = group_size
        self.prompts_per_step = prompts_per_step
        self.rewards = [TaskVerdict()] if reward is None else [reward] if isinstance(reward, Reward) else reward
        check_rewards(self.rewards)
        self.scheme = scheme or Direct()
        self.truncated: Truncated = truncated
        self.truncation_penalty = truncation_penalty
        self.validation = validation or Validation()
        self.validation_tasks = {"task": task, **(validation_sets or {})} if validation_sets else {"": task}
        self.seed = seed
        self.budget = BudgetCounter()
        self.reward_failures: dict[str, int] = {}
        self.skipped_prompts = 0
        self._verification = Verification()
        self._train: list[dict[str, Any]] = []
        self._validation: list[list[dict[str, Any]]] = []
        self._order: PromptBatches | None = None
        self._restored_position = 0
        sampler.budget = self.budget
        sampler.run_seed = seed

    # ---- prompts -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load and tokenize the prompts. Those longer than the policy's limit are skipped and counted."""
        trainer = self.trainer
        assert trainer is not None
        policy: PolicyLike = trainer.lightning_module.policy  # type: ignore[assignment]
        if stage == "fit" and not self._train:
            self._train = self.load_prompts(self.task, "train", policy)
            if len(self._train) < self.prompts_per_step:
                raise UsageError(
                    f"data.prompts_per_step is {self.prompts_per_step} but the task has {len(self._train)} training "
                    "prompts: lower it or give the task more prompts"
                )
            self._order = PromptBatches(len(self._train), self.prompts_per_step, self.seed)
            self._order.position = self._restored_position
        if not self._validation:
            self._validation = [
                self.load_prompts(task, "validation", policy, self.validation.prompts)
                for task in self.validation_tasks.values()
            ]

    @property
    def train_rows(self) -> list[dict[str, Any]]:
        """The training prompts, once `setup` has loaded them."""
        return self._train

    @property
    def batches_in_an_epoch(self) -> int:
        """Rollout batches in one pass over the training prompts."""
        return len(self._train) // self.prompts_per_step

    def load_prompts(
        self, task: Task, split: Split, policy: PolicyLike, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """The rows of a split that the policy can take, each with "prompt_id" and "prompt_tokens"."""
        name = type(task).__name__
        rows: list[dict[str, Any]] = []
        skipped = 0
        for number, row in enumerate(task.prompts(split)):
            tokens = policy.encode_prompt(row["prompt"])  # type: ignore[index, call-overload]
            if not tokens or (policy.max_prompt_tokens is not None and len(tokens) > policy.max_prompt_tokens):
                skipped += 1
                continue
            rows.append({**row, "prompt_id": number, "prompt_tokens": tokens})  # type: ignore[dict-item]
            if limit is not None and len(rows) == limit:
                break
        if not rows and skipped:
            raise UsageError(
                f"no {split} prompt of {name} is within the limit of {policy.max_prompt_tokens} tokens "
                f"({skipped} are longer or empty): raise model.policy.max_prompt_tokens"
            )
        if not rows:
            raise UsageError(f"{name} has no {split} prompts: give a data set with at least one row in that split")
        if skipped:
            self.skipped_prompts += skipped
            log.warning(
                "%d %s prompts of %s are empty or longer than %s tokens and were skipped; %d are left",
                skipped,
                split,
                name,
                policy.max_prompt_tokens,
                len(rows),
            )
        return rows

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        assert self._order is not None
        return DataLoader(
            self._train,  # type: ignore[arg-type]
            batch_sampler=self._order,
            collate_fn=list,
            generator=torch.Generator(),  # its own: the loader must not draw from the global one
        )

    def val_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        return [
            DataLoader(
                rows,  # type: ignore[arg-type]
                batch_size=self.validation.prompts_per_call,
                collate_fn=list,
                generator=torch.Generator(),
            )
            for rows in self._validation
        ]

    def test_dataloader(self) -> list[DataLoader[dict[str, Any]]]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(
            self._validation[0],  # type: ignore[arg-type]
            batch_size=self.prompts_per_step,
            collate_fn=list,
            generator=torch.Generator(),
        )

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def collect(
        self, examples: list[dict[str, Any]], policy: PolicyLike, step: int, purpose: Purpose = "rollout"
    ) -> RolloutBatch:
        """Sample and verify one rollout batch by the scheme.

        Raises RunError when every reward of the batch is missing.
        """
        tokens = [example["prompt_tokens"] for example in examples]

        def verify(examples: Sequence[dict[str, Any]], prefixes: Sequence[Sequence[int]], samples: Samples):
            return self._verified(examples, prefixes, samples, policy)

        def verify_ahead(examples: Sequence[dict[str, Any]], samples: Samples) -> None:
            self._verification.ahead(self.task, self._texts(samples, policy), _repeated(examples, samples))

        rollouts = self.scheme.collect(
            RolloutRequest(examples, tokens, self.group_size, step, purpose, policy, self.sampler, verify, verify_ahead)
        )
        if not rollouts.reward_valid.any():
            reasons = "; ".join(f"{reason} ({count})" for reason, count in self.reward_failures.items())
            raise RunError(
                f"all {len(rollouts)} rewards of rollout batch {step} are missing ({reasons}): mend the reward or the "
                "verifier; a step with no reward teaches nothing"
            )
        return rollouts

    def _verified(
        self,
        examples: Sequence[dict[str, Any]],
        prefixes: Sequence[Sequence[int]],
        samples: Samples,
        policy: PolicyLike,
    ) -> RolloutBatch:
        rows = _repeated(examples, samples)
        texts = self._texts(samples, policy)
        verdicts = self._verification.verdicts(self.task, texts, rows)
        hidden = ("prompt_tokens", "prompt")
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in hidden}
        rewards = combine(self.rewards, [row["prompt"] for row in rows], texts, verdicts, columns)
        for reason, count in rewards.failures.items():
            self.reward_failures[reason] = self.reward_failures.get(reason, 0) + count
        return assemble(
            samples,
            prefixes,
            [policy.decode(prefix) for prefix in prefixes],
            examples,
            texts,
            verdicts,
            rewards,
            policy,
            self.truncated,
            self.truncation_penalty,
        )

    def evaluate(
        self, examples: list[dict[str, Any]], policy: PolicyLike, dataset: int = 0
    ) -> tuple[list[list[str]], list[list[Verdict]]]:
        """Validation completions of each prompt and their verdicts, (P, samples) each. Always the same seeds, so that
        two evaluations differ by the policy only."""
        options = self.validation
        base = policy.limits("validation")
        limits = Limits(base.max_new_tokens, options.temperature, base.top_k, base.top_p)
        samples = self.sampler.sample(
            policy,
            [example["prompt_tokens"] for example in examples],
            options.samples,
            "validation",
            limits,
            prompt_ids=[example["prompt_id"] for example in examples],
            step=0,
        )
        texts = self._texts(samples, policy)
        rows = _repeated(examples, samples)
        verdicts = self._verification.verdicts(list(self.validation_tasks.values())[dataset], texts, rows)
        cut = range(0, len(rows), options.samples)
        return [texts[i : i + options.samples] for i in cut], [verdicts[i : i + options.samples] for i in cut]

    @staticmethod
    def _texts(samples: Samples, policy: PolicyLike) -> list[str]:
        return [policy.decode(ids[mask].tolist()) for ids, mask in zip(samples.ids, samples.mask, strict=True)]

    def teardown(self, stage: str) -> None:
        self._verification.close()

    def on_exception(self, exception: BaseException) -> None:
        self._verification.close()

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        position = self._order.position if self._order is not None else self._restored_position
        return {"position": position, "budget": self.budget.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_position = state_dict["position"]
        if self._order is not None:
            self._order.position = self._restored_position
        self.budget.load_state_dict(state_dict["budget"])


def _repeated(examples: Sequence[dict[str, Any]], samples: Samples) -> list[dict[str, Any]]:
    """The example of each of N completions."""
    members = len(samples.ids) // len(examples)
    return [example for example in examples for _ in range(members)]
