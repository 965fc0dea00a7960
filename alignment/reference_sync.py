"""A reference that follows the policy. Every so many optimizer steps, in the weights,

    pi_ref <- alpha pi + (1 - alpha) pi_ref

alpha 0.6 every 512 steps is TR-DPO (Gorbatovski et al. 2024, arXiv 2404.09656) with TRL's numbers, alpha 1 its hard
update; a small alpha every step is an exponential moving average (EMA) of the policy.

What the policy trains is mixed. With LoRA that is A and B of each adapter, whose product then is

    B'A' = alpha B A + (1 - alpha) B_ref A_ref - alpha (1 - alpha) (B - B_ref)(A - A_ref):

the mixture, but for a product of two small differences, and exactly it with alpha 1. Weights below fp32 keep their
average in fp32, for most steps of an EMA are smaller than what bf16 can tell apart.

The reference moves between two training batches, never inside one, so that log-probs and states of it that a rollout
left behind stay those of one model. A batch of several optimizer steps may make several moves due; they are taken at
once, with 1 - (1 - alpha)^n in place of alpha. Weights of the reference are in the checkpoint, under `reference.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from alignment import memory
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.fp8 import Fp8Archive
from alignment.module import PolicyMixin
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.reference import Reference, ReferenceKind
from alignment.settings import as_config
from alignment.spread import is_spread, whole

PREFIX = "reference."
FIXED = {
    "cached": "log-probs of the start",
    "adapter_off": "the base without its adapters",
    "fp8": "codes of the start",
}
"""Kinds of reference without weights of their own -> what they are."""


@dataclass(kw_only=True)
class ReferenceSync:
    """How the reference follows the policy; an EMA is {alpha: 0.01, every: 1}.

    Args:
        alpha: share of the policy in the new reference, above 0 and at most 1; 1 replaces the reference by the policy.
        every: optimizer steps between two of its moves.
    """

    alpha: float = 0.6
    every: int = 512

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1 or self.every < 1:
            raise UserError(
                f"reference_sync.alpha is {self.alpha} and every {self.every}; alpha is above 0 and at most 1, every "
                "at least 1 (leave reference_sync out for a reference that stays)"
            )


class Follower:
    """Moves the weights of a reference that has some.

    Args:
        reference: of a kind with weights of its own. config: see ReferenceSync.
    """

    def __init__(self, reference: Reference, config: ReferenceSync) -> None:
        self._reference, self._config = reference, config
        self._averages: dict[str, Tensor] = {}  # fp32, of weights below fp32 that have moved

    def due(self, before: int, after: int) -> int:
        """How many moves are due when `global_step` has gone from `before` to `after`."""
        return after // self._config.every - before // self._config.every

    @torch.no_grad()
    def move(self, times: int) -> None:
        """Take `times` moves at once, towards the policy as it is now."""
        alpha = self._config.alpha
        if times > 1:
            alpha = 1 - (1 - alpha) ** times
        for name, (source, own) in self._reference.trained().items():
            policy = source if is_spread(own) else whole(source)  # an adapter's frozen twin is whole on every rank
            if alpha == 1 or not _is_low(own):
                own.lerp_(policy.to(own), alpha)
                self._averages.pop(name, None)
                continue
            average = self._averages.get(name)
            if average is None:
                average = self._averages[name] = own.float()
            own.copy_(average.lerp_(policy.float(), alpha))

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> the reference's weight, not copied; its fp32 average where there is one."""
        return {name: self._averages.get(name, own.detach()) for name, (_, own) in self._reference.trained().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._averages = {}
        for name, (_, own) in self._reference.trained().items():
            own.copy_(state[name])
            if _is_low(own) and not _is_low(state[name]):
                self._averages[name] = state[name].to(own.device, copy=True)


def _is_low(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


class SyncedMixin(PolicyMixin):
    """PolicyMixin with a reference that may follow the policy; a subclass calls `make_reference` in `build_parts`.

    Args:
        reference: kind of reference; with `reference_sync` one with weights of its own.
        reference_sync: how it follows the policy. None: it stays what the policy was at the start.
    """

    reference: Reference

    def __init__(
        self,
        *,
        policy: PolicyConfig,
        reference: ReferenceKind,
        reference_sync: ReferenceSync | None,
        optim: OptimConfig,
        micro_batch_tokens: int | None,
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.reference_sync = None if reference_sync is None else as_config(ReferenceSync, reference_sync)
        self._follower: Follower | None = None
        self._has_reference = False
        if self.reference_sync is not None and reference in FIXED:
            raise UserError(
                f"reference={reference} is {FIXED[reference]}, which cannot follow the policy as reference_sync "
                "asks; use auto (a copy of the policy, with LoRA a copy of its adapters), or leave reference_sync out"
            )

    @property
    def cheapest_kind(self) -> Literal["adapter_off", "frozen_adapter", "copy"]:
        """The cheapest reference of completions that are not known ahead."""
        lora = self.policy_config.lora
        if lora is None:
            return "copy"
        return "adapter_off" if lora.pretrained is None and self.reference_sync is None else "frozen_adapter"

    def make_reference(self, kind: ReferenceKind, **options: Any) -> None:
        """Build `reference`, while the policy is as it was loaded; `options` go to `Reference.build`."""
        self.reference = Reference.build(kind, self.policy, self.policy_config, self.build_engine, **options)
        self._has_reference = True
        if self.reference_sync is not None:
            self._follower = Follower(self.reference, self.reference_sync)

    def reset_reference(self, archive: Fp8Archive, name: str) -> None:
        """Make an archived policy the reference. Between two batches. Raises UserError without `reference_sync`: only
        then are the reference's weights in the checkpoint."""
        if self._follower is None:
            raise UserError(
                "a reference can be reset to an archived policy in a run with reference_sync only, whose checkpoints "
                "hold it; a large `every` keeps it from moving by itself"
            )
        names = {parameter: key for key, parameter in self.named_parameters()}
        trained = self.reference.trained()
        self._follower.load_state_dict({n: archive.tensor(name, names[p]) for n, (p, _) in trained.items()})

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        alpha = None if self.reference_sync is None else self.reference_sync.alpha
        return replace(super().memory_plan(trainer), reference_alpha=alpha)

    def training_step(self, batch: GroupBatch, batch_idx: int) -> None:
        before = self.trainer.global_step
        super().training_step(batch, batch_idx)
        if self._follower is not None and (times := self._follower.due(before, self.trainer.global_step)):
            self._follower.move(times)

    # ------------------------------------------------------------------ state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(*args, **kwargs), **self._reference_state()}

    def _reference_state(self) -> dict[str, Tensor]:
        return {} if self._follower is None else {PREFIX + n: v for n, v in self._follower.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        own = {n.removeprefix(PREFIX): v for n, v in state_dict.items() if n.startswith(PREFIX)}
        rest = {n: v for n, v in state_dict.items() if not n.startswith(PREFIX)}
        found = super().load_state_dict(rest, strict=strict, assign=assign)
        if self._follower is not None and own:
            self._follower.load_state_dict(own)
        return found

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A reference that begins to follow here does so from the start. Raises UserError for one that has followed so
        far and now would not."""
        state: dict[str, Any] = checkpoint["state_dict"]
        saved = [name for name in state if name.startswith(PREFIX)]
        if saved and self._follower is None:
            if self._has_reference:
                raise UserError(
                    "the reference of this checkpoint has followed the policy, and without reference_sync it would be "
                    "the policy of the start again; give the reference_sync of that run (a larger `every` holds it)"
                )
            for name in saved:
                del state[name]
        elif not saved:
            state.update(self._reference_state())
        super().on_load_checkpoint(checkpoint)
