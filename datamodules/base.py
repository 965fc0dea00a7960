"""GroupData: what every offline data module shares. Subclasses say what a row is for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from alignment import distributed
from alignment.chat import Template, TrainOn
from alignment.errors import UserError
from alignment.schedulable import Schedulable, Schedulables
from alignment.settings import as_config
from alignment.stages import FRACTION, MIX
from datamodules.formats import Purpose
from datamodules.grading import Grades
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader
from datamodules.planned import Draws, MixConfig, PlannedOrder
from datamodules.prepare import OnBadRow, Recipe
from datamodules.reading import WORLD
from datamodules.rows import RowReport
from datamodules.splits import Place, Split, Splits
from datamodules.store import GroupStore
from datamodules.strata import DifficultyStratifiedBatchSampler

_STAGES: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """One data set of a run, for the tracker: `rows` are those used in this split, `digest` is of the whole source."""

    name: str
    path: str
    split: str
    rows: int
    digest: str


class GroupData(L.LightningDataModule):
    """Rows of a public format, tokenised once, in batches whose order is a pure function of (seed, epoch, position).

    Args:
        path: a local file or folder (json, jsonl, csv, tsv, parquet, txt; .gz), the id of a hub dataset, or
            "world:support", the built-in customer-support world, or "world:code", small programming tasks.
        split: which split of a hub dataset to train on.
        config: which configuration of a hub dataset, where it has several.
        val_path, val_split: validation rows of their own. Without either, `val_fraction` is held out (the built-in
            world has validation rows of its own).
        val_fraction: share of the prompts to hold out, with all of their rows, chosen by a hash of the prompt: another
            seed holds out the same. Training rows whose prompt is among rows given for validation or test are dropped.
        test_path, test_split: rows for `test`. Without either, the validation rows.
        predict_path, predict_split: rows for `predict`. Without either, the test rows.
        columns: our names for the source's columns, for example {prompt: question, completion: answer}.
        template: "chat" the tokenizer's chat template, "plain" a built-in layout, "raw" texts as they are, "auto" chat
            where the tokenizer has a template, else plain.
        template_kwargs: variables for the chat template, for example {enable_thinking: false}.
        system: system message for rows that have none.
        allow_special: let control tokens written in the rows' texts be control tokens. Trusted data only.
        batch_size: rows or pairs per optimizer step, prompts per rollout; over all ranks.
        max_prompt_tokens: longer prompts are cut on the left (BOS stays).
        max_completion_tokens: longer completions are cut on the right, and then do not end.
        max_tokens: prompt and completion together, in tokens; the completion is cut. Null: no such limit.
        max_rows: read only the first rows of the training source. Null: all.
        max_eval_rows: the same for validation, test and predict sources of their own.
        on_bad_row: "skip" drops bad rows with a count per reason, "stop" ends the run at the first.
        keep_duplicates: use rows that repeat an earlier one.
        seed: of the order. Null: the run's seed.
        shuffle: draw a new order for each epoch.
        drop_last: leave out a short last batch.
        length_aware: make batches of similar lengths. Micro-batches inside a batch are always made so.
        num_workers: processes that collate batches; 0 collates in the training process.
        cache_dir: where tokenised rows are kept. Null: nowhere.
        tokenizer: None takes the module's.
        train_on: "last" trains on the last assistant turn, "all" on every one (supervised rows).
        mix: shares of several sources, languages or domains in every batch, by a data column.
    """

    purpose: ClassVar[Purpose]
    required_columns: tuple[str, ...] = ()
    """Data columns that a row cannot be used without."""

    def __init__(
        self,
        path: str = WORLD,
        *,
        split: str = "train",
        config: str | None = None,
        val_path: str | None = None,
        val_split: str | None = None,
        val_fraction: float = 0.05,
        test_path: str | None = None,
        test_split: str | None = None,
        predict_path: str | None = None,
        predict_split: str | None = None,
        columns: dict[str, str] | None = None,
        template: Template = "auto",
        template_kwargs: dict[str, Any] | None = None,
        system: str | None = None,
        allow_special: bool = False,
        batch_size: int = 8,
        max_prompt_tokens: int | None = 1024,
        max_completion_tokens: int | None = 1024,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        max_eval_rows: int | None = None,
        on_bad_row: OnBadRow = "skip",
        keep_duplicates: bool = False,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        length_aware: bool = False,
        num_workers: int = 0,
        cache_dir: str | None = ".cache/data",
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_on: TrainOn = "last",
        mix: MixConfig | None = None,
    ) -> None:
        super().__init__()
        self._check(batch_size, max_rows, max_eval_rows, val_fraction, num_workers, train_on)
        self._begin(mix, length_aware)
        self.path, self.batch_size, self.num_workers, self._tokenizer = path, batch_size, num_workers, tokenizer
        self.seed, self.shuffle, self.drop_last, self.length_aware = seed, shuffle, drop_last, length_aware
        texts: dict[str, Any] = {"columns": columns or {}, "system": system, "template": template, "train_on": train_on}
        texts |= {"template_kwargs": template_kwargs or {}, "allow_special": allow_special}
        limits: dict[str, Any] = {"max_prompt_tokens": max_prompt_tokens, "max_tokens": max_tokens}
        limits |= {"max_completion_tokens": max_completion_tokens}
        rows: dict[str, Any] = {"keep_duplicates": keep_duplicates, "on_bad_row": on_bad_row}
        self._splits = Splits(
            train=Place(path=path, split=split),
            given={
                "val": (val_path, val_split),
                "test": (test_path, test_split),
                "predict": (predict_path, predict_split),
            },
            config=config,
            val_fraction=val_fraction,
            max_rows=max_rows,
            max_eval_rows=max_eval_rows,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            recipe=Recipe(purpose=self.purpose, required=self.required_columns, **texts, **limits, **rows),
        )

    def _check(
        self,
        batch_size: int,
        max_rows: int | None,
        max_eval_rows: int | None,
        val_fraction: float,
        num_workers: int,
        train_on: TrainOn,
    ) -> None:
        """Raise UserError for settings that are none."""
        if not 0.0 <= val_fraction < 1.0:
            raise UserError(f"val_fraction must be at least 0 and below 1, got {val_fraction}")
        for name, value in (("batch_size", batch_size), ("max_rows", max_rows), ("max_eval_rows", max_eval_rows)):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if num_workers < 0:
            raise UserError(f"num_workers must not be negative, got {num_workers}")
        if train_on == "all" and self.purpose in ("preference", "unpaired"):
            raise UserError("train_on 'all' is for supervised rows; what is judged is the last assistant turn")

    def _begin(self, mix: MixConfig | None, length_aware: bool) -> None:
        """The mix, and what may move. Raises UserError for a mix that batches of similar lengths would undo."""
        self.mix = None if mix is None else as_config(MixConfig, mix)
        if self.mix is not None:
            self.required_columns = (*self.required_columns, self.mix.column)
            if length_aware:
                raise UserError("length_aware: true would undo the mix; leave one of them out")
        self.schedulables = Schedulables()
        self.schedulables.register(Schedulable(FRACTION, 1.0))
        self._register_mix({} if self.mix is None else self.mix.ratio)
        self._planned = False
        self._draws: Draws | None = None
        self._shown: set[str] = set()

    def _register_mix(self, ratio: Mapping[str, float]) -> None:
        for name, share in ratio.items():
            self.schedulables.register(Schedulable(MIX + name, share))

    # ------------------------------------------------------------------ what there is

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The given tokenizer, else that of the module being trained."""
        if self._tokenizer is not None:
            return self._tokenizer
        if self.trainer is None:
            raise UserError(f"{type(self).__name__} needs a tokenizer: pass one, or run it in a Trainer with a module")
        return cast(PreTrainedTokenizerBase, self.trainer.lightning_module.tokenizer)

    @property
    def report(self) -> RowReport:
        """What became of the rows of the training source (of the only source when nothing is trained)."""
        reports = self.reports
        if not reports:
            raise UserError("there is no report before setup()")
        return reports.get("train", next(iter(reports.values())))

    @property
    def reports(self) -> dict[str, RowReport]:
        """One report per source read so far, by the split it is the source of."""
        return {split: prepared.report for split, prepared in self._splits.prepared.items()}

    def groups(self, split: Split) -> GroupStore:
        """The groups of a split, in the order of the rows; empty where nothing is held out."""
        return self._splits.groups(split, self.tokenizer)

    @property
    def fingerprint(self) -> str | None:
        """sha256 over everything that made the training rows (source, tokenizer, settings that shape them); None before
        they are read."""
        base = self._splits.fingerprint
        if base is None or self.mix is None:
            return base
        return hashlib.sha256(json.dumps([base, asdict(self.mix)]).encode()).hexdigest()

    def dataset_inputs(self) -> list[DatasetInfo]:
        """The splits loaded so far, for the tracker."""
        return [
            DatasetInfo(name=source.name, path=source.path, split=split, rows=len(store), digest=source.digest)
            for split, source, store in self._splits.loaded()
        ]

    # ------------------------------------------------------------------ Lightning

    def prepare_data(self) -> None:
        """Tokenise into the cache, on one process per machine."""
        if self._splits.cache_dir is not None and self.trainer is not None and self.trainer.state.fn is not None:
            for split in _STAGES[self.trainer.state.fn.value]:
                self.groups(split)

    def setup(self, stage: str) -> None:
        """Load the splits of a stage and show what became of their rows."""
        for split in _STAGES[stage]:
            self.groups(split)
        reports = self.reports
        if distributed.process() == 0:
            console = Console()
            for name in reports:
                if name not in self._shown:
                    console.print(reports[name].table())
        self._shown |= reports.keys()

    def train_dataloader(self) -> StatefulLoader:
        return self._loader("train", shuffle=self.shuffle)

    def val_dataloader(self) -> StatefulLoader | list[StatefulLoader]:
        # An empty list is how Lightning is told that there is no validation, which only `fit` can do without.
        needed = self.trainer is not None and self.trainer.state.fn == "validate"
        return self._loader("val") if needed or len(self.groups("val")) else []

    def test_dataloader(self) -> StatefulLoader:
        return self._loader("test")

    def predict_dataloader(self) -> StatefulLoader:
        return self._loader("predict")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"fingerprint": self.fingerprint}
        if self._planned:
            state |= {"moving": self.schedulables.state_dict(), "draws": self.draws.state_dict()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._planned and "draws" in state_dict:
            self.schedulables.load_state_dict(state_dict["moving"])
            self.draws.load_state_dict(state_dict["draws"])
        if self.fingerprint is not None and state_dict["fingerprint"] != self.fingerprint:
            rank_zero_warn(
                "The data differ from those the checkpoint was trained on: rows, tokenizer or limits changed."
            )

    def batch_order(
        self, split: Split, store: GroupStore, *, seed: int, shuffle: bool, rank: int, world_size: int
    ) -> BatchOrder:
        """The order of a split's batches for one rank; subclasses may have another for training."""
        train = split == "train"
        sampler = SampleOrder(len(store), seed=seed, shuffle=shuffle)
        share: dict[str, Any] = {"batch_size": self.batch_size, "rank": rank, "world_size": world_size}
        if train and self._planned:
            self.draws.shuffle = shuffle
            return PlannedOrder(sampler, self.draws, **share)
        if train and self.mix is not None:
            grades, ratio = Grades(self.mix.labels(store)), list(self.mix.ratio.values())
            return DifficultyStratifiedBatchSampler(
                sampler, grades, ratio=ratio, exhausted=self.mix.exhausted, drop_last=self.drop_last, **share
            )
        return BatchOrder(
            sampler,
            **share,
            drop_last=self.drop_last and train,
            lengths=store.tokens() if self.length_aware and train else None,
        )

    # ------------------------------------------------------------------ what a callback steers

    def plan(self) -> None:
        """Let the mix and the rows in use move during training, by `schedulables` and `draws`. Call it in a callback's
        `setup`. Raises UserError for settings under which they cannot."""
        if self.num_workers:
            raise UserError("a mix or a curriculum that moves needs batches made one by one: set num_workers to 0")
        if self.length_aware:
            raise UserError("length_aware: true would undo a mix or a curriculum that moves; leave one of them out")
        if self.mix is not None and self.mix.exhausted == "stop":
            raise UserError("exhausted: stop needs a mix that stays; with one that moves use reshuffle")
        self._planned = True

    @property
    def draws(self) -> Draws:
        """Which training rows come next, where that moves."""
        if self._draws is None:
            labels, names = self._strata()
            self._draws = Draws(labels, names, self.schedulables, seed=self.order_seed, shuffle=self.shuffle)
        return self._draws

    def freeze(self, confidence: np.ndarray) -> None:
        """See `datamodules.planned.Draws`."""
        self.draws.freeze(confidence)

    def _strata(self) -> tuple[np.ndarray, list[str]]:
        """([n] what each training row belongs to, the names of that)."""
        store = self.groups("train")
        if self.mix is None:
            return np.zeros(len(store), dtype=np.int64), []
        return self.mix.labels(store), list(self.mix.ratio)

    @property
    def order_seed(self) -> int:
        """The seed of the order: the data's own, else the run's."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed

    def _seat(self) -> tuple[int, int, bool]:
        """(this rank, how many there are, whether batches go to a GPU)."""
        if self.trainer is None:
            return 0, 1, False
        share = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return share["rank"], share["num_replicas"], self.trainer.strategy.root_device.type == "cuda"

    def _loader(self, split: Split, shuffle: bool = False) -> StatefulLoader:
        store = self.groups(split)
        rank, ranks, pin = self._seat()
        # It asks for the same batches in every epoch.
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        if not len(store):
            raise UserError(f"'{self.path}' gives no rows for {split}; set val_fraction, or {split}_path")
        if split == "train" and self.drop_last and len(store) < self.batch_size:
            raise UserError(
                f"{len(store)} training rows make no batch of {self.batch_size}, and drop_last leaves out a short one"
            )
        if split == "train" and min(len(store), self.batch_size) < ranks:
            raise UserError(
                f"{ranks} ranks cannot share {len(store)} training rows in batches of {self.batch_size}: batch_size "
                "counts over all ranks, and each needs a row"
            )
        order = self.batch_order(
            split, store, seed=self.order_seed, shuffle=shuffle and not overfit, rank=rank, world_size=ranks
        )
        return StatefulLoader(store, order, num_workers=self.num_workers, pin_memory=pin)
