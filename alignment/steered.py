"""SteeredMixin: modules with heads that callbacks watch and steer (`alignment.watching.HasHeads`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.headed import HeadedMixin
from alignment.metrics import Metrics
from alignment.optim import rescale
from alignment.schedulable import LR, Schedulable
from alignment.update import optimizer_of


class SteeredMixin(HeadedMixin):
    """HeadedMixin with what `alignment.watching` says: `HasHeads`, `HasFeed`. Its arguments are those of HeadedMixin.

    The learning rate of each head, as a multiple of `optim.lr`, is `optim.lr/NAME` among the schedulables.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.alpha: dict[str, float] = {}
        self.flat: dict[str, float] = {}
        self.clipped: dict[str, float] = {}
        self.feed: Callable[[GroupBatch], GroupBatch] | None = None
        self.entropy_possible = self.fusion_config.pool == "log_linear"
        if not self.entropy_possible:
            self.entropy.strength.blocked = "fusion.pool=linear has no entropy bonus"
        if self.fusion_config.mode != "joint":
            self.schedulables["fusion.entropy"].blocked = "the fusion is not trained"
        for name in self.weights:
            apply = partial(self._apply_head_rate, name)
            self.schedulables.register(Schedulable(f"{LR}/{name}", 1.0, apply=apply))

    # ------------------------------------------------------------------ what callbacks see

    def _reward_metrics(self, batch: GroupBatch, table: RewardTable) -> Metrics:
        found = super()._reward_metrics(batch, table)
        shares = {name: found.get(f"adv/zero_std/{name}") for name in self.weights}
        self.flat = {name: float(share[0]) for name, share in shares.items() if share is not None}
        return found

    def note_clips(self, heads: Sequence[Metrics]) -> None:
        """Clip metrics of each active head's loss, of one micro-batch."""
        pairs = [metrics["clip_ratio/region_mean"] for metrics in heads]
        sums, counts = (torch.stack(part) for part in zip(*pairs, strict=True))
        self._tally.add(0, clipped=sums, counted=counts)

    def part_norms(self) -> dict[str, float]:
        found = super().part_norms()
        names = [self.heads.spec.names[k] for k in self.heads.active]
        self.alpha = dict(zip(names, self._means["alpha"].tolist(), strict=True))
        shares = self._means["clipped"] / self._means["counted"].clamp(min=1e-300)
        self.clipped = dict(zip(names, shares.tolist(), strict=True))
        return found

    # ------------------------------------------------------------------ what callbacks change

    def train_batch(self, batch: GroupBatch) -> None:
        super().train_batch(batch if self.feed is None else self.feed(batch))

    def claim_head(self, name: str, cause: str) -> None:
        """Say in a callback's `setup` that this cause may scale the learning rate of a head."""
        self.schedulables[f"{LR}/{name}"].claim(cause)

    def scale_head(self, name: str, cause: str, factor: float) -> None:
        """Multiply the learning rate of a head. Each cause has one factor, which replaces its last one."""
        self.schedulables[f"{LR}/{name}"].scale(cause, factor)

    def _apply_head_rate(self, name: str, value: float) -> None:
        if self._trainer is None or not self._trainer.optimizers:
            return
        part = f"heads.subs.{self.heads.spec.names.index(name)}."
        rescale(optimizer_of(self)[0].optimizer, self.lr_schedule, part, self.head_steps.rate * value)

    def on_train_start(self) -> None:
        super().on_train_start()
        for name in self.weights:  # also of those whose factor has gone since the checkpoint
            self.schedulables[f"{LR}/{name}"].apply()
