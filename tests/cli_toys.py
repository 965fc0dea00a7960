"""A module and a datamodule small enough for tests of the command line and the tracker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader


@dataclass(kw_only=True)
class StepConfig:
    """How the toy steps.

    Args:
        lr: Learning rate.
        kind: Direction.
    """

    lr: float = 0.1
    kind: Literal["down", "up"] = "down"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One data set, as a datamodule describes it to the tracker."""

    name: str
    path: str
    split: str
    rows: int
    digest: str


class ToyModule(L.LightningModule):
    """One weight that moves by lr * beta a step."""

    def __init__(
        self, beta: float = 0.1, step: StepConfig | None = None, note: str = "", optim: StepConfig = StepConfig()  # noqa: B008
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if beta < 0:
            raise ValueError(f"beta is {beta}; it must not be negative")
        self.beta = beta
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.beta * self.weight * batch.mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.beta * self.weight, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ToyData(L.LightningDataModule):
    """Batches of ones. `path` is required, as in a real datamodule."""

    def __init__(self, path: str, rows: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.path, self.rows = path, rows

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(self.rows, 1), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(2, 1), batch_size=2)  # type: ignore[arg-type]

    def dataset_inputs(self) -> list[Rows]:
        return [Rows(name="ones", path=self.path, split="train", rows=self.rows, digest="0123456789abcdef" * 4)]
