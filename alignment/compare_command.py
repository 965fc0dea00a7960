"""`alignment compare RUN RUN`: what differs between runs, in settings, metrics and replies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alignment.comparison import ABSENT, metric_rows, reply_rows, setting_rows
from alignment.diagnosis_source import Log, find
from alignment.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises UserError for a run that does not exist."""
    parser = argparse.ArgumentParser(
        prog="alignment compare",
        description="Settings that differ, last metrics and replies to the same prompts, a column for each run.",
        epilog="alignment compare dpo_low_beta dpo_high_beta --metric 'val/*'",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, id or name, or last; two or more")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder of `runs` and mlflow.db (default: here)")
    parser.add_argument("--tracking_uri", help="another MLflow, such as http://127.0.0.1:5000 or sqlite:///trl.db")
    parser.add_argument("--metric", action="append", metavar="PATTERN", help="default: val/*, or all without any")
    parser.add_argument("--replies", type=int, default=3, help="prompts whose replies are shown (default: 3)")
    given = parser.parse_args(argv)
    if len(given.runs) < 2:
        raise UserError("a comparison takes at least two runs: alignment compare RUN RUN")
    logs = [find(name, given.root, given.tracking_uri) for name in given.runs]
    wanted = given.metric or ["val/*"]
    metrics = metric_rows(logs, wanted)
    if not metrics and not given.metric:
        metrics = metric_rows(logs, ["*"])
    if not metrics:
        raise UserError(f"no run has logged a metric that matches {' or '.join(wanted)}")
    console = Console(highlight=False)
    _show(console, logs, "settings that differ", setting_rows(logs))
    _show(console, logs, "last value of metrics", [(name, [_number(v) for v in values]) for name, values in metrics])
    replies = reply_rows(logs, given.replies)
    _show(console, logs, "replies at the last evaluation", replies)
    if given.replies and not replies:
        console.print("no prompt has replies of all runs (callbacks.Samples writes them, into a run's folder)")
    return 0


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4g}"


def _show(console: Console, logs: Sequence[Log], title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", show_lines="replies" in title)
    table.add_column("")
    for log in logs:
        table.add_column(Text(log.title), overflow="fold")
    for name, values in rows:
        table.add_row(Text(name), *(Text(value) for value in values))  # Text: brackets of replies are no markup
    console.print(table)
