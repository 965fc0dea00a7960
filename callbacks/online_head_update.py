"""A job that keeps running and re-trains one head on the feedback that comes in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.events import record_event
from alignment.feedback import FeedbackFile, Place
from alignment.prompting import ReadsPrompts
from alignment.protocols import SizedBatches
from alignment.rollout import RolloutStopped
from alignment.stopping import stop_requested, together
from alignment.watching import HasFeed

SHOWN = 3
"""Damaged rows that are named in one line."""


class OnlineHeadUpdate(Callback):
    """Every hour one head learns from the rows that have arrived in a file since; everything else stays as it is.

    The rows are prompts in any form that datamodules.PromptData reads, one JSON object a line; completions to them are
    sampled from the head and scored by its reward, which reads whatever columns it needs. They are taken in batches of
    `data.batch_size`, each once, in place of the data's own. A row that cannot be used is told and skipped; what has
    been read is in the checkpoint. A round begins only at its time: rows that come in between wait, and so does a file
    that is empty or not there. Events `online_head_update` (a round begins) and `damaged_feedback`.

    It needs a policy with heads (modules.DecoupledPO). Run it with `trainer.max_epochs: -1` and a constant
    `optim.schedule`; SIGTERM saves and ends it while it waits, too. Validation comes after as many batches as the data
    would give in an epoch, or see `trainer.val_check_interval`.

    Args:
        head: the reward whose head learns.
        path: the file.
        every: seconds from one round to the next; the first one begins at once.
        wait: train on nothing else. False: on the data's own prompts between the rounds, as without this callback.
        poll: seconds between two looks at the clock while it waits.
    """

    def __init__(self, head: str, path: str, every: float = 3600.0, wait: bool = True, poll: float = 1.0) -> None:
        if not 0 < every < math.inf or not 0 < poll < math.inf:
            raise UserError(f"callbacks.OnlineHeadUpdate: every is {every} and poll {poll}; both are seconds above 0")
        if Path(path).is_dir():
            raise UserError(f"callbacks.OnlineHeadUpdate: '{path}' is a folder; give a file of JSON lines")
        self.head, self.path, self.wait, self.poll = head, path, wait, poll
        self.file = FeedbackFile(Path(path), every)
        self.clock: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self.place = Place()
        self._taken: tuple[int, Place] | None = None  # batch number of the last rows, and the place behind them
        self._told: float | None = None  # the round that it said it waits for
        self._trainer: L.Trainer | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(head=self.head, path=self.path)

    # ------------------------------------------------------------------ life

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        here, data = "callbacks.OnlineHeadUpdate", trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(pl_module, HasFeed):
            raise UserError(
                f"{here} needs a policy with heads (modules.DecoupledPO), not a {type(pl_module).__name__}; leave the "
                "callback out"
            )
        if not pl_module.weights.get(self.head):
            known = ", ".join(name for name, weight in pl_module.weights.items() if weight > 0)
            raise UserError(f"{here}: there is no head of a reward '{self.head}'; there are {known}")
        if pl_module.feed is not None:
            raise UserError(f"{here} is given twice; a run re-trains one head")
        if pl_module.dynamic_sampling:
            raise UserError(f"{here}: dynamic_sampling would put other prompts in place of feedback; set it to 0")
        if not isinstance(data, ReadsPrompts) or not isinstance(data, SizedBatches):
            raise UserError(f"{here} reads rows as datamodules.PromptData does; {type(data).__name__} cannot")
        self._trainer = trainer
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            pl_module.feed = self._feed

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(pl_module, HasFeed) and pl_module.feed == self._feed:
            pl_module.feed = None

    # ------------------------------------------------------------------ batches

    def _feed(self, batch: GroupBatch) -> GroupBatch:
        """What to train on in place of a batch of the data. A collective."""
        assert self._trainer is not None
        trainer, module = self._trainer, self._trainer.lightning_module
        assert isinstance(module, HasFeed)
        self.place, self._taken = self._read(), None
        while True:
            lines, after = self._look(trainer)
            groups = self._prompts(trainer, module, lines)
            if groups:
                module.only, self._taken = self.head, (module.batches_seen, after)
                mine = groups[distributed.rank() :: distributed.world_size()]
                return GroupBatch.from_groups(mine).to(batch.device)
            self.place = after
            if lines:  # none of them can be used
                continue
            module.only = None
            if not self.wait:
                return batch
            with together(trainer.lightning_module):
                if stop_requested(trainer.lightning_module):
                    raise RolloutStopped("the run was asked to stop while it waited for feedback")
            if self.place.due != self._told and self.place.due is not None:
                seconds = self.place.due - self.clock()
                rank_zero_info(f"waiting for feedback in {self.path}; the next look is in {seconds:.0f} s")
                self._told = self.place.due
            self.sleep(self.poll)

    def _look(self, trainer: L.Trainer) -> tuple[list[tuple[str, str]], Place]:
        """(the next lines, the place behind them), as rank 0 sees clock and file. A collective."""
        found = None
        if distributed.rank() == 0:
            place = self.file.begin(self.place, self.clock())
            found = (place, *self.file.read(place, trainer.datamodule.batch_size))  # type: ignore[attr-defined]
        parts: Any = distributed.all_gather_objects(found)
        place, lines, after = parts[0]
        if place.end > place.position and place.due != self.place.due:
            rows = f"row {place.last}" if place.last == place.row + 1 else f"rows {place.row + 1} to {place.last}"
            record_event(trainer, "online_head_update", f"the head of {self.head} learns from {rows} of {self.path}")
        self.place = place
        return lines, after

    def _prompts(self, trainer: L.Trainer, module: HasFeed, lines: list[tuple[str, str]]) -> list[Group]:
        data = trainer.datamodule  # type: ignore[attr-defined]
        groups, faults = data.read_prompts(lines, self.path, module.suite.needed_columns())
        if faults:
            shown = "; ".join(faults[:SHOWN]) + ("; ..." if len(faults) > SHOWN else "")
            record_event(trainer, "damaged_feedback", f"{len(faults)} rows of {self.path} are left out: {shown}")
        found: list[Group] = groups
        return found

    # ------------------------------------------------------------------ state

    def _read(self) -> Place:
        """Behind the last rows when their batch is done, before them while it may still be dropped."""
        if self._taken is None:
            return self.place
        assert self._trainer is not None
        module = self._trainer.lightning_module
        assert isinstance(module, HasFeed)
        batch, after = self._taken
        return after if module.batches_seen > batch else self.place

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._read())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = Place(**state_dict)
