"""`alignment tune`: search settings of any configuration, by Optuna or as a population."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.runs import safe_name
from alignment.tuning import outcome, population
from alignment.tuning.plan import Plan
from alignment.tuning.process import RunFailed, Stopped, resolved
from alignment.tuning.search import done, open_study, optuna_module, search
from alignment.tuning.space import read

INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 130 when it was interrupted (what was finished is kept); raises UserError for a mistake."""
    given, words = _parser().parse_known_args(argv)
    if not given.population:
        optuna_module()  # first of all: is it there?
    elif len(given.objective) > 1:
        raise UserError("a population has one objective; with several, search without --population")
    _check(given)
    words = [word for path in given.config for word in ("-c", path)] + [word for word in words if word != "--"]
    config = resolved(words)
    plan = Plan(
        name=given.name,
        words=words,
        config=config,
        space=read(given.space, config),
        objectives=_objectives(given.objective),
        folder=given.out / safe_name(given.name),
        seed=given.seed,
    )
    with _interruptible(plan.stopping):
        try:
            return _evolve(plan, given) if given.population else _search(plan, given)
        except RunFailed as error:
            raise UserError(str(error)) from error
        except Stopped:
            print(f"stopped; the same command goes on from {plan.folder}")
            return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alignment tune",
        description="Run `alignment fit` with different settings and keep the best. Words it does not know go to "
        "`alignment fit` of every run.",
        epilog="alignment tune -c configs/dpo.yaml --space configs/tune/beta.yaml --objective val/loss=min",
    )
    parser.add_argument("-c", "--config", action="append", required=True, help="of the runs; several, as for fit")
    parser.add_argument("--space", action="append", type=Path, required=True, help="YAML of what is searched; several")
    parser.add_argument("--objective", action="append", required=True, metavar="METRIC=max|min",
                        help="last logged value of a metric; several for a Pareto front")  # fmt: skip
    parser.add_argument("--name", default="study", help="of the study (default: study); the same name goes on with it")
    parser.add_argument("--trials", type=int, default=20, help="that count, earlier ones included (default: 20)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--no_prune", action="store_true", help="let hopeless trials finish")
    parser.add_argument("--population", type=int, default=0, metavar="N", help="train N runs whose values move instead")
    parser.add_argument("--interval", type=int, default=50, help="of a population: batches between moves (default: 50)")
    parser.add_argument("--rounds", type=int, default=8, help="of a population: moves and one (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("tuning"), help="folder of studies (default: tuning)")
    return parser


def _check(given: argparse.Namespace) -> None:
    for name in ("trials", "jobs", "interval", "rounds"):
        if getattr(given, name) < 1:
            raise UserError(f"--{name} is {getattr(given, name)}; use at least 1")
    if given.population and given.population < 2:
        raise UserError(f"--population is {given.population}; it takes two runs at least, four to be of use")


def _objectives(texts: Sequence[str]) -> dict[str, str]:
    return {metric: mode for metric, _, mode in (text.rpartition("=") for text in texts)}


def _search(plan: Plan, given: argparse.Namespace) -> int:
    study = open_study(plan, prune=not given.no_prune)
    before = done(study)
    if before:
        print(f"study {plan.name} goes on after {before} trials")
    with outcome.parent_run(plan) as (parent, files):
        search(plan, study, trials=given.trials, jobs=given.jobs, parent=parent, tell=_tell)
        if plan.stopping.is_set():
            raise Stopped
        best = outcome.best_trials(study)
        if not best:
            raise RunFailed(f"no trial of study {plan.name} was finished; what they said is in {plan.folder / 'logs'}")
        files += outcome.write_search(plan, study)
    for trial in best:
        values = ", ".join(f"{key} {value}" for key, value in trial.params.items())
        print(f"best: trial {trial.number}, {outcome.scores(plan, trial.values)}: {values}")
    _last_line(plan, given, [file for file in files if file.suffix == ".yaml"])
    return 0


def _evolve(plan: Plan, given: argparse.Namespace) -> int:
    with outcome.parent_run(plan) as (parent, files):
        members = population.evolve(
            plan, size=given.population, rounds=given.rounds, interval=given.interval, jobs=given.jobs, parent=parent,
            tell=_tell,
        )  # fmt: skip
        files += outcome.write_population(plan, members, given.interval)
    best = members[0]
    values = ", ".join(f"{key} {value}" for key, value in best.values.items())
    print(f"best: {best.score:.4g}, ended with {values}; its state: {best.checkpoint}")
    _last_line(plan, given, [files[0]])
    return 0


def _last_line(plan: Plan, given: argparse.Namespace, fragments: Sequence[Path]) -> None:
    base = " ".join(f"-c {path}" for path in given.config)
    for fragment in fragments:
        print(f"alignment fit {base} -c {fragment}")


def _tell(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _interruptible(stopping: threading.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the runs and keeps the study."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
