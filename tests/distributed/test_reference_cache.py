"""Two processes share the computation of cached reference log-probs and end with one table, equal to one process's."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from alignment.batches import Group, GroupBatch
from alignment.logprobs import LogProbEngine, TokenStats
from alignment.policy import PolicyConfig, load_policy
from alignment.reference import Reference


def groups() -> list[Group]:
    """Five groups of two completions: an odd number for two ranks."""
    return [Group(prompt=[1, 60 + i], completions=[[30 + i, 3], [40 + i] * (2 + i)], index=i) for i in range(5)]


def table(folder: Path) -> tuple[torch.Tensor, int]:
    """Log-probs of all rows, and how often this process ran the model."""
    calls = 0

    class Counting(LogProbEngine):
        def __call__(self, batch: GroupBatch, **options: Any) -> TokenStats:
            nonlocal calls
            calls += batch.num_prompts
            return super().__call__(batch, **options)

    reference = Reference.build("cached", load_policy(PolicyConfig()), PolicyConfig(), Counting)
    reference.precompute([GroupBatch.from_groups([g]) for g in groups()], folder, {})
    return reference.token_logps(GroupBatch.from_groups(groups())), calls


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    first, calls = table(folder / "cache")
    # A rank that does not see the file (the cache of another node) makes both compute, and nobody waits for ever.
    second, recomputed = table(folder / ("cache" if rank == 0 else "elsewhere"))
    third, read = table(folder / "cache")
    torch.save({"first": first, "second": second, "third": third}, folder / f"rank{rank}.pt")
    counts = (calls, recomputed, read)
    expected = (3, 3, 0) if rank == 0 else (2, 2, 0)
    dist.destroy_process_group()
    assert counts == expected, f"rank {rank} computed {counts} groups, expected {expected}"


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    alone, calls = table(tmp_path / "alone")
    assert calls == 5
    mp.spawn(worker, args=(tmp_path,), nprocs=2)
    for rank in range(2):
        values = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert all(torch.equal(v, alone) for v in values.values())
    assert len(os.listdir(tmp_path / "cache")) == 1
