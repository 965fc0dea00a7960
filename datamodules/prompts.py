"""PromptData: prompts to sample completions for, mixed by difficulty."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.chat import TemplateRefused
from alignment.errors import UserError
from alignment.prompting import DIFFICULTY
from alignment.randomness import generator
from alignment.settings import as_config
from datamodules.base import GroupData
from datamodules.difficulty import Labeller, StrataConfig
from datamodules.grading import Grades
from datamodules.loader import BatchOrder
from datamodules.prepare import read_row
from datamodules.reading import WORLD, json_line
from datamodules.rows import RowError
from datamodules.splits import Split
from datamodules.store import GroupStore
from datamodules.strata import CurriculumOrder, DifficultyStratifiedBatchSampler


class LabelledStore(GroupStore):
    """Groups whose column "difficulty" is the name of their stratum.

    Args:
        store: the groups. labels: [P] stratum of each, read anew at each access: they may change.
        names: of the strata.
    """

    def __init__(self, store: GroupStore, labels: np.ndarray, names: list[str]) -> None:
        super().__init__(store._arrays, store._columns, store._order)
        self.labels, self.names = labels, names

    @overload
    def __getitem__(self, i: int) -> Group: ...
    @overload
    def __getitem__(self, i: slice) -> LabelledStore: ...
    def __getitem__(self, i: int | slice) -> Group | GroupStore:
        if isinstance(i, slice):
            return LabelledStore(super().__getitem__(i), self.labels[i], self.names)
        group = super().__getitem__(i)
        return replace(group, columns={**group.columns, DIFFICULTY: self.names[self.labels[i]]})


class PromptData(GroupData):
    """Prompts without completions; what else a row holds goes to the rewards. See GroupData for the other settings.

    Accepts prompts as texts or messages, conversations (without their last answer), instructions, questions, and plain
    texts to be continued; every other column is kept, whatever JSON can hold. `path` may also be
    "reasoning-gym:TASK@LEVEL,TASK@FIRST-LAST,...": instances of procedural tasks, `max_rows` of them. Equal prompts are
    one prompt, and no prompt is in two splits.

    Args:
        path: where the prompts are.
        strata: how they are sorted by difficulty and mixed. Null: shuffled, without labels. With it every prompt has a
            column "difficulty" that names its stratum.
    """

    purpose = "prompts"

    def __init__(self, path: str = WORLD, *, strata: StrataConfig | None = None, **settings: Any) -> None:
        self.strata = None if strata is None else as_config(StrataConfig, strata)
        if self.strata is not None and self.strata.source is not None:
            self.required_columns = (self.strata.source,)
        super().__init__(path, max_completion_tokens=None, max_tokens=None, train_on="last", **settings)
        if self.strata is not None and self.mix is not None:
            raise UserError("strata and mix would both decide the mix of a batch; leave one of them out")
        if self.strata is not None and self.strata.order == "mix":
            self._register_mix(self.strata.ratio)
        if self.strata is not None and self.strata.order == "mix" and self.length_aware:
            raise UserError("length_aware: true would undo strata.order: mix; leave one of them out")
        if self.strata is not None and self.strata.regrade_every is not None and self.num_workers:
            raise UserError("with strata.regrade_every batches are made one by one: set num_workers to 0")
        self._labelled: dict[Split, LabelledStore] = {}
        self._labeller: Labeller | None = None
        self._grades: Grades | None = None

    # ------------------------------------------------------------------ what there is

    def groups(self, split: Split) -> GroupStore:
        store = super().groups(split)
        if self.strata is None:
            return store
        if split not in self._labelled:
            labeller = self._labeller or Labeller(self.strata, super().groups("train"))
            self._labeller = labeller
            labels = labeller.labels(store)
            if split == "train":
                self._grades = Grades(labels, self.strata.regrading)
                labels = self._grades.labels
                self._check_filled(labels)
            self._labelled[split] = LabelledStore(store, labels, self.strata.names)
        return self._labelled[split]

    @property
    def grades(self) -> Grades:
        """The strata of the training prompts."""
        self.groups("train")
        if self._grades is None:
            raise UserError("prompts have no difficulty without data.strata")
        return self._grades

    @property
    def fingerprint(self) -> str | None:
        """Also of the strata: another ratio is another order."""
        base = super().fingerprint
        if base is None or self.strata is None:
            return base
        return hashlib.sha256(json.dumps([base, asdict(self.strata)]).encode()).hexdigest()

    def _check_filled(self, labels: np.ndarray) -> None:
        assert self.strata is not None
        counts = {name: int((labels == k).sum()) for k, name in enumerate(self.strata.names)}
        self._splits.prepared["train"].report.strata = counts
        empty = [name for name, share in self.strata.ratio.items() if share and not counts[name]]
        if empty and self.strata.regrade_every is None and self.strata.order == "mix" and len(labels):
            have = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise UserError(
                f"no training prompt is {empty[0]} ({have}); set strata.bounds, or give {empty[0]} a ratio of 0"
            )

    # ------------------------------------------------------------------ order

    def plan(self) -> None:
        strata = self.strata
        if strata is not None and (strata.order == "curriculum" or strata.exhausted == "stop"):
            raise UserError(
                f"strata.order is {strata.order} and strata.exhausted {strata.exhausted}; a mix or a curriculum that "
                "moves needs order mix or shuffle, and reshuffle"
            )
        super().plan()

    def _strata(self) -> tuple[np.ndarray, list[str]]:
        if self.strata is None or self.strata.order != "mix":
            return super()._strata()
        return self.grades.labels, self.strata.names

    def batch_order(
        self, split: Split, store: GroupStore, *, seed: int, shuffle: bool, rank: int, world_size: int
    ) -> BatchOrder:
        order = super().batch_order(split, store, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size)
        if split != "train" or self.strata is None or self.strata.order == "shuffle" or self._planned:
            return order
        if self.strata.order == "curriculum":
            order.sampler = CurriculumOrder(self.grades.labels, seed=seed, shuffle=shuffle)
            return order
        return DifficultyStratifiedBatchSampler(
            order.sampler,
            self.grades,
            ratio=list(self.strata.ratio.values()),
            batch_size=self.batch_size,
            exhausted=self.strata.exhausted,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
        )

    # ------------------------------------------------------------------ what modules tell and ask (alignment.prompting)

    def observe(self, batch: GroupBatch, success: Tensor) -> None:
        """How well the model did on a training batch: success [N] in [0, 1], NaN where unknown. A collective: every
        rank calls it once per batch, also with an empty one."""
        if self._grades is None or self._grades.regrading is None:
            return
        known = ~success.isnan() & (batch.group_index >= 0)[batch.group_of]  # others are none of these rows
        group, value = batch.group_of[known].cpu(), success[known].double().cpu()
        trials = torch.bincount(group, minlength=batch.num_prompts)
        total = torch.bincount(group, weights=value, minlength=batch.num_prompts)
        parts: Any = distributed.all_gather_objects((batch.group_index.tolist(), total.tolist(), trials.tolist()))
        index, successes, counts = (np.array([v for part in parts for v in part[i]]) for i in range(3))
        place = {int(row): position for position, row in enumerate(self.groups("train").row_index)}
        own = index >= 0
        positions = np.array([place[int(row)] for row in index[own]], dtype=np.int64)
        self._grades.observe(positions, successes[own].astype(np.float64), counts[own].astype(np.int64))

    def read_prompts(
        self, lines: Sequence[tuple[str, str]], name: str, required: Collection[str]
    ) -> tuple[list[Group], list[str]]:
        """Rows from elsewhere, read as those of the training source are; see `alignment.prompting.ReadsPrompts`."""
        recipe = replace(self._splits.recipe, keep_duplicates=True, required=(*sorted(required),))
        groups, faults = [], []
        for place, line in lines:
            try:
                group, _ = read_row(json_line(place, line), recipe, self.tokenizer, name)
            except (RowError, TemplateRefused, UserError) as error:
                faults.append(f"{place} {error}")
            else:
                groups.append(replace(group, index=-1))
        return groups, faults

    def refill(self, *, step: int, attempt: int, lacking: Mapping[str, int], exclude: Collection[int]) -> list[Group]:
        """Other training prompts in place of those that gave no signal, of the same strata.

        Args:
            step, attempt: key the draw, so that it is the same on every rank and after a resume.
            lacking: how many prompts per stratum ("" without strata).
            exclude: dataset positions of prompts this batch has tried.

        Returns fewer where a stratum has no more.
        """
        store, banned = self.groups("train"), set(exclude)
        out: list[Group] = []
        for name in sorted(lacking):
            members = self._members(name, store)
            draw = generator(self.order_seed, "refill", step, attempt, name)
            order = members[torch.randperm(len(members), generator=draw).numpy()]
            fresh = [p for p in order.tolist() if int(store.row_index[p]) not in banned][: lacking[name]]
            out += [store[p] for p in fresh]
        return out

    def _members(self, name: str, store: GroupStore) -> np.ndarray:
        if self._planned and (self.strata is None or self.strata.order == "mix"):
            return self.draws.in_use(0 if self.strata is None else self.strata.names.index(name))
        if self.strata is None:
            return np.arange(len(store))
        return np.flatnonzero(self.grades.labels == self.strata.names.index(name))

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        grades = {} if self._grades is None else self._grades.state_dict()
        return {**super().state_dict(), "grades": grades}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.strata is not None and state_dict["grades"]:
            self.grades.load_state_dict(state_dict["grades"])
