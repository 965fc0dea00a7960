"""The queue in front of the tracker: order, retries, refusals, and what an outage may cost."""

from __future__ import annotations

import threading
import time

import pytest

from alignment import outbox
from alignment.outbox import Outbox, TrackerAway, TrackerRefused


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FIRST_RETRY", 0.02)


def test_calls_run_in_order_off_the_callers_thread() -> None:
    box, seen = Outbox("tracker"), []
    for i in range(100):
        box.put(lambda i=i: seen.append((i, threading.current_thread().name)))
    assert box.wait()
    assert seen == [(i, "tracker") for i in range(100)]


def test_the_thread_ends_when_nothing_comes_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "IDLE", 0.05)
    box, threads = Outbox("tracker"), []
    for _ in range(2):
        box.put(lambda: threads.append(threading.current_thread()))
        assert box.wait()
        threads[-1].join(timeout=10)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


@pytest.mark.filterwarnings("ignore:tracker is away")
def test_an_outage_delays_and_loses_nothing() -> None:
    box, seen, failures = Outbox("tracker"), [], iter([1, 2, 3])

    def first() -> None:
        if next(failures, None) is not None:
            raise TrackerAway("no route")
        seen.append("first")

    box.put(first)
    box.put(lambda: seen.append("second"))
    assert box.wait()
    assert seen == ["first", "second"]


def test_a_refused_call_is_dropped_with_a_warning() -> None:
    box, seen = Outbox("tracker"), []

    def refused() -> None:
        time.sleep(0.1)  # until somebody listens for the warning
        raise TrackerRefused("no such run")

    box.put(refused)
    box.put(lambda: seen.append("next"))
    with pytest.warns(UserWarning, match="tracker refused a record, which is dropped: no such run"):
        assert box.wait()
    assert seen == ["next"]


@pytest.mark.parametrize("kind", ["away", "hangs"])
@pytest.mark.filterwarnings("ignore:tracker is away")
def test_waiting_costs_one_second_per_outage(kind: str) -> None:
    box, release = Outbox("tracker"), threading.Event()

    def call() -> None:
        if kind == "away" and not release.is_set():
            raise TrackerAway("no route")
        release.wait(30)

    started = time.monotonic()
    for _ in range(1000):
        box.put(call)
    assert time.monotonic() - started < 0.5
    assert not box.wait()
    assert not box.wait()  # the same outage: the second wait is free
    assert 0.9 < time.monotonic() - started < 1.6
    release.set()
    deadline = time.monotonic() + 20
    while len(box) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert box.wait()


@pytest.mark.filterwarnings("ignore:tracker is away")
def test_a_long_outage_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "LIMIT", 3)
    box, seen, release = Outbox("tracker"), [], threading.Event()
    box.put(lambda: release.wait(30) and seen.append(0))
    for i in range(1, 6):
        box.put(lambda i=i: seen.append(i))
    release.set()
    assert box.wait()
    assert seen == [0, 4, 5]
