"""What several rewards did over the evaluations of a run, and pictures of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment.panels import colour_bar, diverging, panels, plain_axes, some, whole_ticks
from alignment.pareto import hypervolume, on_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rewards = Mapping[str, float | None]
"""Name -> value of one completion; None where it abstained."""

DARK = 0.6
"""Correlation from which on its colour is too dark for black text."""
SPREAD = 0.1
"""Least distance from even fusion weights that has the full colour: what is smaller is hardly any structure."""


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
    """Evaluations of a run, by step; the same step again replaces it.

    Args:
        reference: name -> from where the hypervolume was last measured, for the picture of it; not part of the state.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)

    def add(self, found: Evaluation) -> None:
        others = [e for e in self.evaluations if e.step != found.step]
        self.evaluations = sorted([*others, found], key=lambda e: e.step)

    def points(self, names: Sequence[str]) -> list[tuple[float, ...]]:
        return [tuple(e.means[n] for n in names) for e in self.evaluations]

    def hypervolume(self, reference: Mapping[str, float]) -> float:
        """Of the front of all evaluations so far, above the reference."""
        self.reference = dict(reference)
        points = [p for p in self.points(list(reference)) if all(v == v for v in p)]
        return float(hypervolume(points, list(reference.values())))

    def growth(self, names: Sequence[str]) -> str:
        """A title for the hypervolumes: where all are 0, why."""
        if any(e.volume != 0 for e in self.evaluations):
            return "hypervolume of the front so far"
        reasons: dict[str, list[str]] = {}
        for name in names:
            means, zero = [e.means[name] for e in self.evaluations], self.reference.get(name, 0.0)
            if all(math.isnan(mean) for mean in means):
                reasons.setdefault("without values", []).append(name)
            elif not any(mean > zero for mean in means):
                reasons.setdefault(f"at or below the reference of {zero:g}", []).append(name)
        told = "; ".join(f"{', '.join(those)} {reason}" for reason, those in reasons.items())
        return "hypervolume 0: " + (told or "no evaluation is above the reference in every reward")

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": [asdict(e) for e in self.evaluations]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = [Evaluation(**e) for e in state["evaluations"]]


# ------------------------------------------------------------------------------------------------ pictures


def draw_rewards(history: History, names: Sequence[str], path: Path) -> None:
    """The last correlation, for each pair of rewards their means at every evaluation with the front of these, and the
    hypervolume."""
    pairs = list(combinations(range(len(names)), 2))
    figure, (first, *others, growth) = panels(2 + len(pairs))
    _draw_correlation(first, history.evaluations[-1], names)
    points, steps = history.points(names), [e.step for e in history.evaluations]
    for axes, (a, b) in zip(others, pairs, strict=True):
        _draw_pair(axes, [(p[a], p[b]) for p in points], steps)
        axes.set_xlabel(names[a], fontsize=9)
        axes.set_ylabel(names[b], fontsize=9)
    if len(steps) > 1:
        others[0].legend(fontsize=8, framealpha=0.7)
    volumes = [e.volume for e in history.evaluations]
    growth.plot(steps, volumes, color="0.8", linewidth=1, zorder=0)
    dots = growth.scatter(steps, volumes, c=steps, cmap="viridis", s=24, clip_on=False)
    plain_axes(growth, steps, [0.0, *volumes])
    growth.set_ylim(bottom=0.0)
    growth.xaxis.set_major_locator(whole_ticks())
    growth.set_title("\n".join(wrap(history.growth(names), 44)), fontsize=9)
    growth.set_xlabel("step", fontsize=9)
    if len(steps) > 1:
        colour_bar(figure, dots, [*others, growth], "step", whole_ticks())
    figure.savefig(path, dpi=120)


def _draw_correlation(axes: Axes, last: Evaluation, names: Sequence[str]) -> None:
    # Square cells would move the panel after its labels have been given their room.
    axes.imshow(np.array(last.correlation, dtype=float), cmap=diverging(), vmin=-1, vmax=1, aspect="auto")
    for a, row in enumerate(last.correlation):
        for b, value in enumerate(row):
            text = f"{value:.2f}" if value == value else _unknown(last, names, a, b)
            colour = "white" if abs(value) > DARK else "black"
            axes.text(b, a, text, ha="center", va="center", fontsize=8 if value == value else 6, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title(f"correlation of rewards, step {last.step}", fontsize=9)


def _unknown(last: Evaluation, names: Sequence[str], a: int, b: int) -> str:
    """Why two rewards have no correlation."""
    if any(math.isnan(last.means[names[k]]) for k in (a, b)):
        return "no values"
    return "constant" if any(math.isnan(last.correlation[k][k]) for k in (a, b)) else "too few"


def _draw_pair(axes: Axes, points: Sequence[tuple[float, float]], steps: Sequence[int]) -> None:
    """The way of two means. Points that a later one covers show as a ring around it: the earlier, the larger."""
    x, y = zip(*points, strict=True)
    if len(points) > 1:
        axes.plot(x, y, color="0.8", linewidth=1, zorder=0)
        best = sorted({p for p, kept in zip(points, on_front(points), strict=True) if kept})
        ring: dict[str, Any] = {"marker": "o", "markersize": 12, "markerfacecolor": "none"}
        axes.plot([p[0] for p in best], [p[1] for p in best], "k--", linewidth=0.8, label="front", zorder=1, **ring)
    axes.scatter(x, y, c=steps, cmap="viridis", s=np.linspace(60, 16, len(points)), zorder=2)
    plain_axes(axes, x, y)


def draw_fusion(history: History, names: Sequence[str], width: int, path: Path) -> None:
    """For each head its mean fusion weight: places in the completion upwards, evaluations to the right."""
    with_profile = [e for e in history.evaluations if e.profile]
    values = np.array([e.profile for e in with_profile], dtype=float)  # [E, bins, K]
    figure, panel = panels(len(names))
    even, known = 1 / len(names), values[np.isfinite(values)]
    spread = max(SPREAD, float(np.abs(known - even).max(initial=0.0)))
    steps, places = some([e.step for e in with_profile]), some([width * b for b in range(values.shape[1])])
    for k, (axes, name) in enumerate(zip(panel, names, strict=True)):
        colours: dict[str, Any] = {"cmap": diverging(), "vmin": even - spread, "vmax": even + spread}
        image = axes.imshow(values[:, :, k].T, aspect="auto", origin="lower", **colours)
        axes.set_title(f"fusion weight of {name}", fontsize=9)
        axes.set_xticks(list(steps), list(steps.values()), fontsize=7)
        axes.set_yticks(list(places), list(places.values()), fontsize=7)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("token of the completion", fontsize=8)
    colour_bar(figure, image, panel, f"weight (even: {even:.2f})")
    figure.savefig(path, dpi=120)
