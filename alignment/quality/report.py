"""A report on rows: all findings of a check, as a table for a terminal, as JSON, as metrics for a tracker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alignment.quality.findings import Finding
from alignment.quality.settings import Verdict

ORDER: tuple[Verdict, ...] = ("fail", "warn", "ok", "n/a")
_COLOURS = {"fail": "bold red", "warn": "yellow", "ok": "green", "n/a": "dim"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings.

    Args:
        files: what was read. command: how to have it again. findings: one for each check, in their order.
    """

    files: Sequence[str]
    command: str
    findings: Sequence[Finding]

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings; `ok` where nothing could be measured."""
        worst = min((ORDER.index(f.verdict) for f in self.findings if f.verdict != "n/a"), default=ORDER.index("ok"))
        return ORDER[worst]

    def counts(self) -> dict[Verdict, int]:
        """How many findings are of each verdict."""
        return {verdict: sum(f.verdict == verdict for f in self.findings) for verdict in ORDER}

    def worst_first(self) -> list[Finding]:
        """The findings in the order in which to read them."""
        return sorted(self.findings, key=lambda finding: ORDER.index(finding.verdict))

    def summary(self) -> str:
        """One line."""
        counts = self.counts()
        return f"{counts['fail']} fail, {counts['warn']} warn, {counts['ok']} ok, {counts['n/a']} not measurable"

    def to_json(self) -> str:
        """Everything, as text. NaN never occurs: what cannot be measured is null."""
        content: dict[str, Any] = {
            "files": list(self.files),
            "command": self.command,
            "verdict": self.verdict,
            "counts": self.counts(),
            "checks": [finding.to_dict() for finding in self.findings],
        }
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"

    def metrics(self) -> dict[str, float]:
        """`data/CHECK/value` is what a limit is for, `data/CHECK/at_fault` counts rows, `data/CHECK/NAME` is any other
        number, `data/fail` and `data/warn` count the findings of that verdict."""
        out: dict[str, float] = {"data/fail": self.counts()["fail"], "data/warn": self.counts()["warn"]}
        for finding in self.findings:
            if finding.value is not None:
                out[f"data/{finding.check}/value"] = finding.value
            for name, number in finding.figures.items():
                if isinstance(number, int | float) and not isinstance(number, bool):
                    out[f"data/{finding.check}/{name}"] = float(number)
            if finding.faults:
                out[f"data/{finding.check}/at_fault"] = float(sum(fault.count for fault in finding.faults))
        return out


def show(report: Report, console: Console) -> None:
    """Print the table, what to do, and the rows at fault."""
    table = Table(title=f"Data check: {', '.join(report.files)}", title_justify="left", caption=report.summary())
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("measured", overflow="fold")
    table.add_column("limit")
    for finding in report.findings:
        colour = _COLOURS[finding.verdict]
        verdict = f"[{colour}]{finding.verdict}[/{colour}]"
        table.add_row(finding.check, verdict, escape(finding.measured), escape(str(finding.limit)))
    console.print(table)
    for finding in report.worst_first():
        if finding.verdict == "ok" or (finding.verdict == "n/a" and not finding.advice):
            continue
        colour = _COLOURS[finding.verdict]
        what = f"[{colour}]{finding.check}[/{colour}]: {escape(finding.advice)}"
        console.print(what, highlight=False, soft_wrap=True)
        if finding.verdict == "n/a":
            continue
        for fault in finding.faults:
            if fault.count:
                console.print(f"  {fault}", markup=False, highlight=False, soft_wrap=True)
