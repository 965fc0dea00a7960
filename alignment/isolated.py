"""IsolatedMixin: updates of modules with heads, whose trunk is pulled by several rewards (`alignment.isolation`).

isolation         trunk's gradient                             passes of the trunk
none              of one loss with the combined advantage      1 forward, 1 backward; at every measure_every-th update
                                                               K + 1 backward
at parameters     of K losses, combined                        1 forward, K + 1 backward
at states         of K losses, combined                        2 forward, 1 backward

At the states dL_k / dh the gradient of reward k is a multiple of the gradient B of each token's log-prob, so that their
inner products take one backward pass through the LM head: <g_j, g_k> = sum over tokens of c_j c_k |B|^2, with c_k the
slope of L_k in the log-prob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment import distributed, memory
from alignment.batches import GroupBatch
from alignment.components import REST, Objectives, update_objectives
from alignment.headed import Seen, held
from alignment.heads import preference
from alignment.isolation import Isolation, IsolationConfig
from alignment.metrics import Metrics
from alignment.settings import as_config
from alignment.steered import SteeredMixin
from alignment.update import Counts


class IsolatedMixin(SteeredMixin):
    """SteeredMixin with its updates. A module defines `rest`, `combined_loss` and `reward_losses`.

    Args:
        isolation: see IsolationConfig. settings: those of HeadedMixin.
    """

    def __init__(self, *, isolation: IsolationConfig, **settings: Any) -> None:
        super().__init__(**settings)
        # The scale that weights have in the combined advantage: their mean is 1.
        shares = zip(self.weights, preference(self.weights, {}), strict=True)
        weights = {name: share * len(self.weights) for name, share in shares}
        self.isolation = Isolation(as_config(IsolationConfig, isolation), weights)
        self.gradient_factors: dict[str, float] = {}
        self._reward_norms: dict[str, float] = {}

    # ------------------------------------------------------------------ what an algorithm defines

    def rest(self, micro: GroupBatch, seen: Seen, counts: Counts) -> tuple[Tensor, Metrics]:
        """(share of what heads and fusion learn from and of what holds everything back, metrics)."""
        raise TypeError(f"{type(self).__name__} must define rest(micro, seen, counts)")

    def combined_loss(self, micro: GroupBatch, logps: Tensor, counts: Counts) -> Tensor:
        """Share of what the trunk learns from, given [C] log-probs along its route."""
        raise TypeError(f"{type(self).__name__} must define combined_loss(micro, logps, counts)")

    def reward_losses(self, micro: GroupBatch, logps: Tensor, counts: Counts) -> dict[str, Tensor]:
        """The same of each reward with a head, in the order of `isolation.names`."""
        raise TypeError(f"{type(self).__name__} must define reward_losses(micro, logps, counts)")

    # ------------------------------------------------------------------ updates

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        config, names = self.isolation.config, self.isolation.names
        one_by_one = config.level == "parameters" if config.needed else self._measures
        kept = len(names) + 1 if one_by_one and self.fusion_config.mode == "joint" else 1
        return replace(super().memory_plan(trainer), gradients=kept)

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """See `alignment.watching.HasRewardGradients`."""
        return self.isolation.names if self.isolation.config.needed else ()

    @property
    def keeps_ratio(self) -> bool:
        return self.isolation.config.ratio is not None

    def part_norms(self) -> dict[str, float]:
        return {**super().part_norms(), **self._reward_norms}

    def update_part(self, part: GroupBatch) -> None:
        self._reward_norms = {}
        self.begin_update(part)
        config, names = self.isolation.config, self.isolation.names
        if self.solo is not None or not (config.needed or self._measuring):
            self.update(part, self.loss, keep_groups=False)
        elif not config.needed:
            update_objectives(self, part, self.measured, names, None, keep_groups=False)
        elif config.level == "parameters":
            update_objectives(self, part, self.objectives, names, self.combine, keep_groups=False)
        else:
            found = self._at_states(part)
            # What is remembered of gradients must not take in one that is not finite; the update is left out then.
            known = bool(torch.isfinite(found.gram).all())
            shares = self.combine(found) if known else torch.full_like(found.losses, torch.nan)
            self.begin_update(part)
            self.update(part, partial(self.loss, shares=shares), keep_groups=False)

    def loss(self, micro: GroupBatch, counts: Counts, shares: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """`shares`: [A] coefficients of the rewards' losses for the trunk. None: the combined loss."""
        seen = self.see(micro)
        total, metrics = self.rest(micro, seen, counts)
        if self.solo is not None:
            return total, metrics
        if shares is None:
            return total + self.combined_loss(micro, seen.logps[0], counts), metrics
        losses = torch.stack(list(self.reward_losses(micro, seen.logps[0], counts).values()))
        return total + (losses * shares.to(losses)).sum(), metrics

    def objectives(self, micro: GroupBatch, counts: Counts) -> tuple[Mapping[str, Tensor], Metrics]:
        """The losses whose gradients are combined, and the rest."""
        seen = self.see(micro)
        rest, metrics = self.rest(micro, seen, counts)
        return {**self.reward_losses(micro, seen.logps[0], counts), REST: rest}, metrics

    def measured(self, micro: GroupBatch, counts: Counts) -> tuple[Mapping[str, Tensor], Metrics]:
        """The rewards' losses, and the whole loss beside them."""
        seen = self.see(micro)
        rest, metrics = self.rest(micro, seen, counts)
        whole = rest + self.combined_loss(micro, seen.logps[0], counts)
        return {**self.reward_losses(micro, seen.logps[0], counts), REST: whole}, metrics

    @property
    def _measuring(self) -> bool:
        """Whether the update that comes is one at which gradients are only measured one by one."""
        return self._measures and (self.guard.updates + 1) % self.isolation.config.measure_every == 0

    @property
    def _measures(self) -> bool:
        """Whether there are such updates."""
        return self.isolation.config.measure_every > 0 and len(self.isolation.names) > 1

    def combine(self, found: Objectives) -> Tensor:
        """[A] coefficients. A collective."""
        self._reward_norms = dict(zip(found.names, found.norms.tolist(), strict=True))
        shares, metrics = self.isolation.coefficients(found, self.update_means()["alpha"], self.gradient_factors)
        if distributed.rank() == 0:
            self._train_window.update(metrics)
        self.warn_once(self.isolation.warning)
        return shares

    def _at_states(self, part: GroupBatch) -> Objectives:
        """What is known of the rewards' gradients with respect to the trunk's last states, over all ranks."""
        names = self.isolation.names
        gram = torch.zeros(len(names), len(names), dtype=torch.float64, device=self.device)
        total = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        counts = Counts.of(part)
        for micro in self.micro_batches(part, keep_groups=False):
            with torch.no_grad():
                states = self.trunk_states(micro)
            with held(self.policy):  # the LM head's gradient is not asked for
                h = states.requires_grad_()
                seen = self.see(micro, h)
                logps = seen.logps[0].detach().requires_grad_()
                losses = self.reward_losses(micro, logps, counts)
                slopes = torch.stack([torch.autograd.grad(loss, logps)[0] for loss in losses.values()]).double()
                (slope,) = torch.autograd.grad(seen.logps[0].sum(), h)
            gram += (slopes * slope.double().square().sum(-1)) @ slopes.T
            total += torch.stack([loss.detach().double() for loss in losses.values()])
            self.note(micro, seen)
        gram, total = distributed.all_reduce_sum(gram).cpu(), distributed.all_reduce_sum(total).cpu()
        return Objectives(names=names, gram=gram, losses=total)

    # ------------------------------------------------------------------ state

    def training_state(self) -> dict[str, Any]:
        return {**super().training_state(), "isolation": self.isolation.state_dict()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        self.isolation.load_state_dict(state["isolation"])
