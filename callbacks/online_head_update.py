"""A job that keeps running and re-trains one head on the feedback that comes in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.events import record_event
from alignment.feedback import Feedback, Rounds, Row, Standing, described, left_out, opened, told_by_first, under_way
from alignment.prompting import ReadsPrompts
from alignment.protocols import SizedBatches
from alignment.resume import put_back
from alignment.rollout import RolloutStopped
from alignment.stopping import stop_requested, together
from alignment.watching import HasFeed

HERE = "callbacks.OnlineHeadUpdate"


class OnlineHeadUpdate(Callback):
    """Every hour one head learns from the rows that have arrived in a file since; everything else stays as it is.

    The rows are prompts in any form that datamodules.PromptData reads (docs/feedback.md says where they may arrive);
    completions to them are sampled from the head and scored by its reward, which reads whatever columns it needs. They
    are taken in batches of `data.batch_size`, each once, in place of the data's own. A row that cannot be used is told
    and skipped; what has been read is in the checkpoint. A round begins only at its time: rows that come in between
    wait, and so does a file that is empty or not there. Events `online_head_update` (a round begins) and
    `damaged_feedback`.

    It needs a policy with heads (modules.DecoupledPO). Run it with `trainer.max_epochs: -1` and a constant
    `optim.schedule`; SIGTERM saves and ends it while it waits, too. Validation comes after as many batches as the data
    would give in an epoch, or see `trainer.val_check_interval`.

    Args:
        head: the reward whose head learns.
        path: a file of JSON lines, a folder of .jsonl files, or an sqlite file.
        every: seconds from one round to the next; the first one begins at once.
        wait: train on nothing else. False: on the data's own prompts between the rounds, as without this callback.
        poll: seconds between two looks at the clock while it waits.
        table: of an sqlite file. Null: its only one.
        rows: new rows that a round begins with, at least; fewer wait for the next one.
        quiet: seconds without a new row after which it takes what is there and ends the run. Null: it never does.
    """

    def __init__(
        self,
        head: str,
        path: str,
        every: float = 3600.0,
        wait: bool = True,
        poll: float = 1.0,
        table: str | None = None,
        rows: int = 1,
        quiet: float | None = None,
    ) -> None:
        if not 0 < every < math.inf or not 0 < poll < math.inf:
            raise UserError(f"{HERE}: every is {every} and poll {poll}; both are seconds above 0")
        if rows < 1 or (quiet is not None and not 0 <= quiet < math.inf):
            raise UserError(f"{HERE}: rows is {rows} and quiet {quiet}; they are at least 1, and seconds or null")
        self.head, self.path, self.wait, self.poll = head, path, wait, poll
        self.every, self.table, self.rows, self.quiet = every, table, rows, quiet
        self.clock: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self.standing = Standing()
        self._source: Feedback | None = None  # on rank 0
        self._rounds: Rounds | None = None
        self._taken: tuple[int, Standing] | None = None  # batch number of the last rows, and where they end
        self._told: float | None = None  # the round that it said it waits for
        self._trainer: L.Trainer | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(head=self.head, path=self.path)

    # ------------------------------------------------------------------ life

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(pl_module, HasFeed):
            raise UserError(
                f"{HERE} needs a policy with heads (modules.DecoupledPO), not a {type(pl_module).__name__}; leave the "
                "callback out"
            )
        if not pl_module.weights.get(self.head):
            known = ", ".join(name for name, weight in pl_module.weights.items() if weight > 0)
            raise UserError(f"{HERE}: there is no head of a reward '{self.head}'; there are {known}")
        if pl_module.feed is not None:
            raise UserError(f"{HERE} is given twice; a run re-trains one head")
        if pl_module.dynamic_sampling:
            raise UserError(f"{HERE}: dynamic_sampling would put other prompts in place of feedback; set it to 0")
        if not isinstance(data, ReadsPrompts) or not isinstance(data, SizedBatches):
            raise UserError(f"{HERE} reads rows as datamodules.PromptData does; {type(data).__name__} cannot")
        self._trainer = trainer
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._source = opened(self.path, self.table, HERE)
            if self._source is not None:
                self._rounds = Rounds(self._source, self.every, self.rows, self.quiet)
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
        self.standing, self._taken = self._reached(), None
        while True:
            lines, after, over = self._look(trainer)
            groups = self._prompts(trainer, module, lines)
            if groups:
                module.only, self._taken = self.head, (module.batches_seen, after)
                mine = groups[distributed.rank() :: distributed.world_size()]
                return GroupBatch.from_groups(mine).to(batch.device)
            self.standing = after
            if lines:  # none of them can be used
                continue
            module.only = None
            if over:
                self._end(trainer)
            if not self.wait:
                return batch
            with together(trainer.lightning_module):
                if stop_requested(trainer.lightning_module):
                    raise RolloutStopped("the run was asked to stop while it waited for feedback")
            self._tell_wait()
            self.sleep(self.poll)

    def _look(self, trainer: L.Trainer) -> tuple[list[Row], Standing, bool]:
        """(the next rows, where they end, whether there will be no more), as rank 0 sees clock and files. A
        collective."""
        found = None
        if self._source is not None and self._rounds is not None:
            now = self.clock()
            standing = self._rounds.begin(self.standing, now)
            if under_way(standing.places) and standing.due != self.standing.due:
                rows = described(self._source, standing.places)
                record_event(trainer, "online_head_update", f"the head of {self.head} learns from {rows}")
            lines, places = self._source.read(standing.places, trainer.datamodule.batch_size)  # type: ignore[attr-defined]
            over = not lines and not under_way(places) and self._rounds.silence.over(now)
            found = (standing, lines, Standing(places=places, due=standing.due), over)
        self.standing, lines, after, over = told_by_first(found)
        return lines, after, over

    def _prompts(self, trainer: L.Trainer, module: HasFeed, lines: list[Row]) -> list[Group]:
        data = trainer.datamodule  # type: ignore[attr-defined]
        groups, faults = data.read_prompts(lines, self.path, module.suite.needed_columns())
        if faults:
            record_event(trainer, "damaged_feedback", left_out(faults, self.path))
        found: list[Group] = groups
        return found

    def _tell_wait(self) -> None:
        due = self.standing.due
        if due != self._told and due is not None:
            rank_zero_info(f"waiting for feedback in {self.path}; the next look is in {due - self.clock():.0f} s")
            self._told = due

    def _end(self, trainer: L.Trainer) -> NoReturn:
        """Leave the training step as if its batch had not been asked for, and training with it."""
        assert self.quiet is not None
        rank_zero_info(f"no feedback in {self.path} for {self.quiet:g} s: the run ends")
        put_back(trainer)
        trainer.should_stop = True
        raise StopIteration

    # ------------------------------------------------------------------ state

    def _reached(self) -> Standing:
        """Behind the last rows when their batch is done, before them while it may still be dropped."""
        if self._taken is None:
            return self.standing
        assert self._trainer is not None
        module = self._trainer.lightning_module
        assert isinstance(module, HasFeed)
        batch, after = self._taken
        return after if module.batches_seen > batch else self.standing

    def state_dict(self) -> dict[str, Any]:
        return self._reached().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.standing = Standing.of_state(state_dict)
