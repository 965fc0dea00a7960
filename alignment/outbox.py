"""A queue of tracker calls, run in order by one background thread, so that a dead tracker cannot slow or stop a run.

`put` never blocks and never raises. A call that fails because the tracker is away stays at the head of the queue and
is tried again, later and later; a call that the tracker refuses is dropped with a warning. Waiting for the tracker (at
the start, for a run id; at the end, for the queue to empty) takes at most `PATIENCE` seconds of the caller's time per
outage: one budget, filled up again by every call that succeeds.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

PATIENCE = 1.0
"""Seconds of waiting that one outage may cost."""
FIRST_RETRY, LAST_RETRY = 0.5, 60.0
"""Seconds between two tries; doubled from the first to the last."""
IDLE = 10.0
"""Seconds without a call after which the thread ends: a process may make many runs, each with a queue."""
LIMIT = 20_000
"""Calls kept while the tracker is away; beyond it the oldest are dropped (metrics are on disk anyway)."""

_AWAY = {
    "INTERNAL_ERROR",
    "IO_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "SERVICE_UNDER_MAINTENANCE",
    "REQUEST_LIMIT_EXCEEDED",
    "DEADLINE_EXCEEDED",
    "UNPARSEABLE_HTTP_ERROR",
}
"""MLflow's error codes that say nothing about the call itself."""


class TrackerAway(Exception):
    """The tracker could not be reached or could not answer; the call may succeed later."""


class TrackerRefused(Exception):
    """The tracker answered and will not take this call, now or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    run: Callable[[], None]
    patience: float


class Outbox:
    """Calls raise TrackerAway or TrackerRefused; any other exception is a bug and is shown with its traceback."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._away = False
        self._waited = 0.0  # seconds the callers waited since the last call that succeeded

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, run: Callable[[], None], patience: float = PATIENCE) -> None:
        """Queue a call. `patience`: seconds a caller waits for it while nothing says the tracker is away."""
        with self._changed:
            if len(self._calls) >= LIMIT:
                # The head may be running; the one behind it is the oldest that can go.
                del self._calls[1]
            self._calls.append(_Call(run=run, patience=patience))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait until the queue is empty. False when the tracker is away and the outage's budget is spent."""
        with self._changed:
            while self._calls:
                limit = (PATIENCE if self._away else self._calls[0].patience) - self._waited
                if limit <= 0:
                    return False
                started = time.monotonic()
                before = self._waited
                self._changed.wait(timeout=limit)
                # A success in the meantime has set the budget back; this wait then no longer counts.
                if self._waited == before and self._calls:
                    self._waited += time.monotonic() - started
        return True

    def _work(self) -> None:
        pause = FIRST_RETRY
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._calls), timeout=IDLE):
                    self._thread = None  # the next call starts another one
                    return
                call = self._calls[0]
            try:
                call.run()
            except TrackerAway as ex:
                self._report_outage(ex)
                time.sleep(pause)
                pause = min(2 * pause, LAST_RETRY)
                continue
            except TrackerRefused as ex:
                rank_zero_warn(f"{self.name} refused a record, which is dropped: {ex}")
            except BaseException:
                self._done()  # a bug: shown by the thread's traceback; the calls behind it still go out
                raise
            pause = FIRST_RETRY
            self._done()

    def _done(self) -> None:
        with self._changed:
            self._calls.popleft()
            self._waited, self._away = 0.0, False
            self._changed.notify_all()

    def _report_outage(self, ex: TrackerAway) -> None:
        with self._changed:
            new, self._away = not self._away, True
            self._changed.notify_all()
        if new:
            rank_zero_warn(
                f"{self.name} is away ({ex}). The run goes on; metrics are kept on disk and sent when it is back."
            )


def reach(call: Callable[[], Any]) -> Any:
    """Run a tracker call and sort what goes wrong into 'away' (try again) and 'refused' (never will)."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as ex:
        kind = TrackerAway if ex.error_code in _AWAY else TrackerRefused
        raise kind(first_line(ex)) from ex
    except (OSError, sqlite3.Error) as ex:
        raise TrackerAway(first_line(ex)) from ex


def first_line(ex: Exception) -> str:
    """What an exception says, short enough for a warning."""
    return (str(ex).strip().splitlines() or [type(ex).__name__])[0][:200]
