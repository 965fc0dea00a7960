"""The rewards of a run: named, weighted, supervised, scored in parallel beside other work.

    pending = suite.submit(rollout, texts)    # returns at once; workers score meanwhile
    ...                                       # reference log-probs, for example
    matrix = pending.collect()                # [N, K] with NaN for abstentions

Whatever a reward in a worker does, `collect` returns. Results depend on what is scored, not on the number of workers or
on the order in which calls finish.
"""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from alignment.errors import UserError
from alignment.rewards.calls import Function, Wanted, call_batch, call_one, own, reseed, single
from alignment.rewards.faults import FaultHistory
from alignment.rewards.matrix import Mishap, RewardMatrix
from alignment.rewards.protocol import Outcome, SampledBatch, Samples, SuiteConfig, Texts
from alignment.rewards.scaling import Scaling, agree, extremes_of
from alignment.rewards.specs import AnySpec, bind, check, check_columns, digest, load_here, needed, source_of, to_spec
from alignment.rewards.workers import Job, WorkerPool
from alignment.rollout import RolloutStopped
from alignment.settings import as_config

SHARE = 8
"""Completions a worker gets at a time of a reward that scores single ones."""
LOOK = 0.1
"""Seconds between two chances for signal handlers while waiting for workers."""


class RewardSuite:
    """Every reward of a run.

    Args:
        rewards: name -> specification, a mapping of its fields, or just what `RewardSpec.reward` takes.
        config: workers, limits, and when to stop; a mapping of its fields is accepted too.
        seed: base of the random numbers of rewards that draw.

    Raises UserError for a specification that cannot work, and for a reward that is not where it should be; for one that
    cannot be imported, at `start`.
    """

    def __init__(
        self, rewards: Mapping[str, AnySpec], config: SuiteConfig | Mapping[str, Any] | None = None, seed: int = 0
    ) -> None:
        self.config = as_config(SuiteConfig, config)
        self.specs = {name: to_spec(spec) for name, spec in rewards.items()}
        check(self.specs, self.config)
        self.names = tuple(self.specs)
        self.weights = torch.tensor([float(s.weight) for s in self.specs.values()])
        self._seed = seed
        self._sources = {n: source_of(n, s) for n, s in self.specs.items() if not s.in_process}
        self._history = FaultHistory(self.names, self.config)
        self._scaling = Scaling(self.specs)
        self._wanted: dict[str, Wanted] = {}
        self._functions: dict[str, Function] = {}
        self._pool: WorkerPool | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Load every reward once, in a worker or here. Done by the first `submit` if not before.

        Raises UserError naming the reward that cannot be loaded or whose parameters do not fit.
        """
        self._start_workers()
        for name, spec in self.specs.items():
            if spec.in_process and name not in self._functions:
                self._functions[name], self._wanted[name] = load_here(name, spec)

    def check_columns(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise UserError when a reward that runs in a worker cannot be loaded there, or needs a data column that none
        of `rows` has. Rewards of this process are left alone: loading one may take the memory of a model."""
        try:
            self._start_workers()
            self._check_columns(rows)
        except UserError:
            self.close()  # the run ends here, and nobody would
            raise

    def _check_columns(self, rows: Iterable[Mapping[str, Any]]) -> None:
        known: set[str] = set()
        complaint: UserError | None = None
        for row in rows:
            if complaint is not None and row.keys() <= known:
                continue
            known |= row.keys()
            try:
                for name in self._sources:
                    check_columns(name, self._wanted[name], known)
                return
            except UserError as error:
                complaint = error
        if complaint is not None:
            raise complaint

    def _start_workers(self) -> None:
        if self._pool is not None and self._pool.owner != os.getpid():
            self._pool = None  # it belongs to the process this one was forked from
        if self._pool is None and self._sources:
            self._pool = WorkerPool(self._sources, self.config, self._seed)
            weakref.finalize(self, self._pool.close)
        if self._pool is not None and not self._sources.keys() <= self._wanted.keys():
            self._wanted |= self._pool.parameters(list(self._sources))

    def needed_columns(self) -> set[str]:
        """Data columns without which some reward cannot be asked. Loads the rewards."""
        self.start()
        return {column for wants in self._wanted.values() for column in needed(wants)}

    def close(self) -> None:
        """Stop the workers; a later `submit` starts new ones. Happens by itself when the suite is deleted or the
        interpreter ends."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> RewardSuite:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Without workers and loaded rewards: a copy sent to another process starts its own."""
        return {**self.__dict__, "_pool": None, "_functions": {}, "_wanted": {}}

    # ------------------------------------------------------------------ scoring

    def score(self, rollout: SampledBatch, texts: Texts, *, learn: bool = True) -> RewardMatrix:
        """`submit` and wait."""
        return self.submit(rollout, texts, learn=learn).collect()

    def submit(self, rollout: SampledBatch, texts: Texts, *, learn: bool = True) -> Pending:
        """Begin to score a rollout; see `submit_samples`."""
        return self.submit_samples(Samples.of(rollout, texts), learn=learn)

    def submit_samples(self, samples: Samples, *, learn: bool = True) -> Pending:
        """Hand the completions to the workers and return at once.

        Args:
            samples: N completions; later changes to them do not matter.
            learn: False for evaluation: running scales and the fault history stay as they are.

        Raises UserError when a reward wants a data column that no row has, or values that cannot be sent to a worker.
        """
        self.start()
        arguments = {n: bind(n, w, samples) for n, w in self._wanted.items()} if len(samples) else {}
        keys = [digest(p, c) for p, c in zip(samples.prompts, samples.completions, strict=True)]
        jobs: dict[str, list[Job]] = {n: [] for n in self._sources}
        for name in arguments:
            if name in jobs:
                jobs[name] = self._jobs(name, arguments[name], keys)
        # Whole batches first: they are the longest jobs, and the shares of single completions fill the gaps.
        for name in sorted(jobs, key=lambda n: self._wanted[n].per_sample):
            for job in jobs[name]:
                assert self._pool is not None
                self._pool.submit(job)
        return Pending(self, keys, jobs, {n: a for n, a in arguments.items() if n in self._functions}, learn)

    def _jobs(self, name: str, arguments: Mapping[str, Sequence[Any]], keys: Sequence[str]) -> list[Job]:
        spec, per_sample = self.specs[name], self._wanted[name].per_sample
        size = spec.batch_size or (SHARE if per_sample else len(keys))
        jobs = []
        for start in range(0, len(keys), size):
            part = slice(start, start + size)
            try:
                body = pickle.dumps(({a: list(v[part]) for a, v in arguments.items()}, keys[part]))
            except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"reward '{name}': its data cannot be sent to a worker ({error}); set in_process: true, or take "
                    "only the columns it needs as parameters"
                ) from error
            share = len(keys[part])
            jobs.append(Job(name=name, body=body, size=share, per_sample=per_sample, timeout_s=spec.timeout_s))
        return jobs

    def call_here(self, name: str, arguments: Mapping[str, Sequence[Any]], keys: Sequence[str]) -> list[Outcome]:
        """The outcomes of a reward in this process, for completions with these digests; global generators are left as
        they were. Ctrl-C and a signal's exit pass through."""
        function, outcomes = self._functions[name], list[Outcome]()
        step = 1 if self._wanted[name].per_sample else self.specs[name].batch_size or len(keys)
        with _generators_kept():
            for start in range(0, len(keys), step):
                part = slice(start, start + step)
                reseed(self._seed, name, keys[part])
                if self._wanted[name].per_sample:
                    outcomes.append(call_one(function, single(arguments, start), in_worker=False))
                else:
                    outcomes += call_batch(function, own(arguments, part), len(keys[part]), in_worker=False)
        return outcomes

    def finish(
        self, outcomes: Mapping[str, Sequence[Outcome]], size: int, seconds: dict[str, float], learn: bool
    ) -> RewardMatrix:
        """Count faults, scale, apply conditions. A collective: with several ranks each must call it."""
        raw = torch.full((size, len(self.names)), torch.nan, dtype=torch.float64)
        faults: dict[str, Counter[str]] = {}
        for k, name in enumerate(self.names):
            faults[name] = self._history.note(name, outcomes[name])
            numbers = [torch.nan if o.value is None else o.value for o in outcomes[name]]
            raw[:, k] = torch.tensor(numbers, dtype=torch.float64)
        extremes, losses = agree(extremes_of(self.names, raw), {n: (faults[n].total(), size) for n in self.names})
        if self.config.on_fault == "stop":
            self._history.stop_at_first(losses)
        if learn and losses[self.names[0]][1]:
            self._history.advance(losses)
        values = self._scaling(raw, extremes, learn=learn)
        return RewardMatrix(
            values=values.float(),
            raw=raw.float(),
            names=self.names,
            weights=self.weights.clone(),
            changed=frozenset(n for n, s in self.specs.items() if s.scale is not None or s.condition is not None),
            faults=faults,
            seconds=seconds,
            mishaps=tuple(
                Mishap(name, row, outcome.message)
                for name in self.names
                for row, outcome in enumerate(outcomes[name])
                if outcome.no_number
            ),
            lost=sum(lost for lost, _ in losses.values()),
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What shapes later rewards: running ranges, and the fault history. JSON-able."""
        return {"ranges": self._scaling.state_dict(), "history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Rewards that are no longer there are forgotten, new ones start anew."""
        self._scaling.load_state_dict(state["ranges"])
        self._history = FaultHistory(self.names, self.config)
        self._history.load_state_dict(state["history"])


class Pending:
    """Rewards being computed. Rewards of the training process are called by `collect`, while workers are busy."""

    def __init__(
        self,
        suite: RewardSuite,
        keys: Sequence[str],
        jobs: dict[str, list[Job]],
        here: dict[str, dict[str, Sequence[Any]]],
        learn: bool,
    ) -> None:
        self._suite, self._keys, self._jobs, self._here, self._learn = suite, keys, jobs, here, learn
        self._outcomes: dict[str, list[Outcome]] | None = None  # of the rewards called here, once all is computed

    def done(self) -> bool:
        """Whether every worker has finished its part."""
        return all(job.result.done() for jobs in self._jobs.values() for job in jobs)

    def cancel(self) -> None:
        """Drop the calls, killing workers that are inside one. `collect` must not be called any more."""
        for jobs in self._jobs.values():
            for job in jobs:
                job.result.cancel()

    def wait(self, should_stop: Callable[[], bool] | None = None) -> None:
        """Have every value computed; `collect` then returns at once. No collective, and nothing is learned from the
        values yet. An exception that comes meanwhile, such as a signal's, drops the calls.

        Raises RolloutStopped when `should_stop` says yes; it is asked before each reward of the training process, and
        ten times a second while workers are busy.
        """
        if self._outcomes is not None:
            return
        outcomes: dict[str, list[Outcome]] = {}
        results = [job.result for jobs in self._jobs.values() for job in jobs]
        try:
            for name, arguments in self._here.items():
                _poll(should_stop)
                outcomes[name] = self._suite.call_here(name, arguments, self._keys)
            # In slices: a blocked main thread would leave the signal handlers of a run waiting too.
            while concurrent.futures.wait(results, timeout=LOOK).not_done:
                _poll(should_stop)
        except BaseException:
            self.cancel()
            raise
        self._outcomes = outcomes

    def collect(self) -> RewardMatrix:
        """Wait for every value, as `wait` does, and judge.

        Raises RewardsFailing when a reward has failed too often. With several ranks this is a collective.
        """
        self.wait()
        assert self._outcomes is not None
        outcomes = dict(self._outcomes)
        for name, jobs in self._jobs.items():
            outcomes[name] = [outcome for job in jobs for outcome in job.result.result()]
        for name in self._suite.names:
            outcomes.setdefault(name, [])
        seconds = {name: sum(job.seconds for job in jobs) for name, jobs in self._jobs.items()}
        return self._suite.finish(outcomes, len(self._keys), seconds, self._learn)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Whatever is drawn in this block, the global generators stand afterwards where they stood."""
    python, arrays = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _poll(should_stop: Callable[[], bool] | None) -> None:
    if should_stop is not None and should_stop():
        raise RolloutStopped("asked to stop while rewards were computed")
