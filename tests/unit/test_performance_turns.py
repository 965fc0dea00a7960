"""Workers that take turns: what they say, when they go on, and what is known of one that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.performance import token_rewards, turns
from benchmarks.performance.turns import Worker, alternate

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import os, subprocess, sys, time\nfrom benchmarks.performance.turns import Turn\nturn = Turn()\n"
COUNTS = HEAD + (
    "step, more = 0, turn.ready(name='a')\nwhile more:\n step += 1\n more = turn.done(loss=step / 4)\nturn.end(n=step)"
)


def worker(tmp_path: Path, code: str, **settings: float) -> Worker:
    env = {"PYTHONPATH": str(ROOT)}
    return Worker([sys.executable, "-c", code], env=env, cwd=tmp_path, log_path=tmp_path / "log", **settings)


def test_a_step_at_a_time(tmp_path: Path) -> None:
    with worker(tmp_path, COUNTS) as one:
        ready = one.start()
        assert ready["name"] == "a"
        assert 0 < ready["since_start"] < 30
        assert [one.step()["loss"] for _ in range(3)] == [0.25, 0.5, 0.75]
        last = one.stop()
    assert last["n"] == 3  # it did not go on after the third `done`
    assert last["rss_peak"] > 1 << 20


def test_workers_alternate(tmp_path: Path) -> None:
    path = tmp_path / "order"
    code = HEAD + (
        f"more = turn.ready()\nwhile more:\n open({str(path)!r}, 'a').write(sys.argv[1])\n more = turn.done(loss=0.0)\n"
    )
    pair = [
        Worker([sys.executable, "-c", code, name], env={"PYTHONPATH": str(ROOT)}, log_path=tmp_path / name)
        for name in "ab"
    ]
    with pair[0], pair[1]:
        for each in pair:
            each.start()
        found = alternate(pair, 3)
        assert all(each.stop() == {} for each in pair)
    assert path.read_text() == "ababab"
    assert [[result["step"] for result in results] for results in found] == [[1, 2, 3], [1, 2, 3]]


def test_only_the_time_of_the_own_turn_counts(tmp_path: Path) -> None:
    code = HEAD + "turn.ready()\ntime.sleep(0.1)\nturn.done()\nturn.done()"
    with worker(tmp_path, code) as one:
        one.start()
        time.sleep(0.3)
        first = one.step()
        time.sleep(0.3)
        second = one.step()
        one.stop()
    assert 0.1 <= first["seconds"] < 0.3
    assert second["seconds"] < 0.1


def test_cpu_time_of_children_dead_or_alive_counts(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\n"
    stays = spin + "print(flush=True)\ntime.sleep(60)"
    code = HEAD + (
        f"turn.ready()\nsubprocess.run([sys.executable, '-c', {spin!r}])\nturn.done()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stays!r}],"
        " stdout=subprocess.PIPE)\nchild.stdout.readline()\nturn.done()\n"
    )
    with worker(tmp_path, code) as one:
        one.start()
        dead, alive = one.step(), one.step()
        one.stop()
    assert 0.28 < dead["cpu"] < 2  # the clock of /proc ticks every 10 ms
    assert 0.28 < alive["cpu"] < 2
    assert alive["rss_peak"] > dead["rss_peak"] + (1 << 21)  # a live child's memory is added, a dead one's is not


def test_a_worker_that_raises_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with worker(tmp_path, HEAD + "turn.ready()\nraise ValueError('out of apples')") as one:
        one.start()
        with pytest.raises(RuntimeError, match=r"(?s)ended before its turn was over \(exit status 1\).*out of apples"):
            one.step()
        assert one.stop() == {}


def test_a_worker_that_dies_before_it_is_ready(tmp_path: Path) -> None:
    with worker(tmp_path, "import os\nos._exit(7)") as one, pytest.raises(RuntimeError, match="exit status 7"):
        one.start()


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    with worker(tmp_path, HEAD + "turn.ready()\ntime.sleep(60)", patience=0.2) as one:
        one.start()
        with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
            one.step()


def test_a_surviving_child_does_not_keep_the_parent_waiting(tmp_path: Path) -> None:
    code = HEAD + "turn.ready()\nos.fork() or time.sleep(60)\nos._exit(3)"
    with worker(tmp_path, code) as one:
        one.start()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="exit status 3"):
            one.step()
        assert time.monotonic() - begun < 10


def test_a_worker_ends_when_its_parent_does(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom benchmarks.performance.turns import Worker\n"
        f"one = Worker([sys.executable, '-c', {COUNTS!r}], log_path='log')\none.start()\n"
        "print(one._process.pid, flush=True)\nos._exit(0)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    process = int(ended.stdout)
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the worker lives on")


def test_what_this_process_has() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.pid in turns.descendants()
    child.communicate(b"\n")
    assert child.pid not in turns.descendants()
    assert 0 < turns.since_start() < 24 * 3600


def test_rewards_on_token_ids() -> None:
    assert token_rewards.cheap([]) == 0
    assert token_rewards.cheap([1]) == pytest.approx(0.6180339887, abs=1e-8)  # the golden ratio's fraction
    assert token_rewards.cheap([1, 2]) == token_rewards.cheap([3]) == pytest.approx(3 * 0.6180339887 - 1, abs=1e-8)
    assert token_rewards.cheap([1], flat=True) == 0
    before = time.thread_time()
    assert token_rewards.slow([1, 2]) == token_rewards.cheap([2, 1])
    assert 0.03 <= time.thread_time() - before < 0.06
    assert token_rewards.raising([9, 1, 2]) == token_rewards.cheap([3])
    # 2654435761 = 61 (mod 100): of sums below 2, where nothing wraps, only 0 gives a multiple of 100
    with pytest.raises(ValueError, match="no value"):
        token_rewards.raising([0])
    raised = sum(token_rewards.mixed([total]) % 100 == 0 for total in range(10_000))
    assert 60 < raised < 140  # one in a hundred
