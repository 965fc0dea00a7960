"""Whether the gradients of several rewards, heads or groups of parameters have the lengths they should have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from alignment.errors import UserError
from alignment.events import record_event
from alignment.gradient_ratio import averaged, deviations, factors
from alignment.update import total_norm
from alignment.watching import HasHeads, HasMetrics, HasRewardGradients

Of = Literal["rewards", "heads", "groups"]

BAND = (2 / 3, 3 / 2)
TOLD = 1.25
"""How much a factor moves, up or down, until it is told again: it moves a little at every update."""
HEAD = "head/"
CAUSE = "gradient ratio"


class GradientNormRatio(Callback):
    """Compares gradient norms before clipping with a ratio, and can steer towards it (`alignment.gradient_ratio`).

    Metrics: `grad/dev/NAME`, the norm's moving average over what its share would make it: 1 where the ratio is kept;
    of heads `grad/dev/head/NAME`. With `control` also `grad/factor/NAME`. Events: `gradient_ratio`, a norm leaves the
    band from 2/3 to 3/2, told again when it has come back and leaves once more; `gradient_control`, a factor has moved
    by a quarter since it was last told.

    A head whose reward is the same in every group of a batch has no gradient of that reward, only of its KL: such a
    batch is no measurement of it, and with `control` its factor is 1 there. `callbacks.StalledHead` tells of it.

    Args:
        target: name -> share, for example {professional: 1, sentiment: 1.2, efficiency: 0.8}; names that are not given
            have 1. Null: all alike.
        of: `rewards`: the gradient of each reward's loss on the trunk, where the module takes them one by one
            (modules.MORL with `combine`, modules.DecoupledPO with isolation); `heads`: of each head; `groups`: of each
            parameter group of the optimizer, under its name there. Null: the first of these that the module has.
        ema: share of the old value in the moving average.
        control: multiply each reward's gradient, or each head's learning rate, by what would keep the ratio, between
            1/2 and 2.
    """

    def __init__(
        self, target: dict[str, float] | None = None, of: Of | None = None, ema: float = 0.9, control: bool = False
    ) -> None:
        here = "callbacks.GradientNormRatio"
        if bad := [name for name, share in (target or {}).items() if not 0 < share < math.inf]:
            raise UserError(f"{here}: the target of {bad[0]} is {(target or {})[bad[0]]}; a share is above 0")
        if of is not None and of not in get_args(Of):
            raise UserError(f"{here}: of is '{of}'; it is one of {', '.join(get_args(Of))}, or null")
        if not 0 <= ema < 1:
            raise UserError(f"{here}: ema is {ema}; it is at least 0 and below 1")
        if control and of == "groups":
            raise UserError(f"{here}: control is for rewards and heads, not for parameter groups")
        self.target, self.of, self.ema, self.control = dict(target or {}), of, ema, control
        self.averages: dict[str, float] = {}
        self.outside: set[str] = set()
        self.told: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        return self._generate_state_key(of=self.of)

    # ------------------------------------------------------------------ what is compared

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        here, kind = "callbacks.GradientNormRatio", type(pl_module).__name__
        if not isinstance(pl_module, HasMetrics):
            raise UserError(f"{here} is for this project's modules, not for a {kind}; leave the callback out")
        of, known = self._kind(pl_module), _kinds(pl_module)
        if of not in known:
            raise UserError(
                f"{here}: this {kind} has gradients of {' and '.join(known)}, none of {of} (those of rewards: "
                "modules.MORL that combines gradients, modules.DecoupledPO with isolation)"
            )
        if self.control:
            _check_control(pl_module, of)
            self._check_alone(trainer, pl_module, of)
            if of == "heads":
                _claim(pl_module, self._keys(pl_module, of))
        if of != "groups":
            self._check_names(set(self._keys(pl_module, of)), of)

    def _check_alone(self, trainer: L.Trainer, module: L.LightningModule, of: Of) -> None:
        """Raise UserError where another one would control the same gradients by the same factors."""
        twins = [c for c in trainer.callbacks if c is not self and isinstance(c, GradientNormRatio)]  # type: ignore[attr-defined]
        if any(twin.control and twin._kind(module) == of for twin in twins):
            raise UserError(f"two callbacks.GradientNormRatio would control the gradients of {of}; leave one out")

    def _kind(self, module: L.LightningModule) -> Of:
        return self.of or _kinds(module)[0]

    @staticmethod
    def _keys(module: L.LightningModule, of: Of) -> dict[str, str]:
        """Name -> key among the norms of an update."""
        if of == "rewards":
            assert isinstance(module, HasRewardGradients)
            return {name: name for name in module.gradient_names}
        assert isinstance(module, HasHeads)
        return {name: HEAD + name for name, weight in module.weights.items() if weight > 0}

    def _check_names(self, known: set[str], of: Of) -> None:
        if unknown := sorted(set(self.target) - known):
            raise UserError(
                f"callbacks.GradientNormRatio: target names {', '.join(unknown)}; of {of} there are "
                f"{', '.join(sorted(known))}"
            )

    def _measured(self, module: L.LightningModule, norms: Mapping[str, float]) -> tuple[dict[str, float], set[str]]:
        """(name -> norm of those that have one in this update, the names of all)."""
        of = self._kind(module)
        if of == "groups":
            groups = {str(g["name"]): g["params"] for g in module.trainer.optimizers[0].param_groups}
            self._check_names(set(groups), of)
            grads = {name: [p.grad for p in members if p.grad is not None] for name, members in groups.items()}
            return {name: float(total_norm(own)) for name, own in grads.items() if own}, set(groups)
        keys = self._keys(module, of)
        return {name: norms[key] for name, key in keys.items() if key in norms}, set(keys)

    def _idle(self, module: L.LightningModule) -> set[str]:
        """Heads whose reward does not differ in any group of this batch."""
        if self._kind(module) != "heads":
            return set()
        assert isinstance(module, HasHeads)
        return {name for name, share in module.flat.items() if share == 1.0}

    # ------------------------------------------------------------------ at each update

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.control and self.averages and self._kind(pl_module) == "rewards":
            self._steer(pl_module)  # factors on heads' learning rates are in the module's own state

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None:
        measured, names = self._measured(module, norms)
        idle = self._idle(module)
        for name, norm in measured.items():
            if name not in idle:
                self.averages[name] = averaged(self.averages.get(name), norm, self.ema)
        if not measured or names - self.averages.keys() - idle:
            return
        prefix = HEAD if self._kind(module) == "heads" else ""
        lengths, shares = self._state()
        found = dict(zip(self.averages, deviations(lengths, shares).tolist(), strict=True))
        assert isinstance(module, HasMetrics)
        module.note_values({f"grad/dev/{prefix}{name}": value for name, value in found.items()})
        self._alarm(trainer, {prefix + name: value for name, value in found.items()})
        if self.control:
            chosen = self._steer(module, idle & names)
            module.note_values({f"grad/factor/{prefix}{name}": value for name, value in chosen.items()})
            self._tell(trainer, prefix, {name: value for name, value in chosen.items() if name not in idle})

    def _state(self) -> tuple[Tensor, Tensor]:
        """(moving averages, shares), in the order of the averages."""
        return _tensor(list(self.averages.values())), _tensor([self.target.get(name, 1.0) for name in self.averages])

    def _alarm(self, trainer: L.Trainer, found: Mapping[str, float]) -> None:
        """Tell of those that have just left the band. Where nothing has a length there is nothing to compare."""
        low, high = BAND
        outside = {name for name, value in found.items() if not low <= value <= high and any(found.values())}
        for name in sorted(outside - self.outside):
            text = f"the gradient of {name} is {found[name]:.3g} times what its share would make it"
            record_event(trainer, "gradient_ratio", f"{text} (band {low:.3g} to {high:.3g})")
        self.outside = outside

    def _tell(self, trainer: L.Trainer, prefix: str, chosen: Mapping[str, float]) -> None:
        what = "learning rate" if prefix else "gradient"
        for name, factor in chosen.items():
            before = self.told.get(name, 1.0)
            if max(factor / before, before / factor) >= TOLD:
                text = f"the {what} of {prefix}{name} is multiplied by {factor:.3g} from now on, before by {before:.3g}"
                record_event(trainer, "gradient_control", text)
                self.told[name] = factor

    def _steer(self, module: L.LightningModule, idle: Set[str] = frozenset()) -> dict[str, float]:
        chosen = dict(zip(self.averages, factors(*self._state()).tolist(), strict=True))
        chosen |= dict.fromkeys(sorted(idle), 1.0)
        if self._kind(module) == "rewards":
            assert isinstance(module, HasRewardGradients)
            module.gradient_factors.update(chosen)
        else:
            assert isinstance(module, HasHeads)
            for name, factor in chosen.items():
                module.scale_head(name, CAUSE, factor)
        return chosen

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self.averages), "outside": sorted(self.outside), "told": dict(self.told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages, self.outside = dict(state_dict["averages"]), set(state_dict["outside"])
        self.told = dict(state_dict.get("told", {}))  # there was none once


def _kinds(module: L.LightningModule) -> list[Of]:
    found: list[Of] = []
    if isinstance(module, HasRewardGradients) and module.gradient_names:
        found.append("rewards")
    if isinstance(module, HasHeads):
        found.append("heads")
    return [*found, "groups"]


def _claim(module: L.LightningModule, heads: Iterable[str]) -> None:
    assert isinstance(module, HasHeads)
    for name in heads:
        module.claim_head(name, CAUSE)


def _check_control(module: L.LightningModule, of: Of) -> None:
    here = "callbacks.GradientNormRatio"
    if of == "groups":
        raise UserError(f"{here}: {type(module).__name__} has no gradients of rewards or heads here; leave control out")
    if of == "rewards" and isinstance(module, HasRewardGradients) and module.keeps_ratio:
        raise UserError(f"{here}: isolation.ratio controls the gradients already; leave one of both out")


def _tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
