"""Where the time of a step goes: `python -m benchmarks.profile`, a few minutes. It fills the tables of docs/speed.md.

Operators: shares of torch's operators in sampling and in the update, on the work of the benchmark. Gaps: between the
log-probabilities of sampler and scorer, on the same work. Overhead: how much of a step of the demo's small model is
spent outside sampling, losses, backward passes and optimizer.
"""

import json
import runpy
import sys
import tempfile
import time
from collections import Counter
from contextlib import chdir
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.profiler import profile

from apportion.cli import main as apportion
from apportion.data import Verdict
from apportion.data.assemble import assemble
from apportion.data.rewards import RewardResult
from apportion.modules import Policy, PolicyGradient, SharedPrefixSampler
from benchmarks.plan import PRECISIONS, Plan, Scale
from benchmarks.report import filled, table
from benchmarks.run import PAGE, WORK
from benchmarks.work import SYSTEMS, prepare

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear"),
    "attention": ("aten::_scaled_dot_product",),
    "exponentials, logarithms": ("aten::exp", "aten::log", "aten::sigmoid", "aten::silu", "aten::logaddexp"),
    "copies": ("aten::copy_", "aten::cat", "aten::index", "aten::fill_", "aten::gather", "mkldnn::_reorder"),
    "other arithmetic": ("aten::mul", "aten::add", "aten::sub", "aten::div", "aten::sum", "aten::lin", "aten::mean"),
}
STEPS, MEASURED = 30, 20  # of the demo; the last ones are measured, for the warm start has steps too


class Wrapped:
    """A method that is watched while this lasts: `before` a call gives what `after` it is handed."""

    def __init__(self, owner: type, name: str, watch: Any) -> None:
        self.owner, self.name, self.own, self.watch = owner, name, getattr(owner, name), watch

    def __enter__(self) -> None:
        own, watch = self.own, self.watch

        def method(*arguments: Any, **options: Any) -> Any:
            with watch():
                return own(*arguments, **options)

        setattr(self.owner, self.name, method)

    def __exit__(self, *_: Any) -> None:
        setattr(self.owner, self.name, self.own)


def operators(precision: str) -> dict[str, dict[str, float]]:
    """Shares of the time by phase and kind of operator, of the last of two steps."""
    plan = Plan(*prepare(WORK), Scale())
    job = plan.job(precision=precision, warm_up=1, steps=1)
    profiles: dict[str, Any] = {"sampling": None, "update": None}

    def watching(phase: str) -> Any:
        def start() -> Any:
            profiles[phase] = profile()
            return profiles[phase]

        return start

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(job), file)
        file.flush()
        sys.argv = ["apportion_step", file.name]
        with (
            Wrapped(SharedPrefixSampler, "generate", watching("sampling")),
            Wrapped(PolicyGradient, "optimizer_step_on", watching("update")),
        ):
            runpy.run_path(str(SYSTEMS / "apportion_step.py"))
    return {phase: _shares(found) for phase, found in profiles.items()}


def _shares(found: profile) -> dict[str, float]:
    shares: Counter[str] = Counter()
    for event in found.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "the rest")
        shares[kind] += event.self_cpu_time_total
    return {kind: 100 * shares[kind] / shares.total() for kind in [*KINDS, "the rest"]}


class Clock:
    """Seconds in a `with` block, added up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def overhead() -> dict[str, float]:
    """Shares of a step of the demo; the steps are whole iterations of Lightning's loop."""
    clocks = {name: Clock() for name in ("step", "sampling", "loss and backward pass", "optimizer")}
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        Wrapped(_TrainingEpochLoop, "advance", lambda: clocks["step"]),
        Wrapped(SharedPrefixSampler, "generate", lambda: clocks["sampling"]),
        Wrapped(PolicyGradient, "accumulate_gradients", lambda: clocks["loss and backward pass"]),
        Wrapped(torch.optim.AdamW, "step", lambda: clocks["optimizer"]),
    ):
        steps = ["--trainer.limit_train_batches", str(STEPS), "--trainer.limit_val_batches", "0"]
        if apportion(["fit", "--config", "experiments/demo", *steps]):
            raise SystemExit("the demo failed")
    seconds = {name: sum(clock.seconds[-MEASURED:]) for name, clock in clocks.items()}
    shares = {name: 100 * seconds[name] / seconds["step"] for name in clocks if name != "step"}
    return {**shares, "everything else": 100 - sum(shares.values())}


def gaps(precision: str) -> dict[str, float]:
    """Mean and largest difference between what sampler and scorer say of a token, in nats."""
    folder, prompts = prepare(WORK)
    scale = Scale()
    policy = Policy(folder, max_completion_tokens=scale.tokens)
    prefixes = [policy.encode_prompt(prompt) for prompt in prompts[: scale.prompts]]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), policy.inference():
        numbers, limits = list(range(scale.prompts)), policy.limits("rollout")
        samples = SharedPrefixSampler().sample(
            policy, prefixes, scale.group_size, "rollout", limits, prompt_ids=numbers, step=0
        )
        n = len(samples.ids)
        rewards = RewardResult([0.0] * n, [True] * n, {}, {})
        examples = [{"prompt_id": number} for number in numbers]
        batch = assemble(samples, prefixes, prompts, examples, [""] * n, [Verdict()] * n, rewards, policy)
        gap = (policy.score(batch).logp - samples.logp)[samples.mask].abs()
    return {"mean": float(gap.mean()), "largest": float(gap.max())}


def main() -> None:
    found = {(precision, phase): of for precision in PRECISIONS for phase, of in operators(precision).items()}
    rows = [[kind, *(f"{of[kind]:.0f}" for of in found.values())] for kind in [*KINDS, "the rest"]]
    shares = table(["% of the time", *(f"{phase}, {precision}" for precision, phase in found)], rows)
    around = table(["part of a step", "% of its time"], [[name, f"{share:.1f}"] for name, share in overhead().items()])
    rows = [[precision, *(f"{gap:.1e}" for gap in gaps(precision).values())] for precision in PRECISIONS]
    apart = table(["precision", "mean gap, nats", "largest gap, nats"], rows)
    page = PAGE.read_text()
    for name, text in (("operators", shares), ("overhead", around), ("gaps", apart)):
        page = filled(page, name, text)
        print(f"{text}\n")
    PAGE.write_text(page)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
