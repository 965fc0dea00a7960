"""What the quickstart shows: a table, sample replies, Markdown for a page, a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alignment.scorecard import MAX_REPLY, Score

COLUMNS = ("before", "SFT", "DPO")
SAMPLES = 3
"""Sample replies shown: those to the first held-out prompts, not chosen by how they came out."""

_LINES: tuple[tuple[str, str, str], ...] = (
    ("preference_accuracy", "preference accuracy, against the column before", "{:.0%}"),
    ("reward_margin", "reward margin, against the column before", "{:+.2f}"),
    ("right", "right answers", "{:.0%}"),
    ("warmth", "warmth (0 to 1)", "{:.2f}"),
    ("length", f"length in tokens (at most {MAX_REPLY})", "{:.1f}"),
    ("kl", "KL to the start, nats per token", "{:.2f}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One quickstart.

    Args:
        model: what was asked for (smollm2, tiny, a name).
        scores: a score per column of `COLUMNS`.
        questions, answers: of the held-out prompts, in the order of each score's replies.
        seconds: wall time of each part. peak_gb: largest resident memory of the process, in GB.
        policy: folder of the final model.
    """

    model: str
    scores: dict[str, Score]
    questions: list[str]
    answers: list[str]
    seconds: dict[str, float]
    peak_gb: float
    policy: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        values: dict[str, Any] = json.loads(text)
        values["scores"] = {name: Score(**score) for name, score in values["scores"].items()}
        return cls(**values)

    def rows(self) -> list[list[str]]:
        """The table's cells, each row led by its name."""
        return [
            [label, *(form.format(score.numbers[name]) for score in self.scores.values())]
            for name, label, form in _LINES
        ]

    def samples(self) -> list[tuple[str, str, str, str]]:
        """(question, answer, reply before, reply after DPO) of the first held-out prompts."""
        before, after = self.scores[COLUMNS[0]].replies, self.scores[COLUMNS[-1]].replies
        return list(zip(self.questions, self.answers, before, after, strict=True))[:SAMPLES]

    @property
    def summary(self) -> str:
        """One line: size of the test, time and memory."""
        return (
            f"{len(self.questions)} held-out prompts on products never seen in training; "
            f"{sum(self.seconds.values()):.0f} s, at most {self.peak_gb:.1f} GB"
        )


def show(report: Report, console: Console) -> None:
    """Print the table and the sample replies."""
    table = Table(title=f"{report.model}: before and after", caption=report.summary)
    table.add_column("on held-out prompts")
    for name in report.scores:
        table.add_column(name, justify="right")
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
    for question, answer, before, after in report.samples():
        console.print(f"\n[bold]{question}[/bold]  (FAQ: {answer})", highlight=False)
        console.print(f"  before  {before}", markup=False, highlight=False)
        console.print(f"  after   {after}", markup=False, highlight=False)
    console.print()


def markdown(report: Report) -> str:
    """The table and the samples as Markdown."""
    lines = ["| on held-out prompts | " + " | ".join(report.scores) + " |", "|---|" + "---:|" * len(report.scores)]
    lines += ["| " + " | ".join(row) + " |" for row in report.rows()]
    lines += ["", report.summary + ".", ""]
    for question, answer, before, after in report.samples():
        lines += [f"> **{question}** (FAQ: {answer})  ", f"> before: {_flat(before)}  ", f"> after: {_flat(after)}", ""]
    return "\n".join(lines)


def _flat(text: str) -> str:
    return " ".join(text.split())


def draw(report: Report, path: Path) -> None:
    """Bars of the shares, the length and the KL for each column, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    shares, length, kl = figure.subplots(1, 3, width_ratios=(3, 1.2, 1.2))
    names = ("preference_accuracy", "right", "warmth")
    colours = ("#b8bcc4", "#6f9fd8", "#1f5fae")
    for i, (column, score) in enumerate(report.scores.items()):
        places = [x + 0.27 * (i - 1) for x in range(len(names))]
        bars = shares.bar(places, [score.numbers[n] for n in names], width=0.25, color=colours[i], label=column)
        shares.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    shares.set_xticks(range(len(names)), ("preference\naccuracy", "right\nanswers", "warmth"))
    shares.set_ylim(0, 1.18)
    shares.legend(ncols=3, loc="upper center", frameon=False, fontsize=8)
    for axis, name, title in ((length, "length", "length (tokens)"), (kl, "kl", "KL to start (nats/token)")):
        heights = [score.numbers[name] for score in report.scores.values()]
        bars = axis.bar(list(report.scores), heights, color=colours, width=0.6)
        axis.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
        axis.set_title(title, fontsize=9)
        axis.margins(y=0.15)
    for axis in (shares, length, kl):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    shares.set_title(f"{report.model}: {len(report.questions)} held-out prompts", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
