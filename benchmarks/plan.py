"""What is measured: every case, by section. A case is one job of one system, run in a process of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.work import Job

PRECISIONS = ("fp32", "bf16")
SAMPLER_SHAPES = {"4x8": (4, 8), "8x16": (8, 16)}
PLAIN_TRL = {"batch": 8, "gradient_checkpointing": True}  # what GRPOConfig sets by itself
FIXED_ROWS = 8  # of a micro-batch, where layouts are compared at equal micro-batches
GROWTH_TOKENS = 656  # of a micro-batch in all rows of the growth table


@dataclass(frozen=True)
class Case:
    """name: section/precision/system and, in a section with many, what sets it apart.

    environment: whose Python runs it: "own", or a peer's from peers/.
    rounds: how often, interleaved with the other cases of its section.
    """

    name: str
    system: str
    job: Job
    environment: str = "own"
    rounds: int = 1


@dataclass(frozen=True)
class Scale:
    """How much work: the full benchmark, or a quick one that shows that everything runs."""

    prompts: int = 4
    group_size: int = 8
    tokens: int = 64
    rounds: int = 2
    warm_up: int = 2
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    growth: int = 16


QUICK = Scale(prompts=2, group_size=4, tokens=16, rounds=1, warm_up=1, batches=(8,), growth=4)


class Plan:
    """The cases of one model and one pool of prompts."""

    def __init__(self, model: str, prompts: list[str], scale: Scale) -> None:
        self.model, self.prompts, self.scale = model, prompts, scale

    def job(self, prompts: int | None = None, group_size: int | None = None, **fields: Any) -> Job:
        s = self.scale
        fields = {"tokens": s.tokens, "warm_up": s.warm_up, **fields}
        return Job(self.model, self.prompts[: prompts or s.prompts], group_size or s.group_size, **fields)

    def machine(self) -> list[Case]:
        return [Case("machine", "machine", self.job())]

    def sweep(self) -> Iterator[Case]:
        """TRL's settings, one step each; the fastest is "tuned"."""
        rows = self.scale.prompts * self.scale.group_size
        for precision in PRECISIONS:
            for batch in self.scale.batches:
                for checkpointing in (False, True):
                    if batch <= rows:
                        options = {"batch": batch, "gradient_checkpointing": checkpointing}
                        name = f"sweep/{precision}/trl/batch {batch}{', checkpointing' if checkpointing else ''}"
                        job = self.job(precision=precision, warm_up=0, steps=1, options=options)
                        yield Case(name, "trl_step", job, "trl")

    def steps(self, tuned: dict[str, dict[str, Any]]) -> Iterator[Case]:
        """Whole steps of the same work, by everyone. tuned: TRL's fastest options, by precision."""
        once, rounds = {"warm_up": 1, "steps": 1}, self.scale.rounds
        equal = {"micro_batch_rows": FIXED_ROWS}
        padded = {"sampler": "generate", "scoring": "padded", **equal}
        for precision in PRECISIONS:
            section = f"step/{precision}"
            ours = self.job(precision=precision, steps=2)
            yield Case(f"{section}/apportion", "apportion_step", ours, rounds=rounds)
            plain = self.job(precision=precision, options=padded, **once)
            yield Case(f"{section}/generate + padded", "apportion_step", plain, rounds=rounds)
            for name, options in (("trl tuned", tuned[precision]), ("trl plain", PLAIN_TRL)):
                job = self.job(precision=precision, options=options, **once)
                yield Case(f"{section}/{name}", "trl_step", job, "trl", rounds if name == "trl tuned" else 1)
            packed = self.job(precision=precision, options=equal, **once)
            yield Case(f"{section}/apportion, equal micro-batch", "apportion_step", packed, rounds=rounds)

    def samplers(self, vllm: bool) -> Iterator[Case]:
        """Sampling alone, in bf16."""
        for shape, (prompts, group_size) in SAMPLER_SHAPES.items():
            job = self.job(prompts, group_size, precision="bf16", warm_up=1)
            for name in ("shared", "generate"):
                ours = replace(job, options={"sampler": name})
                yield Case(f"sampler/{shape}/{name}", "sample", ours, rounds=self.scale.rounds)
            if vllm:
                yield Case(f"sampler/{shape}/vllm", "vllm_sample", job, "vllm")

    def growth(self) -> Iterator[Case]:
        """Steps of apportion in fp32 at a fixed micro-batch; one of prompts, group size, tokens and model grows."""
        factor = self.scale.growth
        middle = round(factor**0.5) if self.scale.rounds > 1 else 1  # the ends alone when it is quick
        fixed = {"micro_batch_tokens": GROWTH_TOKENS}
        once: dict[str, Any] = {"warm_up": 1, "steps": 1, "options": fixed}
        for n in sorted({1, middle, factor, 2 * factor}):  # twice more: micro-batches that are full either way
            yield Case(f"growth/prompts/{n}", "apportion_step", self.job(n, 8, **{**once, "tokens": 16}))
        for n in sorted({1, middle, factor}):
            yield Case(f"growth/group size/{2 * n}", "apportion_step", self.job(2, 2 * n, **{**once, "tokens": 32}))
            yield Case(f"growth/tokens/{16 * n}", "apportion_step", self.job(2, 4, **{**once, "tokens": 16 * n}))
        for width in (192, 384, 768):
            fresh = {"layers": 12, "width": width, "heads": width // 64}
            job = self.job(2, 8, **{**once, "tokens": 32, "options": {**fixed, "fresh": fresh}})
            yield Case(f"growth/width/{width}", "apportion_step", job)
