"""`apportion fit --dry-run`: what a fit would do, and what one rollout batch of it costs. Nothing is kept."""

import math
import sys
from typing import Any

import lightning as L
import torch

from apportion.callbacks import BudgetLimit
from apportion.callbacks.wording import duration
from apportion.data import RolloutDataModule
from apportion.modules import PolicyGradient, SharedPrefixSampler


def plan(module: PolicyGradient, data: RolloutDataModule, trainer: L.Trainer) -> list[str]:
    """The plan's lines. Runs one rollout batch without the warm start, and changes the module by it."""
    policy = module.policy
    warm_start, module.warm_start = module.warm_start, None
    once = L.Trainer(
        accelerator=policy.device.type if policy.device.type != "cpu" else trainer.accelerator,  # type: ignore[arg-type]
        precision=trainer.precision,
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    once.fit(module, data)
    assert module.record is not None
    rollouts, seconds = module.record.rollouts, module.record.seconds
    parameters = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    runs = len(list(policy.micro_batches(rollouts, module.micro_batch_tokens)))
    longest = int(rollouts.prompt_mask.sum(1).max())
    lines = [
        f"Model: {type(policy.model).__name__}, {parameters:,} parameters"
        + (f" ({trained:,} trained)" if trained != parameters else "")
        + f", weights in {str(policy.model.dtype).removeprefix('torch.')}, precision {trainer.precision}.",
        f"Rollout batch: {data.prompts_per_step} prompts x {data.group_size} completions of at most "
        f"{policy.max_completion_tokens} tokens, {_sampled_by(module, data)}.",
        f"Update: {module.update_epochs} x {module.minibatches} optimizer steps, {policy.scoring} micro-batches of at "
        f"most {module.micro_batch_tokens:,} tokens.",
        f"One rollout batch, measured: prompts of up to {longest} tokens, {int(rollouts.lengths.sum()):,} tokens "
        f"sampled in {_seconds(seconds, 'rollout')}, scored in {_seconds(seconds, 'score')}, updated in "
        f"{_seconds(seconds, 'update')} ({runs} micro-batches); peak memory {peak_memory(policy):.1f} GiB.",
    ]
    if warm_start is not None:
        lines.append(f"Before it: a warm start of {warm_start.steps} steps of {warm_start.batch_size}, not run now.")
    return [*lines, *_end(module, data, trainer, sum(seconds.values()))]


def _sampled_by(module: PolicyGradient, data: RolloutDataModule) -> str:
    sampler = data.sampler
    name = type(sampler).__name__
    if not isinstance(sampler, SharedPrefixSampler) or not module.policy.shares_prompts:
        return f"sampled by {name}"
    limits = module.policy.limits("rollout")
    prefixes = [row["prompt_tokens"] for row in data.train_rows[: data.prompts_per_step]]
    waves = math.ceil(len(prefixes) / sampler.prompts_at_once(module.policy, prefixes, data.group_size, limits))
    return f"sampled by {name} in {waves} {'wave' if waves == 1 else 'waves'}"


def _end(module: PolicyGradient, data: RolloutDataModule, trainer: L.Trainer, seconds: float) -> list[str]:
    limits = [c for c in trainer.callbacks if isinstance(c, BudgetLimit)]  # type: ignore[attr-defined]
    size = data.prompts_per_step * data.group_size
    an_epoch = len(data.train_rows) // data.prompts_per_step
    share = trainer.limit_train_batches
    batches: list[float] = []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and share is not None:
        of_an_epoch = min(an_epoch, share) if isinstance(share, int) else int(an_epoch * share)
        batches.append(trainer.max_epochs * of_an_epoch)
    if trainer.max_steps > 0:
        batches.append(math.ceil(trainer.max_steps / (module.update_epochs * module.minibatches)))
    for limit in limits:
        if limit.completions is not None:
            batches.append(math.ceil(limit.completions / size))
        if limit.tokens is not None:
            batches.append(math.ceil(limit.tokens / max(1, data.budget.tokens)))  # as in the one that was measured
    if not batches:
        return ["The fit has no end: give --trainer.max_steps, --trainer.max_epochs or --budget.completions."]
    count = int(min(batches))
    return [
        f"The fit: {count:,} rollout batches, {count * size:,} completions; about {duration(count * seconds)} at this "
        "pace, and the validations."
    ]


def _seconds(seconds: dict[str, float], phase: str) -> str:
    return f"{seconds.get(phase, 0.0):.1f} s"


def peak_memory(policy: Any) -> float:
    """GiB: of the process, or of the GPU that the policy is on."""
    if policy.device.type == "cuda":
        return torch.cuda.max_memory_allocated(policy.device) / 2**30
    import resource  # not on every system, and only needed here

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
