"""Whatever a reward does, the run goes on, with that completion abstaining and counted (RELIABILITY R9)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from alignment.rewards import RewardMatrix, RewardsFailing, RewardSuite, Samples, SuiteConfig
from alignment.rewards.workers import Lost, Process
from tests.reward_faults import FAULTS, VALUES

HOME = "tests.reward_faults"
TEXTS = ["ok", "bad", "fine"]
HUNG = {"reward": f"{HOME}.Single", "args": {"fault": "sleep"}, "timeout_s": 0.5}


def samples(completions: list[str]) -> Samples:
    return Samples(prompts=["p"] * len(completions), completions=completions)


def values(matrix: RewardMatrix, name: str) -> list[float | None]:
    column = matrix.values[:, matrix.names.index(name)].tolist()
    return [None if x != x else x for x in column]


def fault(form: str, name: str) -> dict[str, object]:
    return {
        "reward": f"{HOME}.{form}",
        "args": {"fault": name},
        "timeout_s": 1.5 if FAULTS[name][0] == "timeout" else 60.0,
    }


def returning(expression: str) -> dict[str, object]:
    return {"reward": f"{HOME}.Returns", "args": {"expression": expression}, "in_process": True}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def workers_of(pid: int) -> list[int]:
    """Processes anywhere that are, or were forked from, reward workers of `pid`; zombies included."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any("alignment.rewards.child" in part for part in command) and command[-1] == str(pid):
            found.append(process.pid)
    return found


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


# ------------------------------------------------------------------------------------------- 25 faults, three ways


@pytest.fixture(scope="module")
def scored() -> tuple[RewardMatrix, int, int]:
    """Every fault in a reward of single completions, in a batch reward, and as another reward's condition, at once."""
    rewards: dict[str, object] = {"sound": f"{HOME}.length"}
    for name in FAULTS:
        rewards |= {f"single_{name}": fault("Single", name), f"batch_{name}": fault("Batch", name)}
        condition = {"reward": f"single_{name}", "at_least": 0.0}
        rewards[f"gated_{name}"] = {"reward": f"{HOME}.lengths", "condition": condition}
    before, own = descriptors(), len(children())
    suite = RewardSuite(rewards, SuiteConfig(workers=8, memory_mb=256))
    matrix = suite.submit_samples(samples(TEXTS)).collect()
    suite.close()
    return matrix, descriptors() - before, len(children()) - own


@pytest.mark.parametrize("name", FAULTS)
def test_single_completions(name: str, scored: tuple[RewardMatrix, int, int]) -> None:
    kind = FAULTS[name][0]
    reward = f"single_{name}"
    assert values(scored[0], reward) == [2.0, None if kind else 3.0, 4.0]
    assert scored[0].faults[reward] == (Counter({kind: 1}) if kind else Counter())


@pytest.mark.parametrize("name", FAULTS)
def test_batch(name: str, scored: tuple[RewardMatrix, int, int]) -> None:
    kind = FAULTS[name][0]
    reward = f"batch_{name}"
    spared = name in VALUES and kind != "timeout"  # the call came back: only the value is bad
    assert values(scored[0], reward) == ([2.0, None if kind else 3.0, 4.0] if spared else [None] * 3)
    assert scored[0].faults[reward] == (Counter({kind: 1 if spared else 3}) if kind else Counter())


@pytest.mark.parametrize("name", FAULTS)
def test_several_rewards(name: str, scored: tuple[RewardMatrix, int, int]) -> None:
    """A neighbour keeps its values. Conditioned on the faulty one it abstains with it: no fault of its own."""
    kind = FAULTS[name][0]
    matrix = scored[0]
    assert matrix.raw[:, matrix.names.index(f"gated_{name}")].tolist() == [2.0, 3.0, 4.0]
    assert values(matrix, f"gated_{name}") == [2.0, None if kind else 3.0, 4.0]
    assert matrix.faults[f"gated_{name}"] == Counter()
    assert values(matrix, "sound") == [2.0, 3.0, 4.0]


def test_nothing_is_left_behind(scored: tuple[RewardMatrix, int, int]) -> None:
    assert scored[1:] == (0, 0)
    assert workers_of(os.getpid()) == []


# ------------------------------------------------------------------------------------------------- time and processes


def test_a_hanging_call_ends_at_its_deadline() -> None:
    overshoots = []
    with RewardSuite({"hung": HUNG}, SuiteConfig(workers=1)) as suite:
        for _ in range(3):  # a busy machine may stall once
            assert values(suite.submit_samples(samples(["ok"])).collect(), "hung") == [2.0]
            started = time.monotonic()
            matrix = suite.submit_samples(samples(["bad"])).collect()
            overshoots.append(time.monotonic() - started - 0.5)
            assert matrix.faults["hung"] == {"timeout": 1}
    assert 0 <= min(overshoots) <= 1.0


def test_a_reward_that_always_hangs_costs_three_deadlines_a_share(tmp_path: Path) -> None:
    """Of 8 completions in one share three are tried; a value in between starts the count anew."""
    tally = tmp_path / "tally"
    spec = {"reward": f"{HOME}.Tally", "args": {"path": str(tally)}, "timeout_s": 1.0}
    with RewardSuite({"hung": spec}, SuiteConfig(workers=1)) as suite:
        first = suite.submit_samples(samples(["bad"] * 8)).collect()
        assert len(tally.read_text().splitlines()) == 3
        second = suite.submit_samples(samples(["bad", "ok", "bad", "bad", "ok"])).collect()
    assert first.faults["hung"] == {"timeout": 8}
    assert values(second, "hung") == [None, 2.0, None, None, 2.0]
    assert len(tally.read_text().splitlines()) == 6


def test_an_answer_that_waits_for_a_late_trainer_counts() -> None:
    """The deadline is the reward's: a trainer that was busy or stopped meanwhile takes what has come."""
    setup = pickle.dumps({"sources": {"sound": (f"{HOME}.length", {})}, "memory_mb": 512, "seed": 0})
    process = Process(setup, lambda: False)
    try:
        process.start(60.0)
        process.send(json.dumps({"name": "sound", "start": 0}).encode(), 60.0)
        process.send(pickle.dumps(({"completion": ["ok"]}, ["key"])), 60.0)
        assert process.receive(60.0)["wanted"]
        answer, until = None, time.monotonic() + 60
        while answer is None and time.monotonic() < until:
            with contextlib.suppress(Lost):
                answer = process.receive(-1.0)
        assert answer == {"outcomes": [[2.0, None, ""]]}
        with pytest.raises(Lost, match="no value within"):
            process.receive(-1.0)
    finally:
        process.kill()


def test_memory_is_given_back() -> None:
    """The worker that hit its limit is replaced; the next completion of the same share finds room."""
    with RewardSuite({"full": fault("Single", "memory")}, SuiteConfig(workers=1, memory_mb=256)) as suite:
        suite.start()
        before = workers_of(os.getpid())
        matrix = suite.submit_samples(samples(TEXTS)).collect()
        assert values(matrix, "full") == [2.0, None, 4.0]
        assert workers_of(os.getpid()) != before


def test_a_cheap_reward_costs_little() -> None:
    """Under a millisecond a completion of the trainer's own time, threads included."""
    many = samples([f"completion {i}" for i in range(1000)])
    with RewardSuite({"sound": f"{HOME}.length"}, SuiteConfig(workers=2)) as suite:
        suite.submit_samples(many).collect()
        started = time.process_time()
        suite.submit_samples(many).collect()
        assert time.process_time() - started < 1.0


def test_a_worker_that_dies_between_calls_is_not_held_against_the_next_one() -> None:
    with RewardSuite({"sound": f"{HOME}.length"}, SuiteConfig(workers=1)) as suite:
        suite.submit_samples(samples(TEXTS)).collect()
        for pid in workers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        matrix = suite.submit_samples(samples(TEXTS)).collect()
    assert values(matrix, "sound") == [2.0, 3.0, 4.0]
    assert matrix.faults["sound"] == Counter()


def test_cancelled_calls_free_their_worker() -> None:
    with RewardSuite({"hung": {**HUNG, "timeout_s": 60.0}}, SuiteConfig(workers=1)) as suite:
        pending = suite.submit_samples(samples(["bad"]))
        time.sleep(0.3)
        assert not pending.done()
        pending.cancel()
        started = time.monotonic()
        matrix = suite.submit_samples(samples(["ok"])).collect()
    assert values(matrix, "hung") == [2.0]
    assert time.monotonic() - started < 30.0


def test_an_exception_while_waiting_drops_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal handler raises in the main thread reaches the caller at once, not after the deadline."""

    def handler(number: int, frame: object) -> None:
        raise SystemExit(143)

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        with RewardSuite({"hung": {**HUNG, "timeout_s": 60.0}}, SuiteConfig(workers=1)) as suite:
            pending = suite.submit_samples(samples(["bad"]))
            started = time.monotonic()

            def interrupted() -> None:
                with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -USR1 {os.getpid()}"]):
                    pending.collect()

            with pytest.raises(SystemExit):
                interrupted()
            assert time.monotonic() - started < 30.0
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert workers_of(os.getpid()) == []


def test_workers_outlive_the_signals_of_their_scheduler() -> None:
    with RewardSuite({"sound": f"{HOME}.length"}, SuiteConfig(workers=1)) as suite:
        suite.submit_samples(samples(TEXTS)).collect()
        (worker,) = workers_of(os.getpid())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, number)
        suite.submit_samples(samples(TEXTS)).collect()
        assert workers_of(os.getpid()) == [worker]


def test_a_forgotten_suite_leaves_no_processes_threads_or_descriptors() -> None:
    before = descriptors()
    suite = RewardSuite({"sound": f"{HOME}.length", "hung": HUNG}, SuiteConfig(workers=2))
    suite.submit_samples(samples(["bad"]))
    del suite
    assert workers_of(os.getpid()) == []
    assert descriptors() == before


PROGRAM = """
import os, pickle, sys, time
from alignment.rewards.protocol import SuiteConfig
from alignment.rewards.workers import Job, WorkerPool
pool = WorkerPool({"hang": ("tests.reward_faults.Single", {"fault": "spin"})}, SuiteConfig(workers=2), 0)
pool.parameters(["hang"])
body = pickle.dumps(({"completion": ["bad"]}, ["key"]))
pool.submit(Job(name="hang", body=body, size=1, per_sample=True, timeout_s=600.0))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_the_trainer(number: int) -> None:
    """Even in the middle of a call, and even when the trainer cannot say good-bye."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with program.stdout:
        assert int(program.stdout.readline()) == program.pid
        assert workers_of(program.pid)
        os.kill(program.pid, number)
        program.wait(timeout=10)
    until = time.monotonic() + 30  # a busy machine lets a worker notice late
    while workers_of(program.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert workers_of(program.pid) == []


def test_a_forked_copy_neither_uses_nor_stops_the_workers() -> None:
    """A DataLoader's process, for example: it gets workers of its own, and its end does not end the original's."""
    with RewardSuite({"sound": f"{HOME}.length"}, SuiteConfig(workers=1)) as suite:
        suite.submit_samples(samples(TEXTS)).collect()
        mine = workers_of(os.getpid())
        child = os.fork()
        if child == 0:
            suite.close()
            os._exit(0 if values(suite.submit_samples(samples(TEXTS)).collect(), "sound") == [2.0, 3.0, 4.0] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert values(suite.submit_samples(samples(TEXTS)).collect(), "sound") == [2.0, 3.0, 4.0]
        assert workers_of(os.getpid()) == mine


# ----------------------------------------------------------------------------------------------------- long runs


RARE = """
import os, random, time

def rare(completion):
    # Global random numbers follow from what is scored, so the share of faults is the same in every run.
    draw = random.random()
    if draw < 0.001:
        time.sleep(600)
    if draw < 0.011:
        raise RuntimeError("one in a hundred")
    return 1.0
"""


def test_one_fault_in_a_hundred_and_one_hang_in_a_thousand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run finishes; the reward is a user's own file outside the repository."""
    (tmp_path / "my_rare_reward.py").write_text(RARE)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"reward": "my_rare_reward.rare", "timeout_s": 1.0}
    faults: Counter[str] = Counter()
    with RewardSuite({"rare": spec}, SuiteConfig(workers=2)) as suite:
        for step in range(60):
            matrix = suite.submit_samples(samples([f"{step} {i}" for i in range(64)])).collect()
            faults += matrix.faults["rare"]
            assert int(matrix.valid.sum()) == 64 - matrix.faults["rare"].total()
    calls = 60 * 64
    assert set(faults) == {"raise", "timeout"}
    # Four standard deviations of the binomial around 1 % and 0.1 %.
    assert abs(faults["raise"] - 0.01 * calls) < 4 * (0.01 * calls) ** 0.5
    assert abs(faults["timeout"] - 0.001 * calls) < 4 * (0.001 * calls) ** 0.5


def failing(text: str, step: int) -> Samples:
    return samples(["ok"] * 7 + [text if step % 2 else "ok"] + [text] * 2)


def test_too_many_faults_stop_the_run() -> None:
    """2 and 3 of 10 alternate: 25 % over 50 batches. The 49th is not yet a full window."""
    with RewardSuite({"bad": fault("Single", "raise")}, SuiteConfig(workers=1)) as suite:
        for step in range(49):
            suite.submit_samples(failing("bad", step)).collect()
        with pytest.raises(RewardsFailing) as stop:
            suite.submit_samples(failing("bad", 49)).collect()
    told = str(stop.value)
    assert told.startswith("reward 'bad' failed to give a value for 25% of 500 completions over the last 50 batches")
    assert "raise 125" in told
    assert "ValueError: no" in told


def test_evaluation_and_deliberate_abstentions_do_not_count() -> None:
    suite = RewardSuite({"mute": returning("[None] * 2")}, SuiteConfig(fault_window=2))
    for _ in range(3):
        matrix = suite.submit_samples(samples(["a", "b"])).collect()
    assert matrix.faults["mute"] == Counter()
    assert torch.isnan(matrix.values).all()
    suite = RewardSuite({"wrong": returning("['x'] * 2")}, SuiteConfig(fault_window=2))
    for _ in range(3):
        matrix = suite.submit_samples(samples(["a", "b"]), learn=False).collect()
    assert matrix.faults["wrong"] == {"type": 2}


def test_the_fault_history_survives_a_resume() -> None:
    """25 batches, a resume, 25 batches: stopped at the same batch as without."""
    first, second = (RewardSuite({"wrong": returning("['x'] * 2")}) for _ in range(2))
    for _ in range(25):
        first.submit_samples(samples(["a", "b"])).collect()
    second.load_state_dict(first.state_dict())
    for _ in range(24):
        second.submit_samples(samples(["a", "b"])).collect()
    with pytest.raises(RewardsFailing, match="type 100"):
        second.submit_samples(samples(["a", "b"])).collect()


def test_stop_at_the_first_fault() -> None:
    """C15: the error names the reward, what came and what was expected."""
    suite = RewardSuite({"short": returning("[1.0]")}, SuiteConfig(on_fault="stop"))
    with pytest.raises(RewardsFailing, match=r"reward 'short' failed for 3 of 3; .*returned 1 value, expected 3"):
        suite.submit_samples(samples(TEXTS)).collect()


def test_the_first_fault_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    suite = RewardSuite({"short": returning("[1.0]")})
    with caplog.at_level(logging.WARNING, logger="alignment.rewards"):
        for _ in range(3):
            matrix = suite.submit_samples(samples(TEXTS)).collect()
    assert matrix.faults["short"] == {"length": 3}
    (record,) = caplog.records
    assert "reward 'short'" in record.getMessage()
    assert "returned 1 value, expected 3" in record.getMessage()
