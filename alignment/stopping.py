"""Leaving in the middle of a batch: what an online module asks and does while it samples and waits for rewards.

A rollout may take minutes, and a run that was asked to leave has half a minute. So the batch is dropped: whoever
computes raises RolloutStopped, all ranks drop together, the state from before the batch is saved, and the process
leaves. The resumed run starts with the same batch and samples the same completions (`alignment.randomness`).

    should_stop = partial(stop_requested, module)       # for LocalRollout and Pending.wait
    ...
    with droppable(module):         # TrainingMixin does this for training steps
        with together(module):      # around what a rank does by itself
            rollout.generate(...)
            pending.wait(should_stop)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

from alignment import distributed
from alignment.protocols import StopSource
from alignment.rollout import RolloutStopped


def stop_requested(module: L.LightningModule) -> bool:
    """Whether the run was asked to leave, on any rank: made for `should_stop` of rollouts and rewards. No collective.
    False without a Trainer or without a callback that would know."""
    return module._trainer is not None and any(source.stop_requested() for source in _sources(module.trainer))


@contextmanager
def together(module: L.LightningModule) -> Iterator[None]:
    """RolloutStopped in this block on one rank is raised on all of them, when each has come to the end of its own.

    The block must hold nothing in which ranks wait for each other after the first thing that may stop: a rank that has
    stopped would be missing. The end of the block is a collective.
    """
    stopped = False
    try:
        yield
    except RolloutStopped:
        stopped = True
    if distributed.any_rank(stopped, module.device):
        raise RolloutStopped("the run was asked to stop; this batch is dropped")


@contextmanager
def droppable(module: L.LightningModule) -> Iterator[None]:
    """RolloutStopped in this block, raised on every rank, ends the run in order: the state from before the batch is
    saved and SystemExit raised. Whoever has changed something that goes into a checkpoint must have changed it back.

    Without a signal to leave for (a `should_stop` of one's own) the exception goes on.
    """
    try:
        yield
    except RolloutStopped:
        for source in _sources(module.trainer):
            source.drop_batch(module.trainer, module)
        raise


def _sources(trainer: L.Trainer) -> list[StopSource]:
    return [callback for callback in trainer.callbacks if isinstance(callback, StopSource)]  # type: ignore[attr-defined]
