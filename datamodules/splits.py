"""Which rows are for training and which are held out: by prompt, by content, never both.

A held-out split is chosen by a hash of the prompt, so all rows of one prompt stand on one side, whatever the order of
the rows and whatever the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from alignment import world
from alignment.errors import UserError
from datamodules.formats import Purpose
from datamodules.prepare import Prepared, Recipe, prepare
from datamodules.reading import WORLD, Source, open_source
from datamodules.rows import Tally
from datamodules.store import GroupStore

Split = Literal["train", "val", "test", "predict"]
_WORLD_ROWS: Mapping[Purpose, world.Kind] = {
    "supervised": "sft",
    "preference": "preference",
    "unpaired": "preference",
    "prompts": "prompts",
}
_FALLBACK: Mapping[Split, Split] = {"val": "train", "test": "val", "predict": "test"}
HELD_OUT: tuple[Split, ...] = ("val", "test")
LEAKED = "prompt is among the held-out rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where rows come from: a path or hub id, and the split in it."""

    path: str
    split: str


class Splits:
    """The splits of a run, each read when it is first asked for.

    Args:
        train: the training source.
        given: (path, split) of the sources of other splits; (None, None) where there is none.
        config: configuration of a hub dataset.
        val_fraction: share of the prompts held out where validation has no source of its own.
        max_rows, max_eval_rows: how many rows to read of the training source, of the others.
        cache_dir: where tokenised rows are kept.
        recipe: what becomes of a row.
    """

    def __init__(
        self,
        *,
        train: Place,
        given: Mapping[Split, tuple[str | None, str | None]],
        config: str | None,
        val_fraction: float,
        max_rows: int | None,
        max_eval_rows: int | None,
        cache_dir: Path | None,
        recipe: Recipe,
    ) -> None:
        self._places: dict[Split, Place] = {"train": train}
        # Only sources that somebody named can leak: the built-in world has no prompt in two splits.
        self._guarded: list[Split] = [split for split in HELD_OUT if any(given[split])]
        for split, (path, name) in given.items():
            if path or name:
                self._places[split] = Place(path=path or train.path, split=name or train.split)
            elif train.path == WORLD and split != "predict":
                self._places[split] = Place(path=WORLD, split=split)
        self._config, self.val_fraction, self.max_eval_rows = config, val_fraction, max_eval_rows
        self._recipes = {split: replace(recipe, max_rows=max_eval_rows) for split in self._places}
        self._recipes["train"] = replace(recipe, max_rows=max_rows)
        self.cache_dir = cache_dir
        self.prepared: dict[Split, Prepared] = {}
        self._stores: dict[Split, GroupStore] = {}
        self._leaks: dict[Split, np.ndarray] = {}

    def groups(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> GroupStore:
        """The groups of a split, in the order of the rows; empty where nothing is held out."""
        if split not in self._stores:
            home = self._home(split)
            store = self._prepare(home, tokenizer).store
            if home == "train":
                store = self._part(store, split, tokenizer)
            elif split == "val" and "test" in self._guarded:
                store = store.select(np.flatnonzero(~self._leaked(store, "val", ["test"], tokenizer)))
            self._stores[split] = store
            used_for = self.prepared[home].report.used_for
            used_for[split] = len(store)
        return self._stores[split]

    @property
    def recipe(self) -> Recipe:
        """What becomes of a training row."""
        return self._recipes["train"]

    def apart(self, split: Split) -> bool:
        """Whether the rows of a split are of another source than the training rows."""
        return self._home(split) != "train"

    def beside_training(self) -> list[Split]:
        """The splits whose rows are in the source of the training rows, under a name of their own."""
        path = self._places["train"].path
        return [split for split, place in self._places.items() if split != "train" and place.path == path]

    def held_out_keys(self, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Digests of the prompts of sources given for validation and test."""
        return {int(key) for split in self._guarded for key in self._prepare(split, tokenizer).store.prompt_keys}

    def loaded(self) -> Iterator[tuple[Split, Source, GroupStore]]:
        """The splits read so far with their sources."""
        for split, store in self._stores.items():
            yield split, self.prepared[self._home(split)].source, store

    @property
    def fingerprint(self) -> str | None:
        """sha256 over what made the training rows; None before they are read (test and predict need not read them)."""
        if "train" not in self.prepared:
            return None
        held_out = {split: self.prepared[split].key for split in self._guarded if split in self.prepared}
        made_by = [self.prepared["train"].key, self.val_fraction, held_out]
        return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------ parts

    def _home(self, split: Split) -> Split:
        """The split whose source holds the rows of `split`: itself, else the one it falls back to."""
        return split if split in self._places else self._home(_FALLBACK[split])

    def _prepare(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Prepared:
        if split not in self.prepared:
            place, recipe = self._places[split], self._recipes[split]
            source = open_source(
                place.path,
                split=place.split,
                config=self._config,
                kind=_WORLD_ROWS[recipe.purpose],
                size=recipe.max_rows,
            )
            self.prepared[split] = prepare(source, recipe, tokenizer, self.cache_dir)
        return self.prepared[split]

    def _part(self, store: GroupStore, split: Split, tokenizer: PreTrainedTokenizerBase) -> GroupStore:
        """The training source's share of `split`."""
        held_out = np.zeros(len(store), dtype=np.bool_)
        if "val" not in self._places:
            held_out = _lowest(store.prompt_keys, self.val_fraction)
        leaked = self._leaked(store, "train", self._guarded, tokenizer)
        return store.select(np.flatnonzero((~held_out if split == "train" else held_out) & ~leaked))

    def _leaked(
        self, store: GroupStore, home: Split, others: Sequence[Split], tokenizer: PreTrainedTokenizerBase
    ) -> np.ndarray:
        """[P] bool: groups of the source `home` whose prompt is in another source, noted in its report."""
        if home in self._leaks:
            return self._leaks[home]
        leaked = np.zeros(len(store), dtype=np.bool_)
        for other in others:
            leaked |= np.isin(store.prompt_keys, self._prepare(other, tokenizer).store.prompt_keys)
        if leaked.any():
            report = self.prepared[home].report
            report.used -= int(leaked.sum())
            report.dropped[LEAKED] = Tally(count=int(leaked.sum()))
        self._leaks[home] = leaked
        return leaked


def _lowest(keys: np.ndarray, fraction: float) -> np.ndarray:
    """[P] bool: the rows of the prompts with the lowest keys, `fraction` of all prompts but at least one and never
    all of them. Keys are digests, so the lowest are a fair sample."""
    prompts = np.unique(keys)
    if fraction > 0 and len(prompts) == 1:
        raise UserError("all rows have one prompt, so none can be held out; set val_fraction: 0, or give val_path")
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1) if fraction > 0 else 0
    return np.isin(keys, prompts[:count])
