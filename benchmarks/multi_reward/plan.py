"""Which runs each part of the report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment.dial import grid
from benchmarks.multi_reward.methods import METHODS, SOUPS, laid_over
from benchmarks.multi_reward.runs import GRID, Job
from benchmarks.multi_reward.tasks import TASKS

REWARDS = TASKS["triconflict"].rewards
FULL = [name for name, method in METHODS.items() if not method.ablation]


def share(seeds: Sequence[int], part: int) -> list[int]:
    """The first one of `part` of them, at least one: parts with many runs take fewer seeds than the table."""
    return list(seeds[: max(1, len(seeds) // part)])


GRID_SHARE, FRONT_SHARE, STUDY_SHARE = 3, 5, 2
VARIANT_SEEDS = 1


def _module(**settings: Any) -> dict[str, Any]:
    return {"model": {"init_args": settings}}


def _scaled(name: str) -> dict[str, Any]:
    args = {"reward": name, "factor": 6.0}
    return _module(rewards={name: {"reward": "benchmarks.multi_reward.triconflict.Scaled", "args": args}})


CELLS: dict[str, Mapping[str, Any]] = {
    **{f"{name} reward x 6": _scaled(name) for name in REWARDS},
    **{f"{name} weight x 0.5": _module(rewards={name: {"weight": 0.5}}) for name in REWARDS},
    "lr x 0.8": _module(optim={"lr": 0.8e-3}),
    "lr x 1.2": _module(optim={"lr": 1.2e-3}),
    "beta + 0.05": _module(kl={"coefficient": 0.07}),
    "beta 0": _module(kl={"coefficient": 0.0}),
}
"""The grid of the sensitivity: one setting changed at a time. Beta is 0.02; less by 0.05 is 0."""

VARIED = ("ppo", "grpo", "gdpo", "decoupled")
PLAIN, HALF_SENTIMENT = "as it is", "sentiment weight x 0.5"
SETTINGS: dict[str, Mapping[str, Any]] = {
    PLAIN: {},
    "lr x 0.5": _module(optim={"lr": 0.5e-3}),
    "lr x 2": _module(optim={"lr": 2.0e-3}),
    HALF_SENTIMENT: CELLS[HALF_SENTIMENT],
}
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    PLAIN: ("triconflict", {}),
    "two polite words are enough": (
        "triconflict",
        _module(rewards={"sentiment": {"reward": "benchmarks.multi_reward.triconflict.Polite", "args": {"enough": 2}}}),
    ),
    "long prompts, 1 : 2 : 7": (
        "triconflict-long",
        {
            "data": {
                "init_args": {
                    "val_path": "held_out_long.jsonl",
                    "strata": {"ratio": {"easy": 1, "medium": 2, "hard": 7}},
                }
            }
        },
    ),
}
"""Title -> (key of `TASKS`, what is laid over every configuration): the task with less conflict, and with a harder mix,
trained and evaluated on."""

STUDY: dict[str, tuple[str, Mapping[str, Any]]] = {
    "no routes: heads learn from the combined advantage": (
        "decoupled",
        {"model": {"class_path": "benchmarks.multi_reward.routing.OneRoute"}},
    ),
    "heads step with the trunk": ("decoupled", _module(heads={"every": 1})),
    "heads at a third of the rate instead": ("decoupled", _module(heads={"between": "rate"})),
    "no KL of the heads' own": ("decoupled", _module(heads={"kl": 0.0})),
    "KL of the heads' own 0.1": ("decoupled", _module(heads={"kl": 0.1})),
    "rank 4": ("decoupled", _module(heads={"rank": 4})),
    "rank 64": ("decoupled", _module(heads={"rank": 64})),
    "heads not scaled": ("decoupled", _module(heads={"scaled": False})),
    "fusion temperature 0.3": ("decoupled", _module(fusion={"temperature": 0.3})),
    "fusion temperature 10": ("decoupled", _module(fusion={"temperature": 10.0})),
    "no bonus for even fusion": ("decoupled", _module(fusion={"entropy": 0.0})),
    "linear pool": ("decoupled", _module(fusion={"pool": "linear"})),
    "isolation: block": ("decoupled", _module(isolation={"mode": "block"})),
    "isolation: scale": ("decoupled", _module(isolation={"mode": "scale"})),
    "isolation: gradvac": ("decoupled", _module(isolation={"mode": "gradvac"})),
    "isolation: gate": ("decoupled", _module(isolation={"mode": "gate"})),
}
"""DecoupledPO with one thing changed."""


def table_jobs(seeds: Sequence[int]) -> list[Job]:
    return [Job(name=f"{method}-{seed}", method=method, seed=seed) for seed in seeds for method in METHODS]


def grid_jobs(seeds: Sequence[int]) -> list[Job]:
    cells = list(CELLS.items())
    return [
        Job(name=f"{method}-cell{i}-{seed}", method=method, seed=seed, changes=changes)
        for seed in seeds
        for i, (_, changes) in enumerate(cells)
        for method in FULL
        if method != SOUPS
    ]


def variant_name(method: str, variant: str, setting: str, seed: int) -> str:
    """Of a job; those that the table or the sensitivity has are theirs."""
    if variant == PLAIN and setting == PLAIN:
        return f"{method}-{seed}"
    if variant == PLAIN and setting in CELLS:
        return f"{method}-cell{list(CELLS).index(setting)}-{seed}"
    return f"{method}-variant{list(VARIANTS).index(variant)}-{list(SETTINGS).index(setting)}-{seed}"


def variant_jobs(seeds: Sequence[int]) -> list[Job]:
    return [
        Job(
            name=variant_name(method, variant, setting, seed),
            method=method,
            seed=seed,
            task=task,
            changes=laid_over(dict(given), changes),
        )
        for seed in seeds
        for variant, (task, given) in VARIANTS.items()
        for setting, changes in SETTINGS.items()
        for method in VARIED
    ]


def study_jobs(seeds: Sequence[int]) -> list[Job]:
    return [
        Job(name=f"study{i}-{seed}", method=method, seed=seed, changes=changes)
        for seed in seeds
        for i, (method, changes) in enumerate(STUDY.values())
    ]


LANGUAGE_SEEDS = 3


def language_jobs() -> list[Job]:
    return [
        Job(name=f"support-{method}-{seed}", method=method, seed=seed, task="support")
        for seed in range(LANGUAGE_SEEDS)
        for method in METHODS
    ]


def language_dial_jobs() -> list[Job]:
    """DecoupledPO on language, its dial turned at the end."""
    return [
        Job(name=f"support-dial-{seed}", method="decoupled", seed=seed, task="support", dial=True)
        for seed in range(LANGUAGE_SEEDS)
    ]


TRAINED_FRONTS = ("grpo", "gdpo")


def dial_jobs(seeds: Sequence[int]) -> list[Job]:
    """DecoupledPO with its dial turned at the end."""
    return [Job(name=f"dial-{seed}", method="decoupled", seed=seed, dial=True) for seed in seeds]


def front_jobs(seeds: Sequence[int]) -> list[Job]:
    """A run for each preference."""
    jobs = []
    for seed in seeds:
        for i, weights in enumerate(grid(REWARDS, GRID)):
            changes = _module(rewards={name: {"weight": weight} for name, weight in weights.items()})
            jobs += [Job(name=f"{m}-front{i}-{seed}", method=m, seed=seed, changes=changes) for m in TRAINED_FRONTS]
    return jobs
