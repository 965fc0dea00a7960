"""FollowedData: a data module whose training rows may still arrive while the run trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.events import record_event
from alignment.feedback import opened
from alignment.settings import as_config
from alignment.stopping import stop_requested
from alignment.watching import HasMetrics
from datamodules.base import DatasetInfo, GroupData
from datamodules.formats import check_columns
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader
from datamodules.prepare import read_row
from datamodules.reading import WORLD, json_line
from datamodules.rows import RowReport
from datamodules.splits import Split
from datamodules.stream import FollowConfig, Rules, Stream

HERE = "data.follow"


class FollowedOrder(BatchOrder):
    """Batches as a stream gives them, each when it is asked for; an epoch is so many of them, or fewer at the end.

    Args:
        stream: gives the batches. trainer: is told to stop at their end. batches: of an epoch. Others: see BatchOrder.
    """

    def __init__(
        self, stream: Stream, trainer: Any, *, batches: int, batch_size: int, seed: int, rank: int, world_size: int
    ) -> None:
        sampler = SampleOrder(batches * batch_size, seed=seed, shuffle=False)
        super().__init__(sampler, batch_size=batch_size, rank=rank, world_size=world_size)
        self._stream, self._trainer = stream, trainer

    def global_batches(self) -> list[list[int]]:
        raise TypeError("batches of rows that arrive are not known before they are asked for")

    def batches_from(self, start: int) -> Iterator[list[int]]:
        """Where the run stands is in the stream, not in `start`, which only says how many are left of the epoch."""
        for _ in range(start, len(self)):
            rows = self._stream.batch()
            if rows is None:
                if self._trainer is not None:
                    self._trainer.should_stop = True
                return
            yield self.share(rows)

    def put_back(self) -> None:
        self._stream.put_back()


class HeldOut:
    """Validation batches of the rows held out so far, which may become more: it has no length.

    Args:
        stream: holds them. batch_size: rows of a batch over all ranks. rank, world_size: whose share to give.
    """

    def __init__(self, stream: Stream, *, batch_size: int, rank: int, world_size: int) -> None:
        self._stream, self._batch_size = stream, batch_size
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[GroupBatch]:
        groups = [row.group for row in self._stream.standing.held]
        for start in range(0, len(groups), self._batch_size):
            batch = groups[start : start + self._batch_size]
            yield GroupBatch.from_groups(batch[self._rank :: self._world_size])


class FollowedData(GroupData):
    """GroupData that can follow rows while they arrive: `path` is then a folder of .jsonl files, one such file, or an
    sqlite file that others write to (docs/feedback.md).

    Each row is trained on once, in the order of arrival, except for those held out: a share `val_fraction` of the
    prompts, by a hash of the prompt, whatever comes when. Rows may repeat earlier ones. Event `damaged_feedback`;
    metrics `feedback/rows` (trained on so far), `feedback/new` (share of new rows in a batch), `feedback/held_out`.

    Args:
        path: where the rows are, or arrive.
        follow: how they are followed. Null: the rows are those that are there at the start.
    """

    def __init__(self, path: str = WORLD, *, follow: FollowConfig | None = None, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.follow = None if follow is None else as_config(FollowConfig, follow)
        self._stream: Stream | None = None
        if self.follow is None:
            return
        if path == WORLD:
            raise UserError(f"{HERE} needs data.path: a folder of .jsonl files, one such file, or an sqlite file")
        refused: dict[str, Any] = {"mix": self.mix, "length_aware": self.length_aware, "drop_last": self.drop_last}
        refused |= {"num_workers": self.num_workers, "max_rows": self._splits.recipe.max_rows}
        for name, value in refused.items():
            if value:
                raise UserError(f"{HERE}: {name} does not go with rows that are still to come; leave it out")
        check_columns(self._splits.recipe.columns, path)
        for split in self._splits.beside_training():
            raise UserError(f"{HERE}: {split}_split needs a {split}_path; the rows that arrive have no splits")
        self._shown.add("train")  # there is nothing to show of them at the start

    # ------------------------------------------------------------------ what there is

    @property
    def stream(self) -> Stream:
        """The rows that arrive."""
        assert self.follow is not None, "rows are not followed"
        if self._stream is None:
            self._stream = self._new_stream(self.follow)
        return self._stream

    def _new_stream(self, follow: FollowConfig) -> Stream:
        recipe = replace(self._splits.recipe, keep_duplicates=True)
        tokenizer = self.tokenizer

        def read(place: str, text: str) -> tuple[Group, int]:
            group, key = read_row(json_line(place, text), recipe, tokenizer, self.path)
            if self.purpose == "preference" and "margin" not in group.rows:  # other rows may have one
                group = replace(group, rows={**group.rows, "margin": [0.0] * len(group.completions)})
            return group, key

        rules = Rules(
            read=read,
            batch_size=self.batch_size,
            seed=self.order_seed,
            share=0.0 if self._splits.apart("val") else self._splits.val_fraction,
            most=self._splits.max_eval_rows,
            given=self._splits.held_out_keys(tokenizer),
            stop=recipe.on_bad_row == "stop",
        )
        return Stream(None, self.path, follow, rules)

    def groups(self, split: Split) -> Sequence[Group]:  # type: ignore[override]
        """The groups of a split. Of rows that arrive: those kept to be drawn again, and those held out."""
        if self.follow is None or self._splits.apart(split):
            return super().groups(split)
        rows = self.stream.standing.memory if split == "train" else self.stream.standing.held
        return [row.group for row in rows]

    @property
    def reports(self) -> dict[str, RowReport]:
        arrived = {} if self._stream is None else {"train": self._stream.standing.report}
        return arrived | super().reports

    def dataset_inputs(self) -> list[DatasetInfo]:
        """Rows that arrive have no digest; what became of them is shown at the end."""
        found = super().dataset_inputs()
        if self.follow is None:
            return found
        rows = self.stream.standing.report.used
        return [*found, DatasetInfo(name=self.path, path=self.path, split="train", rows=rows, digest="followed")]

    def plan(self) -> None:
        if self.follow is not None:
            raise UserError("a mix or a curriculum that moves needs rows that are all there; leave data.follow out")
        super().plan()

    # ------------------------------------------------------------------ Lightning

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.follow is None or stage != "fit":
            return
        stream, trainer = self.stream, self.trainer
        stream.source = opened(self.path, self.follow.table, HERE)
        if trainer is None:
            return
        stream.patient = not trainer.fast_dev_run  # type: ignore[attr-defined]
        stream.told = lambda line: record_event(trainer, "damaged_feedback", line)
        module = trainer.lightning_module
        if isinstance(module, HasMetrics):
            stream.noted = module.note_values
        stream.stopped = lambda: stop_requested(module)

    def teardown(self, stage: str) -> None:
        """Show what became of the rows."""
        super().teardown(stage)
        if self._stream is not None and stage == "fit" and distributed.rank() == 0:
            Console().print(self._stream.standing.report.table())

    def train_dataloader(self) -> StatefulLoader:
        if self.follow is None:
            return super().train_dataloader()
        if self.trainer is not None and self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            raise UserError(f"{HERE}: trainer.overfit_batches needs rows that are all there")
        rank, ranks, pin = self._seat()
        if self.batch_size < ranks:
            raise UserError(f"batch_size is {self.batch_size}, over {ranks} ranks: each needs a row")
        order = FollowedOrder(
            self.stream,
            self.trainer,
            batches=self.follow.epoch,
            batch_size=self.batch_size,
            seed=self.order_seed,
            rank=rank,
            world_size=ranks,
        )
        return StatefulLoader(self.stream, order, pin_memory=pin)  # type: ignore[arg-type]  # it gives rows by number

    def val_dataloader(self) -> Any:
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        if self.follow is None or self._splits.apart("val") or not fitting:
            return super().val_dataloader()
        rank, ranks, _ = self._seat()
        if not self._splits.val_fraction:
            return []
        return HeldOut(self.stream, batch_size=self.batch_size, rank=rank, world_size=ranks)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.follow is None else {"stream": self.stream.state_dict()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.follow is not None and "stream" in state_dict:
            self.stream.load_state_dict(state_dict["stream"])
