"""What `test_online.py` runs under one and under two processes: pure functions that look at the batch of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alignment.advantages import ADVANTAGES, RewardTable, estimate
from alignment.batches import Group, GroupBatch
from alignment.gae import whiten
from alignment.policy_losses import entropy_threshold, explained_variance
from alignment.prompting import fill, prompts_of
from alignment.reward_metrics import reward_metrics
from alignment.tiny import tiny_tokenizer
from datamodules import PromptData

NAN = float("nan")
REWARDS = [[1.0, 0.5], [0.0, NAN], [2.0, 0.5], [NAN, NAN], [1.0, 1.0], [1.0, 0.0], [0.3, 0.3], [0.3, 0.3], [5.0, 1.0]]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 3]
LABELS = ["easy", "hard", "easy", "hard"]


def share(rank: int, world: int) -> tuple[RewardTable, list[str]]:
    """Rank 0 of two holds the first two groups, rank 1 the others."""
    groups = [0, 1, 2, 3] if world == 1 else [[0, 1], [2, 3]][rank]
    rows = [i for i, g in enumerate(GROUPS) if g in groups]
    index = torch.tensor([groups.index(GROUPS[i]) for i in rows])
    rewards = torch.tensor([REWARDS[i] for i in rows])
    table = RewardTable(
        rewards=rewards,
        weights=torch.tensor([1.0, 2.0]),
        group_of=index,
        groups=len(groups),
        penalty=torch.tensor(rows) ** 2 / 10,
        lengths=1 + torch.tensor(rows) % 4,
    )
    return table, [LABELS[g] for g in groups]


ESTIMATORS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ADVANTAGES),
    ("gdpo", {"whiten": "token"}),
    ("gdpo", {"whiten": "none"}),
]


def check_advantages(rank: int, world: int) -> dict[str, Any]:
    table, labels = share(rank, world)
    out: dict[str, Any] = {}
    for name, options in ESTIMATORS:
        found = estimate(ADVANTAGES.get(name, options), table)
        parts = (found.values, found.valid, found.active, found.informative.flatten())
        key = " ".join([name, *options.values()])
        out[key] = torch.cat([part.double() for part in parts])
        out[f"{key} values"] = found.values
        before = None if found.parts is None else found.parts.summed
        metrics = reward_metrics(table, found.values, ["a", "b"], labels, before)
        out[f"{key} metrics"] = {name: float(total / count) for name, (total, count) in metrics.items()}
    return out


def check_tokens(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 of two holds 5 of the 20 tokens."""
    draw = torch.Generator().manual_seed(0)
    values, returns, entropy = torch.randn(3, 20, generator=draw)
    scored = torch.rand(20, generator=draw) < 0.8
    part = slice(None) if world == 1 else [slice(0, 15), slice(15, 20)][rank]
    return {
        "whitened": whiten(values[part], scored[part]),
        "explained": explained_variance(values[part], returns[part], scored[part]),
        "threshold": entropy_threshold(entropy[part], scored[part]),
    }


def check_prompts(rank: int, world: int, path: Path) -> dict[str, Any]:
    """Two batches with refills and a grading after each; a prompt gives a signal where its number is at least 20."""
    strata = {"by": "column", "regrade_every": 1, "rollouts": 2}
    data = PromptData(str(path), tokenizer=tiny_tokenizer(), cache_dir=None, val_fraction=0.0, strata=strata, seed=1)
    sampled: list[list[int]] = []

    def roll(prompts: Sequence[Group], attempt: int) -> tuple[GroupBatch, Tensor]:
        sampled.append([g.index for g in prompts])
        groups = [Group(prompt=g.prompt, completions=[[5], [6]], columns=g.columns, index=g.index) for g in prompts]
        keep = torch.tensor([g.index >= 20 for g in prompts], dtype=torch.bool)
        return GroupBatch.from_groups(groups), keep

    out: dict[str, Any] = {"batches": [], "filled": []}
    store = data.groups("train")
    order = data.batch_order("train", store, seed=1, shuffle=True, rank=rank, world_size=world)
    for step, index in enumerate(order.batches_from(0)):
        batch = GroupBatch.from_groups([store[i] for i in index])
        filled = fill(prompts_of(batch), roll, data, step=step, attempts=3)
        out["batches"].append(index)
        out["filled"].append(filled.batch.group_index.tolist())
        out[f"counts {step}"] = [filled.sampled, filled.dropped, filled.lacking]
        data.observe(filled.batch, (filled.batch.group_index[filled.batch.group_of] % 2).float())
        if step == 1:
            break
    out["sampled"] = sampled
    out["labels"] = data.grades.labels.tolist()
    return out


def run(rank: int, world: int, folder: Path) -> None:
    """One rank; writes results.RANK of WORLD."""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results = {
        "advantages": check_advantages(rank, world),
        "tokens": check_tokens(rank, world),
        "prompts": check_prompts(rank, world, folder / "prompts.jsonl"),
    }
    torch.save(results, folder / f"results.{rank}of{world}")
    if world > 1:
        dist.destroy_process_group()
