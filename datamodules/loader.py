"""Batches in an order that is a pure function of (seed, epoch, position), on any number of ranks.

`batch_size` counts groups over all ranks. Batch b of an epoch holds the samples from position b * batch_size on; rank r
of w takes every w-th of them from the r-th. So 2 -> 1 -> 2 processes see the same batches, and where a run stands is
one number. The last batch may be short: then some ranks get fewer groups, or none.

Outside a Trainer, call `loader.batch_sampler.sampler.set_epoch(epoch)` before each epoch, as with torch's own
DistributedSampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.randomness import derive, generator, permutation

# Batches are made of similar lengths within stretches of this many batches, so that the order stays close to random.
_WINDOW = 32


class SampleOrder(Sampler[int]):
    """The samples of an epoch in their order. Lightning calls `set_epoch` before each epoch.

    Args:
        size: how many samples there are.
        seed: which permutations; not used without `shuffle`.
        shuffle: False keeps the order of the rows.
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> torch.Tensor:
        """[size] int64: the sample at each position of the current epoch."""
        return permutation(self.seed, self.epoch, self.size) if self.shuffle else torch.arange(self.size)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())


class BatchOrder:
    """The batches of an epoch for one rank, as lists of sample numbers.

    Args:
        sampler: the order of samples.
        batch_size: samples per batch over all ranks.
        rank, world_size: whose share to give.
        drop_last: leave out a short last batch.
        lengths: [size] tokens of each sample. Given, batches hold samples of similar length: within stretches of 32
            batches samples are sorted by length before they are cut, and the batches of a stretch are shuffled.
    """

    def __init__(
        self,
        sampler: SampleOrder,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        lengths: np.ndarray | None = None,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        self.sampler = sampler
        self.batch_size, self.drop_last = batch_size, drop_last
        self._rank, self._world_size = rank, world_size
        self._lengths = None if lengths is None else torch.as_tensor(lengths)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def global_batches(self) -> list[list[int]]:
        """The batches of the current epoch, all ranks together."""
        order = self.sampler.order()
        if self._lengths is None:
            batches = list(torch.split(order, self.batch_size))
        else:
            windows = torch.split(order, _WINDOW * self.batch_size)
            batches = [b for number, window in enumerate(windows) for b in self._by_length(number, window)]
        return [batch.tolist() for batch in batches[: len(self)]]

    def _by_length(self, number: int, window: torch.Tensor) -> list[torch.Tensor]:
        assert self._lengths is not None
        batches = list(torch.split(window[self._lengths[window].argsort(stable=True)], self.batch_size))
        # A short batch can only be the last of the epoch, so it stays where it is.
        whole = len(window) // self.batch_size
        shuffled = torch.randperm(whole, generator=generator(self.sampler.seed, "windows", self.sampler.epoch, number))
        return [batches[i] for i in shuffled.tolist()] + batches[whole:]

    def batches_from(self, start: int) -> Iterator[list[int]]:
        """This rank's batches of the current epoch, from the `start`-th on. Each is made when it is asked for."""
        for batch in self.global_batches()[start:]:
            yield self.share(batch)

    def put_back(self) -> None:
        """The batch given last was not used. Nothing to do where the position says it all."""

    def share(self, batch: list[int]) -> list[int]:
        """This rank's part of a batch."""
        return batch[self._rank :: self._world_size]

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches_from(0)


class StatefulLoader:
    """A loader of GroupBatches that can stop after any batch and go on from there.

    It holds a torch DataLoader and is not one: Lightning rebuilds DataLoaders with samplers of its own (under DDP, for
    `overfit_batches`, for `predict`), which would undo the order. Anything sized and iterable with `state_dict` and
    `load_state_dict` is a loader to Lightning; it finds `set_epoch` through `batch_sampler.sampler`.

    The inner DataLoader starts with the first batch asked for, not with `iter`: Lightning makes the iterator first and
    sets the epoch after, and workers would already have fetched another epoch.

    Args:
        data: the groups.
        batch_sampler: their order.
        num_workers: processes that collate batches; 0 collates in this one.
        pin_memory: put batches into page-locked memory, for a GPU.
    """

    def __init__(
        self, data: Sequence[Group], batch_sampler: BatchOrder, *, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        self.batch_sampler = batch_sampler
        self._data, self._num_workers, self._pin_memory = data, num_workers, pin_memory
        self._batches = 0  # yielded in `_epoch`
        self._epoch = 0
        self._resume = False  # the next iterator starts at `_batches`

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[GroupBatch]:
        # A generator: its body runs at the first `next`.
        sampler = self.batch_sampler.sampler
        if self._resume and self._batches >= len(self):
            # Stopped at the end of an epoch. A Trainer has set the next epoch by now, a plain loop has not.
            sampler.set_epoch(max(sampler.epoch, self._epoch + 1))
        start = self._batches if self._resume and sampler.epoch == self._epoch else 0
        self._resume = False
        self._epoch, self._batches = sampler.epoch, start
        inner: DataLoader[Any] = DataLoader(
            self._data,  # type: ignore[arg-type]  # a Sequence is all it needs
            batch_sampler=self.batch_sampler.batches_from(start),
            collate_fn=GroupBatch.from_groups,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # Without one of its own the DataLoader draws a number from the global generator at every start.
            generator=torch.Generator().manual_seed(derive(sampler.seed, "loader", self._epoch)),
        )
        for batch in inner:
            self._batches += 1
            yield batch

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, int]:
        """Where this loader stands: the same on every rank and for any number of ranks."""
        sampler = self.batch_sampler.sampler
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "batch_size": self.batch_sampler.batch_size,
            "size": len(sampler),
            "seed": sampler.seed,
        }

    def put_back(self) -> None:
        """The batch given last was not used: `state_dict` stands before it from now on. An iterator under way goes on
        all the same; this is for a run that saves its state and leaves."""
        assert self._batches > 0, "no batch has been given in this epoch"
        self._batches -= 1
        self.batch_sampler.put_back()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state`. Raises UserError in the middle of an epoch of other data, order or batch size, where no
        batch would be the next one."""
        mine = self.state_dict()
        middle = 0 < state["batches"] < -(-state["size"] // state["batch_size"])
        for name, word in (("batch_size", "batch_size"), ("size", "number of rows"), ("seed", "seed of the order")):
            if middle and state[name] != mine[name]:
                raise UserError(
                    f"the checkpoint stands in the middle of epoch {state['epoch']} with {word} {state[name]}, now it "
                    f"is {mine[name]}; keep it, or resume from a checkpoint at the end of an epoch"
                )
        self._epoch = state["epoch"]
        self._batches = state["batches"] if middle else len(self) * (state["batches"] > 0)
        self._resume = True
        self.batch_sampler.sampler.set_epoch(self._epoch)
