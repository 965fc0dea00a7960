"""What Lightning 2.6.6 gets wrong between a checkpoint and its resume, put right: resumed equals uninterrupted.

Lightning saves inside hooks, between two updates of its own counters, and on resume guesses where in the loop it was.
The guesses that go wrong (`tests/integration/test_resume.py` has each of them):

- a batch's end with a validation due: the validation is skipped;
- a batch's end that is an epoch's end: the epoch's last hooks are skipped;
- inside a validation: it resumes in the middle, with a loader that starts at the beginning;
- an epoch's end under `max_steps`: the epoch is finished twice; cut by `max_steps`: the rest of it is never trained on;
- `trainer.estimated_stepping_batches` in `configure_optimizers`: the loader is built before the loop state is read, and
  its position is never restored; an epoch's end drops the position too.

`settle` rewrites the loop state while saving, `rewind` puts loop and loader in place when training starts. Both may be
called more than once: our modules call them, and `callbacks.Checkpoint` does for modules that do not.
Inside a training step the batch must be put back first (`put_back`).
Not covered: a checkpoint made inside a training step otherwise (an exception's), and one of the very last step, after
which Lightning runs nothing, not even a validation that was due.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.fabric.utilities.types import _Stateful

from alignment.protocols import TakesBack

_Counters = dict[str, Any]


def settle(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Rewrite `checkpoint["loops"]["fit_loop"]` as it would be at the boundary the save stands at. Call it from
    `on_save_checkpoint`."""
    state: _Counters = checkpoint["loops"]["fit_loop"]
    batches: _Counters = state["epoch_loop.batch_progress"]
    epochs: _Counters = state["epoch_progress"]
    if epochs["current"]["started"] == 0:
        return
    if epochs["current"]["processed"] == epochs["current"]["started"]:
        _settle_between_epochs(trainer, epochs, batches)
    elif batches["total"]["completed"] == batches["total"]["processed"] - 1:
        _settle_batch(trainer, state)
    elif trainer.validating and _mid_validation(state["epoch_loop.val_loop.batch_progress"]):
        _validate_first(state["epoch_loop.val_loop.batch_progress"])


def rewind(trainer: L.Trainer) -> None:
    """Put the loader and the loops where the checkpoint left them. Call it from `on_train_start`; a run that does not
    resume is left alone."""
    # Any: these loops are Lightning's own business and typed for its own use.
    fit: Any = trainer.fit_loop
    if not fit.is_resuming:
        return
    fetcher, epoch = fit._data_fetcher, fit.epoch_loop
    if fit._combined_loader_states_to_load:
        fit._combined_loader._load_state_dicts(fit._combined_loader_states_to_load)
        fit._combined_loader_states_to_load = []
        iter(fetcher)
    if fit.epoch_progress.current.processed == fit.epoch_progress.current.started:
        # Between two epochs nothing is half done; the epoch loop would take the new epoch for the finished one.
        epoch.restarting = False
    elif epoch.val_loop.restarted_mid_evaluation:
        total = epoch.val_loop.batch_progress.total
        total.ready = total.started = total.processed = total.completed
    elif epoch._num_ready_batches_reached() and not epoch._should_check_val_fx(fetcher):
        # Only the epoch's last hooks are left. The epoch loop asks for one more batch before it notices.
        fetcher.iterator = iter(())


def stand_at(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """What a trainer that has not trained evaluates of a checkpoint is logged where the checkpoint stands, not at step
    0. Call it from `on_load_checkpoint`."""
    epoch, state = trainer.fit_loop.epoch_loop, checkpoint["loops"]["fit_loop"]
    if epoch._batches_that_stepped == 0:
        epoch._batches_that_stepped = int(state["epoch_loop.state_dict"]["_batches_that_stepped"])


def put_back(trainer: L.Trainer) -> bool:
    """Inside a training step that has changed nothing yet: loops and loader stand again where they stood before its
    batch was read, so that a checkpoint made now leads to the same batch. For a run that then leaves.

    False, with nothing changed, for a loader that has a position and cannot go back.
    """
    fit: Any = trainer.fit_loop
    by_time = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    epoch, loaders = fit.epoch_loop, fit._combined_loader.flattened
    if not all(isinstance(loader, TakesBack) for loader in loaders if isinstance(loader, _Stateful)):
        return False
    for loader in loaders:
        if isinstance(loader, TakesBack):
            loader.put_back()
    for scope in (epoch.batch_progress.total, epoch.batch_progress.current):
        scope.ready -= 1
        scope.started -= 1
    epoch.batch_progress.is_last_batch = False
    # Where the previous batch had a validation, whoever resumes counts that batch once more: Lightning takes the state
    # for one saved at the validation's end, before it counts. (It does so at an epoch's start too.)
    if not by_time and validates_next(trainer):
        epoch._batches_that_stepped -= 1
    return True


def validates_next(trainer: L.Trainer) -> bool:
    """At a batch's end: whether Lightning is about to validate."""
    fit: Any = trainer.fit_loop
    return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))


def _settle_batch(trainer: L.Trainer, state: _Counters) -> None:
    """At a batch's end: the batch is complete. What follows is the validation, if one is due, else the next batch."""
    batches = state["epoch_loop.batch_progress"]
    for scope in ("total", "current"):
        batches[scope]["completed"] = batches[scope]["processed"]
    if validates_next(trainer):
        _validate_first(state["epoch_loop.val_loop.batch_progress"])
    else:
        # Lightning adds this step after the hooks; with a validation ahead it still will, after that.
        state["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def _settle_between_epochs(trainer: L.Trainer, epochs: _Counters, batches: _Counters) -> None:
    cut = batches["current"]["ready"] < trainer.num_training_batches and not batches["is_last_batch"]
    if cut and batches["current"]["ready"] > 0:
        # max_steps or an early stop ended the epoch early: whoever resumes goes on inside it.
        for scope in ("total", "current"):
            epochs[scope]["processed"] = epochs[scope]["started"] - 1
            epochs[scope]["completed"] = epochs[scope]["processed"]
    else:
        for scope in ("total", "current"):
            epochs[scope]["completed"] = epochs[scope]["processed"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def _mid_validation(batches: _Counters) -> bool:
    return bool(batches["total"]["completed"] != batches["total"]["ready"])


def _validate_first(batches: _Counters) -> None:
    """The counters Lightning takes for an interrupted validation, with nothing of it done yet."""
    done = batches["total"]["completed"] - batches["current"]["completed"]
    batches["total"].update(ready=done + 1, started=done + 1, processed=done, completed=done)
    batches["current"] = dict.fromkeys(batches["current"], 0)
