"""Small data for the tests of modules: groups with given lengths, and a data module that yields them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from alignment.batches import Group, GroupBatch
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.randomness import generator

TINY = PolicyConfig(name="tiny")
OPTIM = OptimConfig(lr=1e-3, schedule="constant")


def groups(count: int, completions: int, seed: int = 0, **rows: float) -> list[Group]:
    """Prompts of 1 to 8 tokens with completions of 1 to 9 random tokens, the first one's last token unscored."""
    draw = generator(seed, "toy groups")

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (1,), generator=draw))
        return torch.randint(4, 260, (length,), generator=draw).tolist()

    out = []
    for index in range(count):
        texts = [[*ids(1, 8), 3] for _ in range(completions)]
        scored = [[True] * len(t) for t in texts]
        scored[0][-1] = False
        extra = {name: [value * (index + 1)] * completions for name, value in rows.items()}
        out.append(Group(prompt=[1, *ids(1, 7)], completions=texts, scored=scored, rows=extra, index=index))
    return out


class FixedData(L.LightningDataModule):
    """Fixed order; the batch of each rank is every world-th group. A finite source of groups."""

    def __init__(self, train: Sequence[Group], val: Sequence[Group] | None = None, batch_size: int = 8) -> None:
        super().__init__()
        self.train, self.val = list(train), list(val if val is not None else train)
        self.batch_size = batch_size

    def groups(self, split: str) -> Sequence[Group]:
        return self.train if split == "train" else self.val

    def _loader(self, split: str) -> DataLoader[Any]:
        rows = self.groups(split)
        share = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"rank": 0, "num_replicas": 1}
        rank, world = share["rank"], share["num_replicas"]
        starts = range(0, len(rows), self.batch_size)
        parts = [GroupBatch.from_groups(rows[s : s + self.batch_size][rank::world]) for s in starts]
        return DataLoader(parts, batch_size=None)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader("predict")


def trainer(folder: Any, **settings: Any) -> L.Trainer:
    """A quiet CPU trainer in `folder`."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
    }
    return L.Trainer(**(defaults | settings))
