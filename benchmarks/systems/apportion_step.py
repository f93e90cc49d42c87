"""Steps of apportion's own trainer. Options: those of Policy; sampler, micro_batch_tokens, fresh (random weights),
micro_batch_rows (so many rows in a micro-batch, whatever the layout)."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
from datasets import Dataset

from apportion.algorithms.advantages import GroupMean
from apportion.algorithms.objectives import Clipped
from apportion.data import RolloutDataModule, Verdict
from apportion.data.rewards import CallableReward
from apportion.data.tasks import Task
from apportion.modules import GenerateSampler, Policy, PolicyGradient, SharedPrefixSampler
from apportion.modules.fresh import FreshModel
from benchmarks.work import answer, job

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


class Prompts(Task):
    """The job's prompts as they are; what a completion is worth is the reward's business."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def prompts(self, split: str) -> Dataset:
        return Dataset.from_dict({"prompt": self.texts if split == "train" else self.texts[:1]})

    def verify(self, completion: str, example: dict[str, Any]) -> Verdict:
        return Verdict(terms={"accuracy": 0.0})


class Steps(L.Callback):
    """Seconds of every step, by phase."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.rows.append({"step": time.perf_counter() - self.start, **module.record.seconds})
        rollouts = module.record.rollouts
        self.size = {"tokens": int(rollouts.lengths.sum()), "prompt_tokens": int(rollouts.prompt_mask.sum())}


def main() -> None:
    work = job()
    options = dict(work.options)
    sampler = {"shared": SharedPrefixSampler, "generate": GenerateSampler}[options.pop("sampler", "shared")]()
    micro_batch_tokens = options.pop("micro_batch_tokens", None)
    micro_batch_rows = options.pop("micro_batch_rows", None)
    fresh = options.pop("fresh", None)
    if fresh is None:
        policy = Policy(work.model, max_completion_tokens=work.tokens, **options)
    else:
        end = ["\n"]  # never drawn often enough to matter: lengths are reported
        policy = Policy(fresh=FreshModel(**fresh), max_completion_tokens=work.tokens, end_tokens=end, **options)
    if micro_batch_rows is not None:
        policy.micro_batches = lambda rollouts, _: iter(torch.arange(len(rollouts)).split(micro_batch_rows))
    module = PolicyGradient(
        policy,
        GroupMean(scale="std"),
        Clipped(),
        micro_batch_tokens=micro_batch_tokens,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
    )
    data = RolloutDataModule(
        Prompts(work.prompts),
        sampler,
        group_size=work.group_size,
        prompts_per_step=len(work.prompts),
        reward=CallableReward("benchmarks.work.distinct_characters"),
    )
    steps = Steps()
    L.Trainer(
        accelerator="cpu",
        precision=PRECISIONS[work.precision],  # type: ignore[arg-type]
        max_epochs=work.warm_up + work.steps,
        callbacks=[steps],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module, data)
    measured = steps.rows[work.warm_up :]
    answer(
        seconds={name: [row[name] for row in measured] for name in measured[0]},
        prompts=len(work.prompts),
        group_size=work.group_size,
        parameters=sum(p.numel() for p in policy.parameters()),
        layer_parameters=sum(p.numel() for p in policy.model.model.layers.parameters()),
        head_parameters=policy.model.lm_head.weight.numel(),
        **steps.size,
        micro_batch_tokens=module.micro_batch_tokens,
    )


main()
