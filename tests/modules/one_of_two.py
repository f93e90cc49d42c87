"""One of two processes (gloo, CPU) that hold the weights of one policy together by FSDP2, or one process alone.

    python -m tests.modules.one_of_two FOLDER RANK        RANK 0 or 1; "alone" does the work of both

writes what it found to FOLDER/RANK.pt. The policy is in float64, its layers are sharded one by one. The last part is a
fit by Lightning: manual optimisation with sampling in it, each process on its half of the prompts.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from apportion.algorithms import Clipped, KLPenalty, LeaveOneOut
from apportion.data import RolloutDataModule, RunningSums
from apportion.data.rewards import Reward
from apportion.data.sampler import Limits
from apportion.modules import Policy, PolicyGradient, SharedPrefixSampler
from apportion.modules.lean_pass import unlike_llama
from apportion.modules.signals import SignalContext
from apportion.modules.signals.answer_influence import AnswerInfluence
from apportion.modules.signals.scores import ScoreNorms
from tests.modules.whole_step import build_batch, build_policy

PREFIXES = [[5, 9, 30, 12, 44, 7], [7, 8], [61]]
SHARES = {"0": [range(0, 1), range(4, 7)], "1": [range(1, 3), range(0, 4)]}  # of the prefixes, and of the batch's rows
LENGTHS = {"0": 2, "1": 11}  # of completions


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for entrance in ("inference", "score"):  # whichever is first tells FSDP2 that the policy is the root
        register_fsdp_forward_method(policy, entrance)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def work(policy: Policy, rank: str) -> dict[str, Any]:
    """What a process does by itself: both sample the same, then other prompts to other lengths, then score what is
    theirs."""
    prefixes, rows = SHARES[rank]

    def sampled(prompts: range, tokens: int) -> dict[str, Tensor]:
        texts = [PREFIXES[prompt] for prompt in prompts]
        return vars(
            SharedPrefixSampler().sample(policy, texts, 5, "rollout", Limits(tokens), prompt_ids=prompts, step=0)
        )

    found = {"same": sampled(range(3), 11), "own": sampled(prefixes, LENGTHS[rank])}
    with policy.inference():
        found["decoded leanly"] = policy.split.lean and unlike_llama(policy.model) is None
    batch = build_batch()[torch.tensor(rows)]
    found["scores"] = {name: value.detach() for name, value in vars(policy.score(batch, True, True)).items()}
    context = SignalContext(policy, None, None, None, None, 0, 0, micro_batch_tokens=12)  # type: ignore[arg-type]
    for provider in (ScoreNorms(), AnswerInfluence()):
        found |= provider(batch, context)
    return found


class SumOfCharacters(Reward):
    def __call__(self, prompts, completions, verdicts, columns):
        return [sum(map(ord, completion)) % 7 for completion in completions]


class Halves(PolicyGradient):
    """Each process takes its half of the prompts. Keeps the gradients of its optimizer steps."""

    gradients: list[Tensor]
    micro_batches: int

    def configure_model(self) -> None:
        if self.trainer.world_size == 2 and not self.gradients:
            for policy in (self.policy, self.reference):
                shard(policy, self.device_mesh["data_parallel"])

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        half = len(batch) // self.trainer.world_size
        super().training_step(batch[half * self.global_rank :][:half], batch_idx)

    def micro_batch_loss(self, *arguments: Any) -> Tensor:
        self.micro_batches += 1
        return super().micro_batch_loss(*arguments)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([whole(p.grad).flatten() for p in self.policy.parameters()]))


def fit(alone: bool) -> dict[str, Any]:
    policy = build_policy("float64")
    policy.max_completion_tokens = 12
    module = Halves(
        policy,
        LeaveOneOut(),
        Clipped(),
        KLPenalty("k3_loss", 0.3),
        update_epochs=2,
        micro_batch_tokens=40,
        clip_gradient_norm=None,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.01),
    )
    module.gradients, module.micro_batches = [], 0
    data = RolloutDataModule(
        RunningSums(), SharedPrefixSampler(), group_size=3, prompts_per_step=4, reward=SumOfCharacters("sum")
    )
    two = {} if alone else {"strategy": ModelParallelStrategy(2, 1), "devices": 2, "use_distributed_sampler": False}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=2, limit_val_batches=0, **two, **quiet)
    trainer.fit(module, data)
    weights = torch.cat([whole(p).flatten() for p in policy.parameters()])
    return {"gradients": module.gradients, "weights": weights, "micro_batches": module.micro_batches}


def main(folder: Path, rank: str) -> None:
    torch.set_num_threads(1)
    policy = build_policy("float64")
    if rank == "alone":
        found = {"0": work(policy, "0"), "1": work(policy, "1")} | fit(alone=True)
    else:
        store = (folder / "store").as_uri()
        dist.init_process_group("gloo", store, timedelta(seconds=60), rank=int(rank), world_size=2)
        shard(policy, init_device_mesh("cpu", (2,)))
        found = {rank: work(policy, rank)} | fit(alone=False)
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
