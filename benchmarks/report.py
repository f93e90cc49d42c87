"""The tables of docs/speed.md, between markers, and its figure, from results.json."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; numbers are aligned to the right."""
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(head))]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [head, rule, *[[_text(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def targets(found: Results) -> str:
    """What was asked for, and what was measured."""
    rows: list[list[Any]] = []

    def add(what: str, key: str, case: str, target: float, most: bool = False) -> None:
        value = found[key].get(case)
        if value is not None:
            met = value <= target if most else value >= target
            bound = "≤" if most else "≥"
            rows.append([f"{what}, {case}", f"{bound} {_text(target)}", _text(value), "yes" if met else "no"])

    add("step, TRL tuned / apportion", "step_speedup_vs_trl_tuned", "fp32", 4.0)
    add("step, TRL tuned / apportion", "step_speedup_vs_trl_tuned", "bf16", 6.0)
    add("peak memory, apportion / TRL tuned", "peak_memory_share_of_trl_tuned", "fp32", 0.4, most=True)
    add("sampler, generate / apportion, bf16", "sampler_speedup_vs_generate", "4x8", 2.5)
    add("sampler, generate / apportion, bf16", "sampler_speedup_vs_generate", "8x16", 4.0)
    add("sampler, vLLM compiled / apportion, bf16", "sampler_speedup_vs_vllm_cpu", "8x16", 1.3)
    for precision in ("fp32", "bf16"):
        add("update, padded / packed at equal micro-batch", "update_speedup_vs_padded", precision, 2.0)
    return table(["ratio", "target", "measured", "met"], rows)


def steps(found: Results) -> str:
    rows = []
    for precision, systems in found["phases"].items():
        for name, row in systems.items():
            phases = [row[phase] for phase in ("step", "rollout", "update")]
            rows.append([precision, name, *phases, row["peak_gb"], row["tokens_per_second"]])
    head = ["precision", "system", "step, s", "sample, s", "score and update, s", "peak, GiB", "tokens/s"]
    return table(head, rows)


def samplers(found: Results) -> str:
    rows = [[name, row["seconds"], row["tokens_per_second"]] for name, row in found["samplers"].items()]
    return table(["prompts x rollouts, engine", "seconds", "tokens/s"], rows)


def sweep(found: Results) -> str:
    rows = [
        [r["precision"], r["batch"], "on" if r["gradient_checkpointing"] else "off", r["seconds"], r["peak_gb"]]
        for r in found["sweep"]
    ]
    return table(["precision", "per-device batch", "checkpointing", "step, s", "peak, GiB"], rows)


def growth(found: Results) -> str:
    rows = [
        [r["varied"], r["N"], r["R"], r["T"], f"{r['parameters'] / 1e6:.1f} M", r["seconds"], r["peak_gb"]]
        for r in found["growth"]
    ]
    return table(["grows", "N", "R", "T", "parameters", "step, s", "peak, GiB"], rows)


def machine(found: Results) -> str:
    of, share = found["machine"], found["share_of_machine"]
    rows = [[p, of["gemm_gflops"][p], 100 * share[p]["rollout"], 100 * share[p]["update"]] for p in of["gemm_gflops"]]
    text = table(["precision", "matrix products, GFLOP/s", "rollout, % of the limit", "update, % of the limit"], rows)
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return f"{of['cores']} cores, copying at {of['copy_gbs']:.0f} GB/s; {versions}.\n\n{text}"


TABLES: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "steps": steps,
    "samplers": samplers,
    "sweep": sweep,
    "growth": growth,
    "machine": machine,
}


def fill(page: str, found: Results) -> str:
    """The page with every table between `<!-- NAME -->` and `<!-- end -->` made anew."""
    for name, make in TABLES.items():
        page = filled(page, name, make(found))
    return page


def filled(page: str, name: str, text: str) -> str:
    """The page with another text between `<!-- NAME -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no place for the table '{name}'")
    return pattern.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page)


def write_tables(found: Results, path: Path) -> None:
    path.write_text(fill(path.read_text(), found))


def write_figure(found: Results, path: Path) -> None:
    """Seconds of a step by phase, and peak memory, of every system."""
    from matplotlib.figure import Figure

    names = ["trl plain", "trl tuned", "generate + padded", "apportion"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for column, (title, unit) in enumerate((("One step", "seconds"), ("Peak memory", "GiB"))):
        axes = figure.add_subplot(1, 2, column + 1)
        for place, (precision, systems) in enumerate(found["phases"].items()):
            shift = 0.2 - 0.4 * place
            rows = [systems[name] for name in names]
            heights = [y + shift for y in range(len(names))]
            shade = 1.0 - 0.45 * place
            if column == 0:
                sample = [row["rollout"] for row in rows]
                whole = [row["step"] for row in rows]
                axes.barh(heights, sample, 0.36, color="#2a6f97", alpha=shade, label=f"sample, {precision}")
                rest = [b - a for a, b in zip(sample, whole, strict=True)]
                label = f"score and update, {precision}"
                axes.barh(heights, rest, 0.36, left=sample, color="#e07a5f", alpha=shade, label=label)
            else:
                whole = [row["peak_gb"] for row in rows]
                axes.barh(heights, whole, 0.36, color="#5f7a61", alpha=shade, label=precision)
            for y, value in zip(heights, whole, strict=True):
                axes.text(value, y, f" {value:.1f}", va="center", fontsize=9)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(unit)
        axes.set_title(title)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
