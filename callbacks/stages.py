"""Training in stages: named stretches of a run, each with its values, its mix of data and its curriculum."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.events import record_event
from alignment.protocols import PlansData, Rows
from alignment.schedulable import HasSchedulables, Schedulable
from alignment.stages import FRACTION, Amount, Position, Ramp, StageConfig, Walk, amount, made
from alignment.watching import HasPairs, validates

log = logging.getLogger(__name__)

HERE = "callbacks.Stages"
STAGE = "stage"
"""Name of the number of the stage among the module's values."""
MARGIN = "margin"
MODEL = "model"
CHUNK = 256
"""Pairs handed to the module at once for its confidence; it cuts them further by tokens."""


class Stages(Callback):
    """Walks through stages. Each has a length (steps, epochs, a condition on a validation metric) and sets or ramps
    values: those of the module (`beta`, `kl.coefficient`, `entropy.coefficient`, `optim.lr`, ...), the mix of the data,
    and the share of the training rows in use (`data.fraction`).

    It is the one writer of the bases of these values; factors of other callbacks multiply what it says. Values are
    those of the optimizer step that comes next, and change between batches. Metrics: `schedule/stage` (its number, from
    0) and `schedule/NAME` of each value. Event `stage`.

    With `data.fraction` a stage is a curriculum: the rows of the highest confidence come first. The confidence is
    frozen when a stage that names it begins.

    Args:
        stages: name -> stage, in their order.
        confidence: of rows, for `data.fraction`: `margin`, the size of the rows' column of that name; `model`, how far
            apart the model holds the two completions of a pair when the stage begins, which takes a pass over all
            pairs; or the name of a data column with numbers. Null: `margin` where rows have it, else `model`.
    """

    def __init__(self, stages: dict[str, StageConfig], confidence: str | None = None) -> None:
        if not stages:
            raise UserError(f"{HERE}: there are no stages; give at least one")
        self.stages = {
            name: stage if isinstance(stage, StageConfig) else made(StageConfig, stage, f"{HERE}: stage '{name}'")
            for name, stage in stages.items()
        }
        self.confidence = confidence
        self.names = list(self.stages)
        self._configs = list(self.stages.values())
        self._ramps = [stage.ramps() for stage in self._configs]
        for name, stage, ramps in zip(self.names, self._configs, self._ramps, strict=True):
            if stage.endless and name != self.names[-1]:
                raise UserError(f"{HERE}: stage '{name}' has no length; give steps, epochs or until")
            by_condition = stage.until is not None and stage.steps is None and stage.epochs is None
            for value in [v for v, ramp in ramps.items() if by_condition and ramp.over is None and not ramp.still]:
                what = f"stage '{name}' ends by a condition"
                raise UserError(f"{HERE}: {what}; say over how many steps {value} ramps")
        self._walk: Walk | None = None

    # ------------------------------------------------------------------ what there is to move

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(pl_module, HasSchedulables):
            raise UserError(f"{HERE} is for this project's modules, not for a {type(pl_module).__name__}; leave it out")
        for name, ramps in zip(self.names, self._ramps, strict=True):
            for value, ramp in ramps.items():
                self._own(trainer, pl_module, f"{HERE}: stage '{name}'", value, ramp)
            if FRACTION in ramps:
                self._check_fraction(trainer, pl_module, name, ramps[FRACTION])
        self._check_shapes(trainer, pl_module)
        if STAGE not in pl_module.schedulables:
            pl_module.schedulables.register(Schedulable(STAGE, 0))
        pl_module.schedulables[STAGE].own(HERE)
        if any(value.startswith("data.") for ramps in self._ramps for value in ramps):
            self._data(trainer).plan()

    def _own(self, trainer: L.Trainer, module: L.LightningModule, where: str, value: str, ramp: Ramp) -> None:
        one = self._find(trainer, module, value)
        one.own(HERE)
        for given in (ramp.start, ramp.end):
            if given is not None:
                one.check(amount(given, one.configured, f"{where}: {value}"), where)

    def _check_shapes(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise UserError for a ramp by an even factor that begins or ends at 0."""
        reached: dict[str, float] = {}
        for name, ramps in zip(self.names, self._ramps, strict=True):
            for value, ramp in ramps.items():
                configured = self._find(trainer, module, value).configured
                end = amount(ramp.end, configured, value)
                start = reached.get(value, configured) if ramp.start is None else amount(ramp.start, configured, value)
                if ramp.shape == "geometric" and not (start > 0 and end > 0):
                    what = f"stage '{name}' ramps {value} from {start:g} to {end:g}"
                    raise UserError(f"{HERE}: {what}; geometric is by a factor, so neither may be 0: use linear")
                reached[value] = end

    def _find(self, trainer: L.Trainer, module: L.LightningModule, value: str) -> Schedulable:
        assert isinstance(module, HasSchedulables)
        holder = self._data(trainer) if value.startswith("data.") else module
        return holder.schedulables.find(value, HERE)

    def _data(self, trainer: L.Trainer) -> PlansData:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PlansData):
            what = f"a {type(data).__name__} has no mix or curriculum to move"
            raise UserError(f"{HERE}: {what}; leave data.* and mix out")
        return data

    def _check_fraction(self, trainer: L.Trainer, module: L.LightningModule, name: str, ramp: Ramp) -> None:
        for given in (ramp.start, ramp.end):
            if given is not None and not 0 < amount(given, 1.0, FRACTION) <= 1:
                raise UserError(f"{HERE}: {FRACTION} is {given}; it is above 0 and at most 1")
        if _takes_all(ramp):
            return
        source, rows = self._source(trainer), self._rows(trainer)
        if source == MODEL:
            if not isinstance(module, HasPairs):
                raise UserError(
                    f"{HERE}: {FRACTION} needs a confidence, and a {type(module).__name__} has none; give "
                    "`confidence` the name of a data column"
                )
            if name == self.names[0]:
                raise UserError(
                    f"{HERE}: {FRACTION} in the first stage goes by the model's confidence, and it has none before it "
                    "has learned; begin with a stage without it, or give rows a margin"
                )
        elif source == MARGIN:
            if rows.values(MARGIN) is None:
                raise UserError(f"{HERE}: confidence is margin, and the training rows have no column margin")
        else:
            self._column(rows, source)

    def _source(self, trainer: L.Trainer) -> str:
        if self.confidence is not None:
            return self.confidence
        return MODEL if self._rows(trainer).values(MARGIN) is None else MARGIN

    def _rows(self, trainer: L.Trainer) -> Rows:
        return self._data(trainer).groups("train")

    @staticmethod
    def _column(rows: Rows, name: str) -> np.ndarray:
        """[n] numbers of a data column, NaN where a row has none."""
        found: list[Any] = [columns.get(name) for columns in rows.columns()]
        try:
            numbers = np.array([math.nan if value is None else float(value) for value in found])
        except (TypeError, ValueError) as error:
            what = f"column '{name}', given as confidence, holds something else than numbers"
            raise UserError(f"{HERE}: {what}") from error
        if np.isnan(numbers).all():
            raise UserError(f"{HERE}: no training row has a column '{name}', which is given as confidence")
        return numbers

    # ------------------------------------------------------------------ walking

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check_lengths(trainer, pl_module)
        if self._walk is None:
            self._begin(trainer, pl_module, 0, self._position(trainer, pl_module))
        else:
            self._join(trainer, pl_module, self._walk)
        self._advance(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        here = len(self.names) if self._walk is None else self._walk.stage
        if (left := self.names[here + 1 :]) and trainer.is_global_zero:
            log.warning("%s: training ends in stage '%s'; not begun: %s", HERE, self.names[here], ", ".join(left))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._advance(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        known, first = trainer.callback_metrics, 0 if self._walk is None else self._walk.stage
        for ahead in [stage.until for stage in self._configs[first:] if stage.until is not None]:
            if ahead.monitor not in known:
                there = ", ".join(sorted(name for name in known if name.startswith("val/")))
                raise UserError(f"{HERE} watches {ahead.monitor}, which is not logged; there is {there or 'nothing'}")
        if trainer.sanity_checking or self._walk is None or (until := self._configs[self._walk.stage].until) is None:
            return
        self._walk.met = self._walk.met or until.met(float(known[until.monitor]), self._walk.memory)
        self._advance(trainer, pl_module)

    def _check_lengths(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise UserError for a stage whose end, or ramp to the end of the run, this run cannot know."""
        if any(stage.epochs is not None for stage in self._configs) and not math.isfinite(trainer.num_training_batches):
            raise UserError(f"{HERE}: epochs need data of a known length; give steps")
        for name, stage in [*self.stages.items()][:-1]:
            if stage.steps is None and stage.epochs is None and not validates(trainer):
                what = f"stage '{name}' ends by a metric of validation, and this run has no validation"
                raise UserError(f"{HERE}: {what}; give it steps or epochs, or the run validation data")
        if self._configs[-1].endless and any(ramp.over is None and not ramp.still for ramp in self._ramps[-1].values()):
            _total_steps(trainer, module)

    def _join(self, trainer: L.Trainer, module: L.LightningModule, walk: Walk) -> None:
        """A resumed stage may name more than it did when it began: that starts from what it is now."""
        ramps = self._ramps[walk.stage]
        new = [name for name in ramps if name not in walk.values]
        walk.values |= {name: float(self._find(trainer, module, name).base) for name in new}
        if FRACTION in new and not _takes_all(ramps[FRACTION]):
            self._freeze(trainer, module)

    @staticmethod
    def _position(trainer: L.Trainer, module: L.LightningModule) -> Position:
        assert isinstance(module, HasSchedulables)
        return Position(step=trainer.global_step, batches=module.batches_seen)

    def _advance(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Bring stage and values to where the run is."""
        now, per_epoch = self._position(trainer, module), float(trainer.num_training_batches)
        assert self._walk is not None
        while self._walk.stage + 1 < len(self.names):
            config = self._configs[self._walk.stage]
            if not self._walk.over(config, now, per_epoch):
                break
            begun = self._walk.next_begun(config, now)
            self._write(trainer, module, begun)
            self._begin(trainer, module, self._walk.stage + 1, begun)
        self._write(trainer, module, now)

    def _begin(self, trainer: L.Trainer, module: L.LightningModule, number: int, begun: Position) -> None:
        ramps, until = self._ramps[number], self._configs[number].until
        values = {name: float(self._find(trainer, module, name).base) for name in ramps}
        self._walk = Walk(stage=number, begun=begun, values=values)
        if until is not None:
            self._walk.memory = until.watch()
        if FRACTION in ramps and not _takes_all(ramps[FRACTION]):
            self._freeze(trainer, module)
        told = [f"{name} {self._told(trainer, module, name, ramp)}" for name, ramp in ramps.items()]
        what = f": {', '.join(told)}" if told else ""
        record_event(trainer, "stage", f"{self.names[number]} begins{what}")

    def _told(self, trainer: L.Trainer, module: L.LightningModule, name: str, ramp: Ramp) -> str:
        start, end = (self._amount(trainer, module, name, given) for given in (ramp.start, ramp.end))
        return f"{start:.4g}" if start == end else f"{start:.4g} -> {end:.4g}"

    def _amount(self, trainer: L.Trainer, module: L.LightningModule, name: str, given: Amount | None) -> float:
        """None: where the value was when the stage began."""
        assert self._walk is not None
        if given is None:
            return self._walk.values[name]
        return amount(given, self._find(trainer, module, name).configured, name)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, now: Position) -> None:
        assert self._walk is not None
        assert isinstance(module, HasSchedulables)
        for name, ramp in self._ramps[self._walk.stage].items():
            start, end = (self._amount(trainer, module, name, given) for given in (ramp.start, ramp.end))
            done = 1.0 if start == end else min(1.0, self._done(trainer, module, ramp, now))
            self._find(trainer, module, name).write(ramp.at(start, end, done), HERE)
        module.schedulables[STAGE].write(self._walk.stage, HERE)

    def _done(self, trainer: L.Trainer, module: L.LightningModule, ramp: Ramp, now: Position) -> float:
        """The share of a ramp that is behind."""
        assert self._walk is not None
        config, begun = self._configs[self._walk.stage], self._walk.begun
        if ramp.over is not None:
            return (now.step - begun.step) / ramp.over
        if not config.endless:
            return self._walk.done(config, now, float(trainer.num_training_batches))
        return (now.step - begun.step) / max(1.0, _total_steps(trainer, module) - begun.step)

    # ------------------------------------------------------------------ confidence

    def _freeze(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Give the data the confidence of each row as it is now. A collective."""
        source, rows = self._source(trainer), self._rows(trainer)
        if source == MODEL:
            found = self._judged(trainer, module, rows)
        elif source == MARGIN:
            margins = rows.values(MARGIN)
            assert margins is not None, "looked at in setup"
            found = np.abs(margins)
        else:
            found = self._column(rows, source)
        self._data(trainer).freeze(found)

    @staticmethod
    def _judged(trainer: L.Trainer, module: L.LightningModule, rows: Rows) -> np.ndarray:
        """[n] |delta| of each pair under the model as it is; sigmoid(|beta delta|) has the same order, and ties."""
        assert isinstance(module, HasPairs)
        found = np.zeros(len(rows))
        mine = range(distributed.rank(), len(rows), distributed.world_size())
        with trainer.precision_plugin.forward_context():
            for start in range(0, len(mine), CHUNK):
                places = mine[start : start + CHUNK]
                batch = GroupBatch.from_groups([rows[i] for i in places]).to(module.device)
                found[list(places)] = module.preference_gaps(batch).abs().double().cpu().numpy()
        if distributed.world_size() > 1:
            total = torch.from_numpy(found).to(module.device)
            found = distributed.all_reduce_sum(total).cpu().numpy()
        return found

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {} if self._walk is None else self._walk.state_dict(self.names[self._walk.stage])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        self._walk = Walk.from_state(state_dict, self.names)
        until = self._configs[self._walk.stage].until
        if until is not None:
            memory = until.watch()
            memory.load_state_dict(self._walk.memory.state_dict())
            self._walk.memory = memory


def _takes_all(ramp: Ramp) -> bool:
    """Whether all rows are in use throughout, so that none needs a confidence."""
    return ramp.still and amount(ramp.end, 1.0, FRACTION) == 1


def _total_steps(trainer: L.Trainer, module: L.LightningModule) -> float:
    """Optimizer steps of the whole run."""
    assert isinstance(module, HasSchedulables)
    ends = [float(trainer.max_steps)] if trainer.max_steps != -1 else []
    if trainer.max_epochs not in (None, -1):
        ends.append(float(trainer.num_training_batches) * int(trainer.max_epochs or 0) * module.updates_per_batch)
    found = min(ends, default=math.inf)
    if not math.isfinite(found):
        what = "the last stage ramps to the end of a run whose length is unknown"
        raise UserError(f"{HERE}: {what}; say over how many steps")
    return found
