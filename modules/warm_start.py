"""The warm start: supervised training of a policy on worked demonstrations. Its cache is in warm_start_cache.py."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data.batch import RolloutBatch
from ..data.configurable import Configurable, describe
from ..data.errors import RunError, UsageError
from ..data.tasks.base import Task
from .policy import Policy
from .warm_start_cache import Curve, WarmStartCache

Demonstration = tuple[list[int], list[int]]  # token ids of the prompt and of the completion, its end token included
Log = Callable[[dict[str, float], int], None]


class WarmStart(Configurable, L.LightningModule):
    """Supervised fine-tuning on worked demonstrations, the step before reinforcement learning.

    The loss is the mean negative log-likelihood of the completions' tokens, the end token included, at temperature 1.
    AdamW without weight decay, one cycle of the learning rate.

    Inside a reinforcement-learning fit it is made without a policy and `run` trains the fit's. Alone it is an ordinary
    LightningModule: `Trainer.fit(module, train_dataloaders=module.loader(demonstrations))`.

    Args:
        policy: the policy to train; only for use alone.
        demonstrations: worked examples to learn from.
        steps: optimizer steps.
        batch_size: demonstrations in a step.
        peak_learning_rate: of the one cycle.
        teacher_error: share of the teacher's steps that are wrong, so that there is something left to learn.
        clip_gradient_norm: largest gradient norm; none = no clipping.
        cache: keep the trained weights, and use them when policy, demonstrations and options are the same again. They
            lie in $APPORTION_CACHE, or in ~/.cache/apportion, in the folder warm_start.
        seed: of the demonstrations and their order.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        demonstrations: int = 8000,
        steps: int = 600,
        batch_size: int = 32,
        peak_learning_rate: float = 3e-3,
        teacher_error: float = 0.2,
        clip_gradient_norm: float | None = 1.0,
        cache: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("demonstrations", demonstrations), ("steps", steps), ("batch_size", batch_size)):
            if value < 1:
                raise UsageError(f"model.warm_start.{name} is {value}: give a whole number of at least 1")
        if not peak_learning_rate > 0:
            raise UsageError(f"model.warm_start.peak_learning_rate is {peak_learning_rate}: give a number above 0")
        if not 0 <= teacher_error <= 1:
            raise UsageError(f"model.warm_start.teacher_error is {teacher_error}: give a share between 0 and 1")
        self.policy = policy
        self.demonstrations = demonstrations
        self.steps = steps
        self.batch_size = batch_size
        self.peak_learning_rate = peak_learning_rate
        self.teacher_error = teacher_error
        self.clip_gradient_norm = clip_gradient_norm
        self.cache = cache
        self.seed = seed
        self.save_hyperparameters(
            {"_instantiator": "lightning.pytorch.cli.instantiate_module", **describe(self._arguments)}
        )

    # ---- supervised training -------------------------------------------------------------------------------------

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        tokens = batch.completion_mask.sum()
        loss = -self._own_policy.score(batch, temperature=1.0).logp.sum() / tokens
        if not torch.isfinite(loss):
            raise RunError(
                f"the loss of the warm start is {loss.item()} at step {self.global_step}: "
                f"lower model.warm_start.peak_learning_rate ({self.peak_learning_rate})"
            )
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log_dict({"warmup/loss": loss.detach(), "warmup/lr": rate}, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.peak_learning_rate, weight_decay=0.0, fused=True)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.peak_learning_rate,
            total_steps=int(steps) if 0 < steps < float("inf") else self.steps,
            pct_start=0.1,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.clip_gradient_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters(), self.clip_gradient_norm)

    def loader(self, demonstrations: Dataset) -> DataLoader[Demonstration]:
        """`steps` batches of a data set with the columns "prompt" and "completion", in an order drawn from the seed."""
        return self._loader(encode(self._own_policy, demonstrations))

    @property
    def _own_policy(self) -> Policy:
        if not isinstance(self.policy, Policy):
            raise UsageError("this WarmStart has no policy to train: give WarmStart(policy=…), or call run with one")
        return self.policy

    def _loader(self, rows: list[Demonstration]) -> DataLoader[Demonstration]:
        pad = self._own_policy.pad_token_id
        generator = torch.Generator().manual_seed(self.seed)
        wanted = self.steps * self.batch_size
        order: list[int] = []
        while len(order) < wanted:
            order += torch.randperm(len(rows), generator=generator).tolist()
        return DataLoader(
            rows,  # type: ignore[arg-type]
            sampler=order[:wanted],
            batch_size=self.batch_size,
            collate_fn=lambda batch: collate(batch, pad),
            generator=torch.Generator(),  # its own: the loader must not draw from the global one
        )

    # ---- inside another fit --------------------------------------------------------------------------------------

    def run(self, policy: Policy, task: Task, trainer: L.Trainer, log: Log) -> None:
        """Train `policy` in place on the demonstrations of `task`, or put the weights of an equal earlier run into it.

        A fit within the fit of `trainer`, on its device and in its precision. Random states, and which modules are in
        training mode, are left as they were. Under several processes each does the same.

        Args:
            log: called with warmup/loss and warmup/lr of every step, also when they come from the cache.
        """
        if self.policy is not None:
            raise UsageError(
                "model.warm_start.policy was given inside a fit that has a policy of its own: leave it out"
            )
        with isolate_rng(), torch.inference_mode(False), torch.enable_grad():
            rows = encode(policy, task.demonstrations(self.demonstrations, self.seed, self.teacher_error))
            options = {**self._options(), "precision": str(trainer.precision)}
            cache = WarmStartCache.of(policy, rows, options) if self.cache else None
            curve = cache.load(policy) if cache is not None else None
            if curve is not None:
                for step, metrics in enumerate(curve):
                    log(metrics, step)
                return
            curve = WarmStart(policy, **self._options())._fit_within(trainer, rows, log)
            if cache is not None:
                cache.save(policy, curve)

    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in self._arguments.items() if name not in ("policy", "cache")}

    def _fit_within(self, outer: L.Trainer, rows: list[Demonstration], log: Log) -> Curve:
        policy = self._own_policy
        device = policy.device
        training = {module: module.training for module in policy.modules()}
        forward = ForwardMetrics(log)
        self.train()
        with _silence():
            trainer = L.Trainer(
                accelerator=device.type,
                devices=1 if device.index is None else [device.index],
                precision=outer.precision,
                max_steps=self.steps,
                callbacks=[forward],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
            )
            trainer.fit(self, train_dataloaders=self._loader(rows))
        policy.to(device)  # a trainer leaves its module on the CPU
        for module, mode in training.items():
            module.training = mode
        policy.zero_grad(set_to_none=True)
        if trainer.global_step < self.steps:
            raise RunError(f"the warm start was interrupted after {trainer.global_step} of {self.steps} steps")
        return forward.curve


class ForwardMetrics(L.Callback):
    """Hands what a warm start logs to a function, and keeps it."""

    def __init__(self, log: Log) -> None:
        self.log_to = log
        self.curve: Curve = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("warmup/")}
        self.log_to(metrics, len(self.curve))
        self.curve.append(metrics)


def encode(policy: Policy, demonstrations: Dataset) -> list[Demonstration]:
    """Token ids as the policy would meet and write them. Raises a UsageError if it could never write one."""
    end = policy.end_token_ids[0]
    rows = [
        (policy.encode_prompt(prompt), [*policy.encode_text(completion), end])
        for prompt, completion in zip(demonstrations["prompt"], demonstrations["completion"], strict=True)
    ]
    longest = max((len(completion) for _, completion in rows), default=0)
    if longest > policy.max_completion_tokens:
        raise UsageError(
            f"model.policy.max_completion_tokens is {policy.max_completion_tokens}, but the warm start has "
            f"demonstrations of {longest} tokens: raise it"
        )
    return rows


def collate(rows: Sequence[Demonstration], pad: int) -> RolloutBatch:
    """Demonstrations as a batch that a policy can score, each a prompt and group of its own. The rewards are all 0."""
    n = len(rows)
    width, length = max(len(prompt) for prompt, _ in rows), max(len(completion) for _, completion in rows)
    prompt_ids, prompt_mask = torch.full((n, width), pad), torch.zeros(n, width, dtype=torch.bool)
    ids, mask = torch.full((n, length), pad), torch.zeros(n, length, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(rows):
        prompt_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[row, width - len(prompt) :] = True
        ids[row, : len(completion)] = torch.tensor(completion)
        mask[row, : len(completion)] = True
    number, yes, no = torch.arange(n), torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_id=number,
        prompt_index=number,
        group=number,
        completion_ids=ids,
        completion_mask=mask,
        action_mask=mask,
        reward=torch.zeros(n),
        reward_valid=no,
        truncated=no,
        in_loss=yes,
        policy_version=torch.zeros(n, dtype=torch.long),
    )


@contextmanager
def _silence() -> Iterator[None]:
    """A fit within a fit does not announce devices and loaders a second time."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
