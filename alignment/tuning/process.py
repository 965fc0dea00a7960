"""One run of `alignment fit` in a process of its own, and the metrics it logs while it goes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alignment import runs
from alignment.errors import UserError

Metrics = Mapping[str, float]
POLL_SECONDS = 0.5
GRACE_SECONDS = 45.0
"""A run that is asked to end saves a checkpoint first; after this long it is killed."""
FIT = (sys.executable, "-m", "alignment", "fit")
_CHECKPOINTS = "checkpoints"


class RunFailed(Exception):
    """A run ended with an error; the text is the last thing it said."""


class Stopped(Exception):
    """Somebody asked to stop; the run was ended and counts as not done."""


class FitProcess:
    """`alignment fit` with some words, as a child that can be watched and ended.

    Args:
        words: after `fit`.
        name: of the run, which no other run has.
        root: folder of `runs`.
        log: file that gets what the run prints.
        stopping: set when everything is to end.
    """

    def __init__(self, words: Sequence[str], *, name: str, root: Path, log: Path, stopping: threading.Event) -> None:
        self.name, self.log = name, log
        self._words, self._root, self._stopping = list(words), root, stopping
        self._offset = 0

    def rows(self) -> Iterator[tuple[int, Metrics]]:
        """Start it, and give every row of metrics as it is logged, until it ends.

        Raises RunFailed when it ended with an error, Stopped when it was to end. Whoever leaves the loop ends the run.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*FIT, *self._words, f"--trainer.logger.run_name={self.name}"]
        with self.log.open("wb") as said:
            process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            while process.poll() is None:
                if self._stopping.is_set():
                    raise Stopped
                yield from self._new_rows()
                time.sleep(POLL_SECONDS)
            yield from self._new_rows()
        finally:
            _end(process)
        if process.returncode != 0:
            raise RunFailed(f"{self.name}: {self._last_words(process.returncode)} ({self.log})")

    @property
    def folder(self) -> Path | None:
        """Of the run; None before it has one."""
        return next((folder for folder, _ in runs.find_runs(self._root, None, run_name=self.name)), None)

    def checkpoint(self) -> Path:
        """The newest state. Raises RunFailed where the configuration saves none."""
        from alignment.checkpoint import CheckpointError, resolve

        folder = self.folder
        with contextlib.suppress(CheckpointError):
            if folder is not None:
                return resolve("last", folder / _CHECKPOINTS)
        raise RunFailed(f"{self.name} left no checkpoint; the configuration needs callbacks.Checkpoint")

    def _new_rows(self) -> Iterator[tuple[int, Metrics]]:
        folder = self.folder
        file = None if folder is None else folder / "metrics.jsonl"
        if file is None or not file.is_file():
            return
        with file.open("rb") as opened:
            opened.seek(self._offset)
            text = opened.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may still be being written
        self._offset += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            yield int(row.pop("step")), row

    def _last_words(self, status: int) -> str:
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("alignment: error:")]
        return (errors or lines or [f"it ended with status {status} and said nothing"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its children. A run that still goes may save first."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resolved(words: Sequence[str]) -> dict[str, Any]:
    """What `alignment fit` would run with: every setting. Raises UserError with the mistake in `words`."""
    done = subprocess.run([*FIT, *words, "--print_config"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError((said[-1] if said else "it said nothing").removeprefix("alignment: error: "))
    config = yaml.safe_load(done.stdout)
    assert isinstance(config, dict)
    return config
