"""What a callback saw or did, where a user looks for it.

    the log                       one line, from rank 0
    every logger                  the metric event/NAME, 1 at that step: a mark beside the curves
    a TrackingLogger besides      a line in events.txt, in the run's folder and among the artifacts of the MLflow run
"""

from __future__ import annotations

import logging

import lightning as L

from alignment.tracking import TrackingLogger

log = logging.getLogger(__name__)

FILE = "events.txt"


def record_event(trainer: L.Trainer, name: str, text: str) -> None:
    """Any rank may call it; rank 0 records. A resumed run that does the same again adds no second line.

    Args:
        name: of the kind of event, for example `stalled_head`. text: one sentence.
    """
    if not trainer.is_global_zero:
        return
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # which Lightning logs the metrics at
    log.warning("%s at step %d: %s", name, step, text)
    for logger in trainer.loggers:
        logger.log_metrics({f"event/{name}": 1.0}, step=step)
        if isinstance(logger, TrackingLogger):
            _add_line(logger, f"step {step}  {name}: {text}")


def _add_line(logger: TrackingLogger, line: str) -> None:
    path = logger.run_dir / FILE
    try:
        before = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError):  # none yet, or a disk that training does not depend on
        before = []
    if line not in before:
        logger.log_text("".join(f"{each}\n" for each in (*before, line)), FILE)
