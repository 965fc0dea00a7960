"""`alignment doctor RUN`: what went wrong in a run, finished or not, ours or one that TRL logged to MLflow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from alignment.diagnosis import Examination
from alignment.diagnosis_source import Log, find, held_out_metrics
from alignment.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns 0, with `--fail` 1 where there is an alarm; raises UserError for a run that does not exist."""
    parser = argparse.ArgumentParser(
        prog="alignment doctor",
        description="Look for faults in what a run has logged: reward hacking, collapse, divergence, ...",
        epilog="alignment doctor last --fail",
    )
    parser.add_argument("run", help="a run's folder, id or name; or last: the newest one that trains")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder of `runs` and mlflow.db (default: here)")
    parser.add_argument("--tracking_uri", help="another MLflow, such as http://127.0.0.1:5000 or sqlite:///trl.db")
    parser.add_argument(
        "--held_out", action="append", metavar="METRIC", help="a metric that should rise with the reward"
    )
    parser.add_argument("--every", type=int, default=10, help="training rows between two looks (default: 10)")
    parser.add_argument("--fail", action="store_true", help="exit with 1 where there is an alarm")
    given = parser.parse_args(argv)
    log = find(given.run, given.root, given.tracking_uri)
    examination = examine(log, given.every, given.held_out or ())
    if log.note:
        print(log.note)
    print(examination.report(log.title), end="")
    return 1 if given.fail and examination.alarms else 0


def examine(log: Log, every: int, held_out: Sequence[str] = ()) -> Examination:
    """All rows of a run. Raises UserError where it has logged nothing, and for a metric that it has not logged."""
    if not log.rows:
        raise UserError(f"{log.title} has logged no metrics yet")
    logged = {name for _, values in log.rows for name in values}
    if unknown := sorted(set(held_out) - logged):
        raise UserError(f"--held_out {', '.join(unknown)}: {log.title} has not logged it")
    examination = Examination(every, held_out or held_out_metrics(log.held_out))
    for step, values in log.rows:
        examination.add(step, values)
    examination.finish()
    return examination
