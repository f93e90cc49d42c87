"""From the answers of all processes to the numbers of results.json. Ratios above 1 mean that apportion is better."""

import platform
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.plan import FIXED_ROWS, PRECISIONS, SAMPLER_SHAPES, Plan

Answers = dict[str, list[dict[str, Any]]]
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}


def seconds(answers: Answers, name: str, phase: str) -> float:
    """The median over all rounds and steps of a case."""
    return median(value for answer in answers[name] for value in answer["seconds"][phase])


def peak(answers: Answers, name: str) -> float:
    """GiB, the largest of all rounds."""
    return max(answer["peak_gb"] for answer in answers[name])


def fastest(answers: Answers, section: str) -> str:
    """The name of the case of a section with the shortest step."""
    names = [name for name in answers if name.startswith(section)]
    if not names:
        raise SystemExit(f"error: every case of {section} failed: see above")
    return min(names, key=lambda name: seconds(answers, name, "step"))


def tuned_settings(answers: Answers, plan: Plan, precision: str) -> dict[str, Any]:
    """TRL's options in the fastest case of the sweep."""
    best = fastest(answers, f"sweep/{precision}/")
    return next(case.job.options for case in plan.sweep() if case.name == best)


def share_of_machine(answers: Answers, precision: str, group_size: int) -> dict[str, float]:
    """The shortest time that this machine's matrix products and copying allow, over the time taken, by phase.

    update: 6 floating-point operations a weight and token that a packed pass must run. rollout: 2 of them; a decoding
    step takes at least as long as reading the weights once.
    """
    name, machine = f"step/{precision}/apportion", answers["machine"][0]
    size = answers[name][0]
    layers, head, sampled, prompts = (
        size[k] for k in ("layer_parameters", "head_parameters", "tokens", "prompt_tokens")
    )
    rate, copy = machine["gemm_gflops"][precision] * 1e9, machine["copy_gbs"] * 1e9
    update = 6 * (layers * (prompts + sampled) + head * sampled) / rate
    steps = sampled / (size["prompts"] * group_size)
    a_step = 2 * (layers + head) * size["prompts"] * group_size / rate
    read = (layers + head) * WEIGHT_BYTES[precision] / copy
    rollout = 2 * layers * prompts / rate + steps * max(a_step, read)
    return {
        "rollout": rollout / seconds(answers, name, "rollout"),
        "update": update / seconds(answers, name, "update"),
    }


def growth_rows(answers: Answers) -> list[dict[str, Any]]:
    rows = []
    for name in sorted((n for n in answers if n.startswith("growth/")), key=lambda n: (n.split("/")[1], _number(n))):
        size = answers[name][0]
        row = {"varied": name.split("/")[1], "N": size["prompts"] * size["group_size"], "R": size["group_size"]}
        row |= {"T": size["tokens"] // row["N"], "parameters": size["parameters"]}
        rows.append(row | {"seconds": seconds(answers, name, "step"), "peak_gb": peak(answers, name)})
    return rows


def phases(answers: Answers) -> dict[str, dict[str, dict[str, float]]]:
    """Median seconds by precision, system and phase, with the peak memory in GiB and sampled tokens a second."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in (n for n in answers if n.startswith("step/")):
        _, precision, system = name.split("/")
        row = {phase: seconds(answers, name, phase) for phase in answers[name][0]["seconds"]}
        row |= {"peak_gb": peak(answers, name), "tokens_per_second": answers[name][0]["tokens"] / row["step"]}
        found.setdefault(precision, {})[system] = row
    return found


def sweep_rows(answers: Answers, plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for case in (case for case in plan.sweep() if case.name in answers):
        row = {"precision": case.job.precision, **case.job.options}
        rows.append(row | {"seconds": seconds(answers, case.name, "step"), "peak_gb": peak(answers, case.name)})
    return rows


def results(answers: Answers, plan: Plan, tuned: dict[str, Any], command: str, commit: str) -> dict[str, Any]:
    """Everything that results.json holds."""
    machine = answers["machine"][0]

    def over(section: str, phase: str, ours: str, other: str) -> dict[str, float]:
        """How often `ours` fits into `other`, by what stands in the middle of the cases' names."""
        found = {}
        for middle in PRECISIONS if section == "step" else SAMPLER_SHAPES:
            a, b = f"{section}/{middle}/{ours}", f"{section}/{middle}/{other}"
            if a in answers and b in answers:
                found[middle] = seconds(answers, b, phase) / seconds(answers, a, phase)
        return found

    samplers = {
        f"{shape} {name}": {"seconds": seconds(answers, key, "sample"), "tokens_per_second": _rate(answers, key)}
        for shape in SAMPLER_SHAPES
        for name in ("shared", "generate", "vllm")
        if (key := f"sampler/{shape}/{name}") in answers
    }
    peers = {k: v for rows in answers.values() for k, v in rows[0].get("versions", {}).items() if k in ("trl", "vllm")}
    own = {name: version(name) for name in ("torch", "transformers", "lightning")}
    return {
        "machine": {
            "cores": machine["cores"],
            "gemm_gflops": machine["gemm_gflops"],
            "copy_gbs": machine["copy_gbs"],
            "cpu": platform.machine(),
        },
        "work": {
            "model_parameters": answers["step/fp32/apportion"][0]["parameters"],
            "prompts": plan.scale.prompts,
            "group_size": plan.scale.group_size,
            "tokens": plan.scale.tokens,
            "fixed_micro_batch_rows": FIXED_ROWS,
            "trl_tuned": tuned,
        },
        "step_speedup_vs_trl_tuned": over("step", "step", "apportion", "trl tuned"),
        "step_speedup_vs_trl_plain": over("step", "step", "apportion", "trl plain"),
        "peak_memory_share_of_trl_tuned": {
            p: peak(answers, f"step/{p}/apportion") / peak(answers, f"step/{p}/trl tuned") for p in PRECISIONS
        },
        "sampler_speedup_vs_generate": over("sampler", "sample", "shared", "generate"),
        "sampler_speedup_vs_vllm_cpu": over("sampler", "sample", "shared", "vllm"),
        "update_speedup_vs_padded": over("step", "update", "apportion, equal micro-batch", "generate + padded"),
        "diagnostics_share_of_time": None,
        "share_of_machine": {p: share_of_machine(answers, p, plan.scale.group_size) for p in PRECISIONS},
        "samplers": samplers,
        "phases": phases(answers),
        "sweep": sweep_rows(answers, plan),
        "growth": growth_rows(answers),
        "command": command,
        "versions": {"apportion": commit, "python": platform.python_version(), **own, **peers},
    }


def _rate(answers: Answers, name: str) -> float:
    return answers[name][0]["tokens"] / seconds(answers, name, "sample")


def _number(name: str) -> int:
    return int(name.rsplit("/", 1)[1])
