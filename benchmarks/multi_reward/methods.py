"""The rows of the table: which module, and what differs from `base.yaml`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Args:
    title: of the row. module: class in `modules`. settings: of the module, laid over those of `base.yaml`.
    ablation: a variant of another method, in the second part of the table.
    """

    title: str
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ablation: bool = False


HEADS = "DecoupledPO"
SOUPS = "soups"
METHODS: dict[str, Method] = {
    "ppo": Method(
        title="PPO, weighted sum",
        module="PPO",
        settings={"kl": {"coefficient": 0.02, "place": "reward", "estimator": "k1"}},
    ),
    "grpo": Method(title="GRPO, summed", module="GRPO"),
    "grpo_no_std": Method(title="GRPO, summed, no std", module="GRPO", settings={"advantage": "none"}),
    "mgda": Method(title="MORL: MGDA", module="MORL", settings={"combine": "mgda"}),
    "pcgrad": Method(title="MORL: PCGrad", module="MORL", settings={"combine": "pcgrad"}),
    "cagrad": Method(title="MORL: CAGrad", module="MORL", settings={"combine": "cagrad"}),
    SOUPS: Method(title="Rewarded Soups", module="GRPO"),
    "gdpo": Method(title="GDPO", module="GDPO"),
    "decoupled": Method(title="DecoupledPO", module=HEADS),
    "gdpo_no_batch": Method(
        title="GDPO, no batch normalisation", module="GDPO", settings={"whiten": "none"}, ablation=True
    ),
    "decoupled_isolated": Method(
        title="DecoupledPO, isolation: project",
        module=HEADS,
        settings={"isolation": {"mode": "project", "threshold": 0.25}},
        ablation=True,
    ),
    "decoupled_no_fusion": Method(
        title="DecoupledPO, no fusion: weights alone decide",
        module=HEADS,
        settings={"fusion": {"temperature": 1.0e6}},
        ablation=True,
    ),
    "decoupled_unbounded": Method(
        title="DecoupledPO, unbounded heads",
        module=HEADS,
        settings={"heads": {"kl": 0.0, "scaled": False}},
        ablation=True,
    ),
    "decoupled_cold": Method(
        title="DecoupledPO, cold start of 10 batches a head",
        module=HEADS,
        settings={"cold_start": {"rollouts": 10}},
        ablation=True,
    ),
    "decoupled_brief": Method(
        title="DecoupledPO, `preset: brief`, cold start of 10 batches a head",
        module=HEADS,
        settings={"preset": "brief", "cold_start": {"rollouts": 10}},
        ablation=True,
    ),
}


def configuration(base: Mapping[str, Any], method: Method, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A whole configuration: `base.yaml`, the method's settings over it, `changes` over both."""
    config: dict[str, Any] = copy.deepcopy(dict(base))
    config["model"]["class_path"] = f"modules.{method.module}"
    return laid_over(laid_over(config, {"model": {"init_args": dict(method.settings)}}), changes or {})


def laid_over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced."""
    out = dict(below)
    for name, value in above.items():
        inner = out.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        out[name] = laid_over(inner, value) if both else value
    return out
