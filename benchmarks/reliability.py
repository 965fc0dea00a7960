"""The long form of the reliability tests: interrupt small runs many times and count what survived.

    python -m benchmarks.reliability [--n 100] [--only R1 R3 ...] [--jobs 2] [--seed 0] [--out reports/reliability.md]

    R1   kill -9 at a random moment or inside a save, up to three times; resumed, bit for bit the uninterrupted run
    R2   death at every disk call of saving, replacing, pointing, retiring, unsynced files damaged; a checkpoint loads
    R3   one file of a checkpoint truncated, flipped, zeroed, swapped or missing; noticed, the older one taken
    R5   a disk that refuses at a random call; survived once, the last good checkpoint intact, path and bytes named
    R7   NaN or infinity in one place for one batch; nothing damaged, one update left out, the place named
    R10  programs that attack the sandbox or forge a verdict, and harmless ones; nothing got, no point, all run
    R11  the sandbox with a layer missing; refused, with the reason
    R14  a signal, or two, at a random batch, validation or save; exit code and time; bit for bit
    R15  stops around an epoch's end, five inside one epoch, 2 -> 1 -> 2 processes; the same samples

`--n` is the number of tries of R1 for each algorithm; those of the others are in proportion. Exit status 1 if anything
failed; the report says what.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import lightning
import torch
import transformers

from alignment.checkpoint import CheckpointError, SafeCheckpointIO, point, resolve, verify
from alignment.checkpoint_folder import MANIFEST, STATE, TENSORS, load_checkpoint_folder
from benchmarks import nonfinite, trials
from benchmarks.faults import DAMAGE, SCENARIOS, Dead, Mortal, flip, save, state
from benchmarks.sandbox import trials as sandbox
from benchmarks.trials import ALGORITHMS, Plan

QUIET = {"lightning.pytorch": logging.WARNING, "alignment.training": logging.ERROR, "alignment.online": logging.ERROR}
"""What hundreds of small runs would say hundreds of times."""

ALL = ["R1", "R2", "R3", "R5", "R7", "R10", "R11", "R14", "R15"]
"""What runs unless `--only` names less."""

Try = Callable[[Path], str]
"""One try in an empty folder: "" when it passed, else what went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report."""

    name: str
    what: str
    tries: int
    failures: list[str]
    seconds: float


class Suite:
    """Makes the tries. `whole` holds the uninterrupted run of each algorithm."""

    def __init__(self, folder: Path, n: int, seed: int) -> None:
        self.n, self.random = n, random.Random(seed)
        self.whole = {algorithm: folder / "whole" / algorithm for algorithm in ALGORITHMS}
        self.seconds: dict[str, float] = {}

    def prepare(self) -> None:
        """Run each algorithm once uninterrupted, and once more for its time without imports."""
        for algorithm, path in self.whole.items():
            trials.finish(Plan(algorithm=algorithm), path, attempts=1)
            started = time.monotonic()
            trials.finish(Plan(algorithm=algorithm), path.with_suffix(".timed"), attempts=1)
            self.seconds[algorithm] = time.monotonic() - started

    # ------------------------------------------------------------------ tries

    def kills(self, algorithm: str) -> Iterator[Try]:
        for _ in range(self.n):
            kills = [self._kill(algorithm) for _ in range(self.random.randint(1, 3))]
            validate = self.random.choice([None, 2])
            yield partial(self._killed, Plan(algorithm=algorithm, validate_every=validate), kills)

    def _kill(self, algorithm: str) -> tuple[int, float]:
        """(fsync to die at or 0, seconds to live)."""
        inside = self.random.random() < 0.5
        return (self.random.randint(1, 40) if inside else 0, self.random.uniform(0.1, self.seconds[algorithm]))

    def _killed(self, plan: Plan, kills: list[tuple[int, float]], folder: Path) -> str:
        for sync, seconds in kills:
            process = trials.start(replace(plan, die_at_sync=sync), folder)
            process.join(60 if sync else seconds)
            process.kill()
            process.join()
        trials.finish(plan, folder)
        return trials.same_run(folder, self.whole[plan.algorithm])

    def signals(self) -> Iterator[Try]:
        for _ in range(self.n):
            plan = Plan(
                algorithm=self.random.choice(ALGORITHMS),
                every=self.random.choice([1, 2, 1000]),
                validate_every=self.random.choice([None, 1, 2]),
            )
            numbers = self.random.choices([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], k=self.random.randint(1, 2))
            batch = self.random.randint(1, 17)
            delay = self.random.choice([None, self.random.uniform(0.05, 0.6)])
            yield partial(self._signalled, plan, numbers, batch, delay)

    def _signalled(self, plan: Plan, numbers: list[int], batch: int, delay: float | None, folder: Path) -> str:
        """At a batch's start (the run signals itself), or some time after the run has begun its batches."""
        inside = delay is None
        process = trials.start(replace(plan, stop_after=batch if inside else 0, stop_signal=numbers[0]), folder)
        if delay is not None:
            while not trials.batches(folder) and process.is_alive():
                time.sleep(0.01)
            time.sleep(delay)
        sent = time.monotonic()
        for number in numbers[inside:]:
            if process.is_alive() and process.pid is not None and trials.batches(folder):
                os.kill(process.pid, number)
        process.join(60)
        took = time.monotonic() - sent
        codes = {130 if number == signal.SIGINT else 143 for number in numbers} | ({0} if not inside else set())
        if len(trials.batches(folder)) == len(trials.batches(self.whole[plan.algorithm])):
            codes |= {-number for number in numbers}  # training was over, and its handlers given back
        if process.exitcode not in codes:
            return f"exit code {process.exitcode} for {numbers}"
        if took > 30 and not inside:
            return f"left after {took:.0f} s"
        trials.finish(plan, folder)
        return trials.same_run(folder, self.whole[plan.algorithm])

    def stops(self) -> Iterator[Try]:
        cases = [(5,), (6,), (7,), (11, 12, 13), (18,), (7, 8, 9, 10, 11), (1, 2, 3, 4, 5)]
        for i in range(max(1, self.n // 2)):
            plan = Plan(algorithm=ALGORITHMS[i % 3], every=1000, validate_every=self.random.choice([None, 2]))
            yield partial(self._stopped, plan, cases[i % len(cases)])
        for i in range(max(1, self.n // 10)):
            plan = Plan(algorithm=ALGORITHMS[i % 3], every=1000)
            first = self.random.randint(1, 8)
            places = (first, self.random.randint(first + 1, 17))
            yield partial(self._elastic, plan, places)

    def _stopped(self, plan: Plan, places: tuple[int, ...], folder: Path) -> str:
        for place in places:
            process = trials.start(replace(plan, stop_after=place), folder)
            process.join(60)
            if process.exitcode != 143:
                return f"exit code {process.exitcode} at batch {place}"
        trials.finish(plan, folder, attempts=1)
        return trials.same_run(folder, self.whole[plan.algorithm])

    def _elastic(self, plan: Plan, places: tuple[int, int], folder: Path) -> str:
        for world_size, place in zip((2, 1), places, strict=True):
            process = trials.start(replace(plan, world_size=world_size, stop_after=place), folder)
            process.join(120)
            if process.exitcode != 143:
                return f"exit code {process.exitcode} with {world_size} processes"
        trials.finish(replace(plan, world_size=2), folder, attempts=1)
        same = trials.batches(folder) == trials.batches(self.whole[plan.algorithm])
        return "" if same else "other samples"

    def deaths(self) -> Iterator[Try]:
        for scenario in SCENARIOS:
            with tempfile.TemporaryDirectory() as name:
                with Mortal(_with_one(Path(name)), 10**9) as mortal:
                    scenario(Path(name))
            for call in range(1, mortal.calls + 1):
                yield partial(_die, scenario, call)

    def damages(self) -> Iterator[Try]:
        for _ in range(5 * self.n):
            kind = self.random.choice([*DAMAGE, "any bit", "any bit", "any bit"])
            damage = flip(self.random.random()) if kind == "any bit" else DAMAGE[kind]
            file = self.random.choice([TENSORS, STATE, MANIFEST])
            yield partial(_damaged, damage, file)

    def nonfinite(self) -> Iterator[Try]:
        for name, place in nonfinite.PLACES.items():
            for algorithm in place.algorithms:
                yield partial(_nonfinite, name, algorithm)
        for algorithm in nonfinite.ALL:
            yield partial(_one_rank, algorithm)

    def refusals(self) -> Iterator[Try]:
        for _ in range(max(1, self.n * 6 // 10)):
            number = self.random.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT])
            call = self.random.choice(["mkdir", "fsync", "fsync", "rename"])
            yield partial(_refused, call, number)


def _with_one(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    point(folder / "last.ckpt", save(folder / "a.ckpt", 1))
    return folder


def _die(scenario: Callable[[Path], None], call: int, folder: Path) -> str:
    with Mortal(_with_one(folder), call) as mortal:
        try:
            scenario(folder)
        except Dead:
            mortal.calls = call
    mortal.power_cut()
    loaded = SafeCheckpointIO().load_checkpoint(resolve("last", folder))
    expected = torch.full((3, 2), float(loaded["global_step"]))
    return "" if torch.equal(loaded["state_dict"]["w"], expected) else "a state that was never saved"


def _damaged(damage: Callable[[Path], None], file: str, folder: Path) -> str:
    save(folder / "a.ckpt", 1)
    damage(save(folder / "b.ckpt", 2) / file)
    try:
        load_checkpoint_folder(folder / "b.ckpt")
    except CheckpointError:
        return "" if SafeCheckpointIO().load_checkpoint(folder / "b.ckpt")["global_step"] == 1 else "no fall-back"
    return f"{file} was damaged and nobody noticed"


def _nonfinite(name: str, algorithm: str, folder: Path) -> str:
    failure = nonfinite.run(nonfinite.PLACES[name], algorithm, folder)
    return f"{name}, {algorithm}: {failure}" if failure else ""


def _one_rank(algorithm: str, folder: Path) -> str:
    names = ("weight", "one gradient", "learning rate", "optimizer state")
    return "; ".join(nonfinite.one_rank([(name, algorithm) for name in names], folder))


def _refused(call: str, number: int, folder: Path) -> str:
    io, messages, real = SafeCheckpointIO(), [], getattr(os, call)
    io.save_checkpoint(state(1), folder / "a.ckpt")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("alignment.checkpoint").addHandler(handler)
    setattr(os, call, refuse)
    try:
        io.save_checkpoint(state(2), folder / "b.ckpt")
    finally:
        setattr(os, call, real)
        logging.getLogger("alignment.checkpoint").removeHandler(handler)
    if len(messages) != 1 or str(folder / "b.ckpt") not in messages[0] or "bytes" not in messages[0]:
        return f"said {messages}"
    return "" if verify(folder / "a.ckpt")["step"] == 1 and io.failed_saves == 1 else "the good one is gone"


# ---------------------------------------------------------------------- running and reporting


def measure(name: str, what: str, tries: Iterator[Try], folder: Path, jobs: int) -> Row:
    """Run every try in a folder of its own; failures keep theirs."""
    started = time.monotonic()

    def one(numbered: tuple[int, Try]) -> str:
        number, attempt = numbered
        place = folder / name.replace(" ", "-") / str(number)
        place.mkdir(parents=True)
        try:
            failure = attempt(place)
        except (RuntimeError, ValueError, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            shutil.rmtree(place)
        return failure

    with ThreadPoolExecutor(jobs) as pool:
        # All of them made before the first runs: making some patches what others use.
        results = list(pool.map(one, enumerate(list(tries))))
    row = Row(
        name=name,
        what=what,
        tries=len(results),
        failures=[f for f in results if f],
        seconds=time.monotonic() - started,
    )
    print(f"{name}: {row.tries - len(row.failures)} of {row.tries} in {row.seconds:.0f} s", flush=True)
    return row


def report(rows: list[Row], command: str) -> str:
    """The report as Markdown."""
    lines = [
        "# Reliability",
        "",
        f"Command: `{command}`. Machine: {platform.machine()}, {os.cpu_count()} CPU cores, one torch thread a process; "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"transformers {transformers.__version__}.",
        "",
        "The runs are of the tiny policy, 18 batches in 3 epochs, in R7 5 batches. What each test does: "
        "`benchmarks/reliability.py`.",
        "",
        "| id | what | tries | passed | seconds |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        passed = row.tries - len(row.failures)
        lines.append(f"| {row.name} | {row.what} | {row.tries} | {passed} | {row.seconds:.0f} |")
    failures = [f"- {row.name}: {failure}" for row in rows for failure in row.failures]
    return "\n".join([*lines, "", *(["Failures:", "", *failures] if failures else ["No failures."]), ""])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100, help="tries of R1 for each algorithm")
    parser.add_argument("--only", nargs="*", default=ALL, help="ids to run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, places and kinds of damage")
    parser.add_argument("--out", type=Path, default=Path("reports/reliability.md"), help="where to write the report")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    # Every fall-back and refusal is reported, hundreds of times here; R5 listens, the terminal need not.
    logging.getLogger("alignment.checkpoint").propagate = False
    logging.getLogger("alignment.checkpoint").addHandler(logging.NullHandler())
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    suite = Suite(folder, options.n, options.seed)
    if {"R1", "R14", "R15"} & set(options.only):
        suite.prepare()
    # One job where the process itself is patched.
    plan = [
        *[(f"R1 {a}", f"kill -9, {a}", suite.kills(a), options.jobs) for a in ALGORITHMS],
        ("R2", "death at every disk call", suite.deaths(), 1),
        ("R3", "damaged files", suite.damages(), 1),
        ("R5", "a disk that refuses", suite.refusals(), 1),
        ("R7", "NaN or infinity in one place", suite.nonfinite(), 1),
        ("R10 attacks", "escapes and forged verdicts", sandbox.attacks(), 1),
        ("R10 programs", "benign programs", sandbox.programs(), options.jobs),
        ("R11", "a layer of the sandbox missing", sandbox.layers(), 1),
        ("R14", "signals", suite.signals(), options.jobs),
        ("R15", "stops at and around epoch ends, changing processes", suite.stops(), options.jobs),
    ]
    rows = [
        measure(name, what, tries, folder, jobs)
        for name, what, tries, jobs in plan
        if name.split()[0] in options.only
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report(rows, f"python -m benchmarks.reliability --n {options.n} --seed {options.seed}"))
    if any(row.failures for row in rows):
        print(f"failed tries are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
