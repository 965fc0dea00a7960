"""What several rewards did over the evaluations of a run, and pictures of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from alignment.pareto import hypervolume, on_front

Rewards = Mapping[str, float | None]
"""Name -> value of one completion; None where it abstained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation.

    Args:
        step: where its metrics are logged. means: name -> mean reward; NaN without any.
        correlation: of the rewards over its completions, [K][K]; NaN where one does not vary.
        profile: per bin of places in the completion the mean fusion weight of each head since the last evaluation;
            empty for a policy without heads.
        volume: hypervolume of the front of this evaluation and those before it.
    """

    step: int
    means: dict[str, float]
    correlation: list[list[float]]
    profile: list[list[float | None]] = field(default_factory=list)
    volume: float = float("nan")


def evaluation(step: int, rows: Sequence[Rewards], names: Sequence[str], profile: Any = ()) -> Evaluation:
    """From the rewards of an evaluation's completions."""
    values = np.array([[np.nan if row[n] is None else row[n] for n in names] for row in rows], dtype=float)
    values = values.reshape(-1, len(names))
    columns = {n: values[~np.isnan(values[:, k]), k] for k, n in enumerate(names)}
    means = {n: float(column.mean()) if len(column) else float("nan") for n, column in columns.items()}
    pairs = [[_correlation(values[:, [a, b]]) for b in range(len(names))] for a in range(len(names))]
    return Evaluation(step=step, means=means, correlation=pairs, profile=[list(row) for row in profile])


def _correlation(pair: np.ndarray) -> float:
    """Over the completions that have both; NaN where one of them does not vary."""
    both = pair[~np.isnan(pair).any(1)]
    if len(both) < 2 or (np.ptp(both, axis=0) == 0).any():
        return float("nan")
    return float(np.corrcoef(both.T)[0, 1])


@dataclass(slots=True)
class History:
    """Evaluations of a run, by step; the same step again replaces it."""

    evaluations: list[Evaluation] = field(default_factory=list)

    def add(self, found: Evaluation) -> None:
        others = [e for e in self.evaluations if e.step != found.step]
        self.evaluations = sorted([*others, found], key=lambda e: e.step)

    def points(self, names: Sequence[str]) -> list[tuple[float, ...]]:
        return [tuple(e.means[n] for n in names) for e in self.evaluations]

    def hypervolume(self, reference: Mapping[str, float]) -> float:
        """Of the front of all evaluations so far, above the reference."""
        points = [p for p in self.points(list(reference)) if all(v == v for v in p)]
        return float(hypervolume(points, list(reference.values())))

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": [asdict(e) for e in self.evaluations]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = [Evaluation(**e) for e in state["evaluations"]]


# ------------------------------------------------------------------------------------------------ pictures


def draw_rewards(history: History, names: Sequence[str], path: Path) -> None:
    """The last correlation, for each pair of rewards the way of their means with its front, and the hypervolume."""
    from matplotlib.figure import Figure  # imported where it is used: it takes a second

    pairs = list(combinations(range(len(names)), 2))
    figure = Figure(figsize=(3.8 * (2 + len(pairs)), 3.4), layout="constrained")
    first, *others, growth = figure.subplots(1, 2 + len(pairs))
    last = history.evaluations[-1]
    image = first.imshow(np.array(last.correlation, dtype=float), cmap="coolwarm", vmin=-1, vmax=1)
    for a, row in enumerate(last.correlation):
        for b, value in enumerate(row):
            first.text(b, a, "" if value != value else f"{value:.2f}", ha="center", va="center", fontsize=8)
    first.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    first.set_yticks(range(len(names)), names, fontsize=8)
    first.set_title(f"correlation of rewards, step {last.step}", fontsize=9)
    figure.colorbar(image, ax=first, shrink=0.8)
    points, steps = history.points(names), [e.step for e in history.evaluations]
    for axis, (a, b) in zip(others, pairs, strict=True):
        flat = [(p[a], p[b]) for p in points]
        axis.plot(*zip(*flat, strict=True), color="0.8", linewidth=1, zorder=0)
        best = sorted(p for p, kept in zip(flat, on_front(flat), strict=True) if kept)
        if best:
            axis.plot(*zip(*best, strict=True), color="black", linewidth=1, linestyle="--", label="front", zorder=1)
            axis.legend(frameon=False, fontsize=8)
        dots = axis.scatter(*zip(*flat, strict=True), c=steps, cmap="viridis", s=24, zorder=2)
        axis.set_xlabel(names[a], fontsize=9)
        axis.set_ylabel(names[b], fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        figure.colorbar(dots, ax=axis, label="step", shrink=0.8)
    growth.plot(steps, [e.volume for e in history.evaluations], marker="o", markersize=3)
    growth.set_title("hypervolume of the front so far", fontsize=9)
    growth.set_xlabel("step", fontsize=9)
    growth.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def draw_fusion(history: History, names: Sequence[str], width: int, path: Path) -> None:
    """For each head its mean fusion weight: places in the completion upwards, evaluations to the right."""
    from matplotlib.figure import Figure

    with_profile = [e for e in history.evaluations if e.profile]
    values = np.array([e.profile for e in with_profile], dtype=float)  # [E, bins, K]
    figure = Figure(figsize=(3.6 * len(names) + 1, 3.2), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    spread = max(0.02, float(np.nanmax(np.abs(values - 1 / len(names))))) if np.isfinite(values).any() else 0.02
    for k, (axis, name) in enumerate(zip(axes, names, strict=True)):
        image = axis.imshow(
            values[:, :, k].T,
            aspect="auto",
            origin="lower",
            cmap="coolwarm",
            vmin=1 / len(names) - spread,
            vmax=1 / len(names) + spread,
        )
        axis.set_title(f"fusion weight of {name}", fontsize=9)
        axis.set_xticks(range(len(with_profile)), [str(e.step) for e in with_profile], fontsize=7, rotation=45)
        axis.set_yticks(range(values.shape[1]), [str(width * b) for b in range(values.shape[1])], fontsize=7)
        axis.set_xlabel("step", fontsize=8)
    axes[0].set_ylabel("token of the completion", fontsize=8)
    figure.colorbar(image, ax=axes[-1], shrink=0.9)
    figure.savefig(path, dpi=120)
