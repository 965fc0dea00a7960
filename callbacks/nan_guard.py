"""Says why an update was left out for want of finite numbers, and where to go back to after too many of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping

from alignment.errors import UserError
from alignment.events import record_event
from alignment.guard import FiniteGuard, Limits, as_json
from alignment.protocols import HasArchive, PolicyArchive
from alignment.reward_mishaps import KEPT, HasMishaps
from alignment.settings import as_config
from alignment.skipped import Skipped
from alignment.tracking import TrackingLogger
from alignment.watching import HasEvaluationFaults

log = logging.getLogger(__name__)

LIMITS = Limits()
HERE = "callbacks.NanGuard"


@runtime_checkable
class HasGuard(Protocol):
    """A module whose updates are guarded: `alignment.training.TrainingMixin`."""

    guard: FiniteGuard


class NanGuard(Callback):
    """Every run leaves out updates that are not finite, keeps their batches, goes back once after too many and then
    stops (docs/reliability.md). This adds the reason, the limits, and where to go back to.

    For each update left out it finds the first place that is not finite: a weight, a layer, a reward, a row of the
    data, ... (`alignment.blame`), on which rank. That goes into the dump beside the batch, one line of the log, the
    event `nonfinite`, and `nonfinite/batch-N/blame.json` among the artifacts of the run. Rewards that give NaN or
    infinity or divide by zero are told as the event `reward_no_number`, once for each reward and message, of one reward
    at most eight: they abstain, and the update is made. An evaluation that is not finite is counted (`evaluations` in
    this callback's state), told as the event `nonfinite_evaluation`, and never among the best of callbacks.Checkpoint;
    EarlyStopping, which would stop the run for it, waits instead.

    While everything is finite it does nothing but compare names and counters on the host.

    Args:
        limits: how many non-finite updates are too many.
        back_to: `checkpoint`: the newest good one, weights and optimizer. `archive`: the newest policy of
            callbacks.Fp8PolicyArchive, weights alone, within its bound; the optimizer begins anew. While that is empty
            a checkpoint is taken.
        rerun: compute the loss of the batch once more to find layers, terms, rows and gradients; nothing is updated.
        read_state_every: steps between two reads of everything the optimizer remembers. It is read besides whenever
            something else has written it. 0: only then.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        back_to: Literal["checkpoint", "archive"] = "checkpoint",
        rerun: bool = True,
        read_state_every: int = 100,
    ) -> None:
        if back_to not in ("checkpoint", "archive"):
            raise UserError(f"{HERE}: back_to is '{back_to}'; it is checkpoint or archive")
        if read_state_every < 0:
            raise UserError(f"{HERE}: read_state_every is {read_state_every}; it is a number of steps, or 0")
        self.limits = as_config(Limits, limits)
        self.back_to, self.rerun, self.read_state_every = back_to, rerun, read_state_every
        self.evaluations = 0
        self._told: set[tuple[str, str]] = set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, HasGuard):
            raise UserError(
                f"{HERE} is for this project's modules, not for a {type(pl_module).__name__}; leave the callback out"
            )
        if stage != "fit":
            return
        guard = pl_module.guard
        guard.limits, guard.moments.every = self.limits, self.read_state_every
        guard.archive = self._archive(trainer) if self.back_to == "archive" else None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.check_finite:
                callback.check_finite = False
                log.info("EarlyStopping waits where %s is not finite, instead of ending the run", callback.monitor)

    def _archive(self, trainer: L.Trainer) -> PolicyArchive:
        found = [c.archive for c in trainer.callbacks if isinstance(c, HasArchive)]  # type: ignore[attr-defined]
        if not found:
            raise UserError(
                f"{HERE}: back_to is archive, and nothing keeps policies; add callbacks.Fp8PolicyArchive, or go back "
                "to a checkpoint"
            )
        return found[0]

    # ------------------------------------------------------------------ updates

    def on_nonfinite(self, trainer: L.Trainer, module: L.LightningModule, skipped: Skipped) -> dict[str, Any]:
        """See `alignment.skipped.SkipListener`."""
        from alignment.blame import blame  # the engine, which nothing here needs before

        found = blame(cast(Any, module), skipped, rerun=self.rerun)
        text = str(found["text"])
        numbers = f"loss {skipped.loss:g}, gradient norm {skipped.grad_norm:g}"
        record_event(trainer, "nonfinite", f"update left out ({numbers}): {text}; the batch is in {skipped.folder}")
        facts = {"loss": skipped.loss, "grad_norm": skipped.grad_norm, "blame": found}
        artifact = f"nonfinite/{skipped.folder.name}/blame.json"
        for logger in trainer.loggers:
            if isinstance(logger, TrackingLogger):
                logger.log_text(as_json(facts), artifact)
        return {"text": text, "blame": found}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell_mishaps(trainer, pl_module)

    # ------------------------------------------------------------------ rewards and evaluation

    def _tell_mishaps(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """A collective, only in batches in which a reward of some rank failed."""
        found = module.mishaps.take() if isinstance(module, HasMishaps) else []
        for mishap in found:
            kind = (mishap["reward"], mishap["message"])
            if kind not in self._told and sum(reward == kind[0] for reward, _ in self._told) < KEPT:
                self._told.add(kind)
                record_event(trainer, "reward_no_number", _mishap(mishap, found, trainer.world_size))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._tell_mishaps(trainer, pl_module)
        if not isinstance(pl_module, HasEvaluationFaults) or not pl_module.evaluation_faults:
            return
        if not trainer.sanity_checking:
            self.evaluations += 1
        names = ", ".join(pl_module.evaluation_faults)
        known = trainer.callback_metrics
        means = [f"{name} {float(known[name]):.4g}" for name in pl_module.evaluation_faults if name in known]
        text = f"not finite in a part of the rows: {names}; their micro-batches are left out of the means "
        text += f"({', '.join(means)}), by which this state is not ranked"
        record_event(trainer, "nonfinite_evaluation", text)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "told": sorted(map(list, self._told))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations = int(state_dict["evaluations"])
        self._told = {(str(reward), str(message)) for reward, message in state_dict["told"]}


def _mishap(mishap: Mapping[str, Any], every: Sequence[Mapping[str, Any]], world_size: int) -> str:
    """One of them, and how many completions of the batch had the same."""
    kind = (mishap["reward"], mishap["message"])
    alike = sum(int(m["count"]) for m in every if (m["reward"], m["message"]) == kind)
    where = f"row {mishap['row']}, completion {mishap['completion']}"
    rank = f" on rank {mishap['rank']}" if world_size > 1 else ""
    more = f" and {alike - 1} others" if alike > 1 else ""
    return f"reward {mishap['reward']} {mishap['message']} for {where}{rank}{more}; it abstains there"
