"""From numbers to reports/performance.md, the README's table and pictures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.online.bench import table
from benchmarks.performance import limit
from benchmarks.performance.limit import Ceiling
from benchmarks.performance.workloads import WORKLOADS, Workload, rows_of

TITLE = "# Time and memory of a training step, beside TRL"
GIB = 2**30

Part = Mapping[str, Any]
"""Of one part: `machine`, `ceiling`, `found`."""


def rates(ceiling: Ceiling) -> dict[str, float]:
    return {name: round(value, -6) for name, value in asdict(ceiling).items()}


class Result:
    """What the steps of both sides say together."""

    def __init__(self, work: Workload, part: Part) -> None:
        found, ceiling = part["found"], Ceiling(**part["ceiling"])
        steps = found["steps"]
        self.work, self.settings = work, found["settings"]
        self.dtype = self.settings["dtype"]
        self.ours = [step["seconds"] for step in steps["ours"]]
        self.theirs = [step["seconds"] for step in steps["theirs"]]
        self.ratios = sorted(b / a for a, b in zip(self.ours, self.theirs, strict=True))
        self.ratio = statistics.median(self.ratios)
        self.faster = max(self.ours) < min(self.theirs)
        kind = "vram_peak" if work.gpu else "rss_peak"
        peak = {side: max(step[kind] for step in taken) for side, taken in steps.items()}
        self.peak, self.memory = peak, peak["ours"] / peak["theirs"]
        self.as_it_comes = found["as_it_comes"]
        self.tokens = tokens(work) / statistics.median(self.ours)
        least = limit.seconds(work, ceiling, self.dtype, lengths(work))
        self.limit = least / statistics.median(self.ours)

    @property
    def reached(self) -> str:
        if self.ratio < self.work.bar or (self.work.memory is not None and self.memory > self.work.memory):
            return "no"
        return "goal" if self.ratio >= self.work.goal else "yes"


def lengths(work: Workload) -> list[int] | None:
    """Tokens of the texts of SFT's first steps, a mean step's worth of them."""
    if work.kind != "sft":
        return None
    return [1 + len(f"{row['prompt']} {row['completion']}".split()) for row in rows_of(work, work.rows * 6)]


def tokens(work: Workload) -> float:
    """Of a step, each prompt counted once."""
    texts = lengths(work)
    if texts is not None:
        return sum(texts) / (len(texts) / work.rows)
    size = 2 if work.kind in ("rm", "dpo") else work.completions
    return work.rows * (work.prompt + size * (work.mean or work.completion))


def line(name: str, part: Part) -> str:
    """For the terminal."""
    if name not in WORKLOADS:
        return f"{name}: done"
    found = Result(WORKLOADS[name], part)
    return (
        f"{name} {found.work.title}: {found.ratio:.2f}x ({found.ratios[0]:.2f} to {found.ratios[-1]:.2f}), bar "
        f"{found.work.bar}; memory {found.memory:.2f}x; {found.limit:.0%} of the limit"
    )


# ------------------------------------------------------------------------------------------------- tables

HEAD = [
    "workload",
    "ours, s",
    "TRL tuned, s",
    "TRL's time / ours (smallest to largest)",
    "bar",
    "goal",
    "reached",
    "TRL as it comes, s",
    "memory, GiB",
    "TRL's, GiB",
    "tokens/s",
    "of the limit",
]


def workload_table(numbers: Mapping[str, Part]) -> list[str]:
    lines = []
    for name, work in WORKLOADS.items():
        if name in numbers:
            r = Result(work, numbers[name])
            lines.append(
                [
                    f"{name} {work.title} ({r.dtype})",
                    f"{statistics.median(r.ours):.2f}",
                    f"{statistics.median(r.theirs):.2f}",
                    f"{r.ratio:.2f} ({r.ratios[0]:.2f} to {r.ratios[-1]:.2f})",
                    f"{work.bar}",
                    f"{work.goal}",
                    r.reached,
                    f"{r.as_it_comes:.2f}",
                    f"{r.peak['ours'] / GIB:.2f}",
                    f"{r.peak['theirs'] / GIB:.2f}",
                    f"{r.tokens:,.0f}",
                    f"{r.limit:.0%}",
                ]
            )
    return table(HEAD, lines)


def readme_table(numbers: Mapping[str, Part]) -> list[str]:
    lines = []
    for name, work in WORKLOADS.items():
        if name in numbers:
            r = Result(work, numbers[name])
            ratio = f"{r.ratio:.1f} ({r.ratios[0]:.1f} to {r.ratios[-1]:.1f})"
            lines.append([f"{work.title} ({r.dtype})", ratio, f"{r.memory:.2f}"])
    return table(["workload", "TRL's time / ours", "our memory / TRL's"], lines)


def settings_table(numbers: Mapping[str, Part]) -> list[str]:
    lines = []
    for name in WORKLOADS:
        if name in numbers:
            tried = numbers[name]["found"]["tried"]
            best = min(tried, key=tried.__getitem__)
            others = ", ".join(f"{what} {seconds:.2f}" for what, seconds in tried.items())
            lines.append([name, WORKLOADS[name].peer, best, others])
    return table(["workload", "TRL", "taken", "tried, s"], lines)


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def memory_lines(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [f"{int(v):,}", _gib(s["ours"]["rss_peak"]), _gib(s["theirs"]["rss_peak"]),
         f"{s['ours']['rss_peak'] / s['theirs']['rss_peak']:.2f}"]
        for v, s in found["vocabulary"].items()
    ]  # fmt: skip
    batch = [[pairs, _gib(peak)] for pairs, peak in found["batch"].items()]
    return [
        *table(["vocabulary", "ours, GiB", "TRL, micro-batch 1, GiB", "ours / TRL's"], rows),
        "",
        f"Ours over the batch, at {found['micro_batch_tokens']:,} tokens a micro-batch:",
        "",
        *table(["pairs", "GiB"], batch),
    ]


def equality_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        [row["what"], f"{row['ours']:.6g}", f"{row['theirs']:.6g}", f"{row['difference']:.2g}", f"{row['bound']:g}",
         "yes" if row["ok"] else "NO"]
        for row in rows
    ]  # fmt: skip
    return table(["what", "ours", "TRL's", "difference", "bound", "within"], lines)


def version_lines(numbers: Mapping[str, Part]) -> list[str]:
    """Of the workloads, beside what the taken version took when it was tuned."""
    lines = []
    for name, other in numbers["versions"]["found"].items():
        taken = min(numbers[name]["found"]["tried"].values())
        seconds = other["seconds"]
        said = f"does not run: {other['why']}" if seconds is None else f"{seconds:.2f}"
        lines.append([name, WORKLOADS[name].peer, f"{taken:.2f}", other["version"], said])
    return table(["workload", "TRL", "s", "the other", "s"], lines)


def profile_lines(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    kinds = list(next(iter(found.values())))
    rows = [[name, *(f"{shares[kind]:.0%}" for kind in kinds)] for name, shares in found.items()]
    return table(["workload", *kinds], rows)


# ------------------------------------------------------------------------------------------------- page


def write(numbers: Mapping[str, Part], page: Path, readme: Path, images: Path) -> None:
    """Everything there are numbers of."""
    lines = [TITLE, ""]

    def section(title: str, part: str, body: Sequence[str]) -> None:
        where, ceiling = numbers[part]["machine"], numbers[part]["ceiling"]
        command = f"`python -m benchmarks.performance {part}`"
        measured = ", ".join(
            f"{name} {value / 1e9:.0f} {'GB/s' if name == 'copy' else 'GFLOP/s'}" for name, value in ceiling.items()
        )
        lines.extend([f"## {title}", "", f"{command} on {where}. Measured ceilings: {measured}.", "", *body, ""])

    workloads = [name for name in WORKLOADS if name in numbers]
    if workloads:
        body = [*workload_table(numbers), "", "What was tried for TRL:", "", *settings_table(numbers)]
        section("Workloads", workloads[0], body)
    if "versions" in numbers:
        section("The other version of TRL", "versions", version_lines(numbers))
    if "equality" in numbers:
        section("The same numbers first", "equality", equality_lines(numbers["equality"]["found"]))
    if "profile" in numbers:
        section("Where a step spends its time", "profile", profile_lines(numbers["profile"]["found"]))
    if "memory" in numbers:
        section("Memory", "memory", memory_lines(numbers["memory"]["found"]))
    if "start" in numbers:
        section("From nothing to the first step", "start", start_lines(numbers["start"]["found"]))
    if "scaling" in numbers:
        draw_scaling(numbers["scaling"]["found"], images / "performance_scaling.png")
        section("Scaling", "scaling", ["![scaling](../docs/images/performance_scaling.png)"])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    if workloads and readme.exists():
        text = readme.read_text(encoding="utf-8")
        inner = "\n".join(["<!-- performance -->", *readme_table(numbers), "<!-- end -->"])
        found = re.sub(r"<!-- performance -->.*?<!-- end -->", lambda _: inner, text, flags=re.DOTALL)
        readme.write_text(found, encoding="utf-8")


def start_lines(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """From starting a process to the end of its first step, that of W3 in bf16-mixed, and to its beginning."""
    whole = {name: statistics.median(t["ready"] + t["step"] for t in taken) for name, taken in found.items()}
    names = {"ours": "ours", "libraries": "importing Lightning's command line and transformers, alone"}
    rows = [
        [names.get(name, f"TRL {name}"), f"{whole[name]:.1f}", f"{statistics.median(t['ready'] for t in taken):.1f}",
         "" if name == "libraries" else f"{whole['ours'] / whole[name]:.2f}"]
        for name, taken in found.items()
    ]  # fmt: skip
    return table(["side", "seconds to the end of the first step", "of it before the step", "ours over it"], rows)


def draw_scaling(found: Mapping[str, Any], path: Path) -> None:
    """Seconds and peak memory over every size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(found), 5.2), layout="constrained")
    panels = figure.subplots(2, len(found), squeeze=False)
    for column, (axis, points) in enumerate(found.items()):
        for row, (what, unit) in enumerate((("seconds", "s"), ("rss_peak", "GiB"))):
            panel = panels[row][column]
            for color, side in enumerate(("ours", "theirs")):
                known = [
                    (int(size), sides[side][what] / (GIB if row else 1))
                    for size, sides in points.items()
                    if what in sides.get(side, {})
                ]
                if known:
                    label = "ours" if side == "ours" else "TRL"
                    panel.plot(*zip(*known, strict=True), marker="o", color=f"C{color}", label=label)
            panel.set(xlabel=axis, ylabel=unit if column == 0 else None, ylim=(0, None))
            panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
