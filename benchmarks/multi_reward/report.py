"""From numbers to tables and pictures: `reports/multi_reward.md`, the table in the README, `docs/images`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alignment.dial import grid
from alignment.pareto import expected_utility, hypervolume, on_front
from benchmarks.multi_reward import scores
from benchmarks.multi_reward.methods import METHODS
from benchmarks.multi_reward.runs import GRID
from benchmarks.multi_reward.tasks import TASKS, Task
from benchmarks.online.bench import table

TITLE = "# Several rewards at once\n"

TRICONFLICT = TASKS["triconflict"]
REWARDS = TRICONFLICT.rewards

Numbers = Mapping[str, Any]
"""Of one run: `rewards`: name -> mean at every evaluation; `seed`; `seconds`."""


def task_of(numbers: Numbers) -> Task:
    """The task whose rewards these are."""
    return next(task for task in TASKS.values() if set(task.rewards) == set(numbers["rewards"]))


def shares(numbers: Numbers) -> list[list[float]]:
    """At every evaluation, each reward on the scale from 0 to 1."""
    task = task_of(numbers)
    columns = [[task.normalised(name, value) for value in numbers["rewards"][name]] for name in task.rewards]
    return [list(row) for row in zip(*columns, strict=True)]


def result(numbers: Numbers) -> list[float]:
    """n_k of a run."""
    return [statistics.mean(column) for column in zip(*scores.last_half(shares(numbers)), strict=True)]


def score(numbers: Numbers) -> float:
    return scores.overall(result(numbers))["gm"]


def curve(numbers: Numbers) -> list[float]:
    return [scores.overall(row)["gm"] / 10 for row in shares(numbers)]


class Row:
    """What the seeds of one method say together."""

    def __init__(self, runs: Sequence[Numbers], cells: Mapping[str, Sequence[Numbers]] | None) -> None:
        self.seeds = {int(run["seed"]): score(run) for run in runs}
        values = list(self.seeds.values())
        self.gm, self.interval = scores.iqm(values), scores.interval(values)
        self.noise = statistics.stdev(values) if len(values) > 1 else 0.0
        each = [scores.overall(result(run)) for run in runs]
        self.am, self.least = (scores.iqm([e[kind] for e in each]) for kind in ("am", "min"))
        self.am_interval, self.least_interval = (scores.interval([e[kind] for e in each]) for kind in ("am", "min"))
        self.shares = [statistics.mean(column) for column in zip(*map(result, runs), strict=True)]
        steady = [scores.stability(curve(run)) for run in runs]
        self.steady = {kind: statistics.mean(s[kind] for s in steady) for kind in steady[0]}
        self.drawdown = scores.mean([s["drawdown"] for s in steady])
        high, low = np.percentile([curve(run)[-1] for run in runs], [75, 25])
        self.ends = float(high - low)
        self.stability = scores.stability_class(self.steady["drawdown"], self.steady["collapsed"])
        self.phi = None
        if cells:
            some = {int(run["seed"]) for run in next(iter(cells.values()))}
            plain = statistics.mean(value for seed, value in self.seeds.items() if seed in some)
            self.phi = scores.within([plain, *(statistics.mean(map(score, found)) for found in cells.values())])

    @property
    def sensitivity(self) -> str:
        return "" if self.phi is None else f"{scores.sensitivity_class(self.phi)} ({self.phi:.3f})"


def rows_of(numbers: Mapping[str, Any], part: str = "table") -> dict[str, Row]:
    """Method -> its row, from a part of the numbers, and from the part `sensitivity` for the table."""
    cells = numbers.get("sensitivity", {}) if part == "table" else {}
    return {method: Row(runs, cells.get(method)) for method, runs in numbers[part].items()}


# ------------------------------------------------------------------------------------------------- tables

ENOUGH = 5
"""Seeds from which on an interval says something."""
HEAD = ["method", "overall (geometric)", "95 %", "arithmetic", "least"]


def main_table(rows: Mapping[str, Row], ablations: bool, rewards: Sequence[str] = REWARDS) -> list[str]:
    """Best first."""
    chosen = {m: row for m, row in rows.items() if METHODS[m].ablation == ablations}
    lines = []
    for method, row in sorted(chosen.items(), key=lambda item: -item[1].gm):
        low, high = row.interval
        lines.append(
            [
                METHODS[method].title,
                f"{row.gm:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{row.am:.2f} ({row.am_interval[0]:.2f} to {row.am_interval[1]:.2f})",
                f"{row.least:.2f} ({row.least_interval[0]:.2f} to {row.least_interval[1]:.2f})",
                *(f"{value:.2f}" for value in row.shares),
                f"{row.stability} ({row.steady['drawdown']:.2f})",
                row.sensitivity,
            ]
        )
    return table([*HEAD, *rewards, "stability", "sensitivity"], lines)


def readme_table(numbers: Mapping[str, Any]) -> str:
    """The short one."""
    rows = rows_of(numbers)
    chosen = sorted(((m, row) for m, row in rows.items() if not METHODS[m].ablation), key=lambda item: -item[1].gm)
    lines = [
        [
            METHODS[method].title,
            f"{row.gm:.2f} ({row.interval[0]:.2f} to {row.interval[1]:.2f})",
            f"{row.am:.2f}",
            row.stability,
            row.sensitivity,
        ]
        for method, row in chosen
    ]
    return "\n".join(table(["method", "overall, geometric", "arithmetic", "stability", "sensitivity"], lines))


def stability_table(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        [
            METHODS[m].title,
            "{:.3f} ({:.3f} to {:.3f})".format(*row.drawdown),
            *(f"{row.steady[kind]:.3f}" for kind in ("iqr", "cvar", "sd")),
            f"{row.steady['collapsed']:.0%}",
            f"{row.ends:.3f}",
            f"{row.noise:.2f}",
        ]
        for m, row in rows.items()
    ]
    within = ["largest drawdown", "IQR of differences", "CVaR 5 % of drawdown", "sd in the last half", "collapsed"]
    return table(["method", *within, "IQR of the ends over seeds", "sd of the score over seeds"], lines)


def paired_lines(rows: Mapping[str, Row], method: str, others: Sequence[str]) -> list[str]:
    """Seed by seed differences of the geometric score. Few seeds decide nothing: what is told of them is their sign."""
    lines = []
    for other in others:
        if other in rows and other != method:
            mean, low, high = scores.paired(rows[method].seeds, rows[other].seeds)
            sign = "within noise"
            if low * high > 0:
                count = len(rows[method].seeds)
                sign = "clear" if count >= ENOUGH else f"the same sign in all {count} seeds"
            pair = f"{METHODS[method].title} minus {METHODS[other].title}"
            lines.append([pair, f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}", sign])
    return table(["geometric score, seed by seed", "mean", "95 %", ""], lines)


def sensitivity_table(numbers: Mapping[str, Any], rows: Mapping[str, Row]) -> list[str]:
    cells = numbers["sensitivity"]
    names = list(next(iter(cells.values())))
    lines = []
    for method, found in cells.items():
        some = {int(run["seed"]) for run in next(iter(found.values()))}
        plain = statistics.mean(value for seed, value in rows[method].seeds.items() if seed in some)
        noise = scores.seed_noise(list(rows[method].seeds.values()), len(names) + 1, len(some))
        each = [plain, *(statistics.mean(map(score, found[name])) for name in names)]
        last = [f"{rows[method].phi:.3f}", f"{noise:.3f}", f"{scores.runs_needed(each):.1f}"]
        lines.append([METHODS[method].title, *(f"{value:.2f}" for value in each), *last])
    return table(["method", "unchanged", *names, "Φ within", "by chance", "runs to within 5 % of its best"], lines)


def _tables(numbers: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Method -> variant of the task -> setting -> geometric score, mean over seeds."""
    return {
        method: {
            variant: {setting: statistics.mean(map(score, runs)) for setting, runs in settings.items()}
            for variant, settings in variants.items()
        }
        for method, variants in numbers["variants"].items()
    }


def variants_table(numbers: Mapping[str, Any]) -> list[str]:
    """What each method gains from being tuned for each variant of the task."""
    found, lines = _tables(numbers), []
    for method, variants in found.items():
        pools = {v: [value for other in found.values() for value in other[v].values()] for v in variants}
        scaled = [scores.percentiles(list(settings.values()), pools[v]) for v, settings in variants.items()]
        phi = scores.sensitivity(scaled)
        each = statistics.mean(max(settings.values()) for settings in variants.values())
        one = max(statistics.mean(column) for column in zip(*(s.values() for s in variants.values()), strict=True))
        runs = statistics.mean(scores.runs_needed(list(settings.values())) for settings in variants.values())
        told = f"{scores.sensitivity_class(phi)} ({phi:.3f})"
        lines.append([METHODS[method].title, f"{each:.2f}", f"{one:.2f}", told, f"{runs:.1f}"])
    head = ["mean over the variants", "tuned for each", "one setting for all", "Φ", "runs to within 5 % of its best"]
    return table(head, lines)


def variant_scores(numbers: Mapping[str, Any]) -> list[str]:
    found = _tables(numbers)
    places = [(v, setting) for v, settings in next(iter(found.values())).items() for setting in settings]
    lines = [[f"{v}; {setting}", *(f"{found[m][v][setting]:.2f}" for m in found)] for v, setting in places]
    return table(["geometric score: task; setting", *(METHODS[m].title for m in found)], lines)


def study_table(numbers: Mapping[str, Any]) -> list[str]:
    plain = {int(run["seed"]): score(run) for run in numbers["table"]["decoupled"]}
    lines = []
    for title, runs in numbers["study"].items():
        values = {int(run["seed"]): score(run) for run in runs}
        mean, low, high = scores.paired(values, plain)
        columns = [statistics.mean(column) for column in zip(*map(result, runs), strict=True)]
        lines.append(
            [
                title,
                f"{statistics.mean(values.values()):.2f}",
                f"{mean:+.2f} ({low:+.2f} to {high:+.2f})",
                *(f"{value:.2f}" for value in columns),
            ]
        )
    return table(["DecoupledPO with", "geometric", "against the default, seed by seed", *REWARDS], lines)


def front_of(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, ...]]:
    task = task_of(points[0])
    return [tuple(task.normalised(name, point["rewards"][name]) for name in task.rewards) for point in points]


def fronts_table(numbers: Mapping[str, Any]) -> list[str]:
    weights = [tuple(w.values()) for w in grid(REWARDS, GRID)]
    lines = []
    for title, sets in numbers["fronts"].items():
        found = [front_of(points) for points in sets["points"]]
        lines.append(
            [
                title,
                str(sets["runs"]),
                f"{statistics.mean(map(hypervolume, found)):.3f}",
                f"{statistics.mean(expected_utility(points, weights) for points in found):.3f}",
                f"{statistics.mean(sum(on_front(points)) for points in found):.1f} of {len(weights)}",
            ]
        )
    return table(["front", "training runs", "hypervolume", "expected utility", "points on it"], lines)


def dial_table(dial: Mapping[str, Any], runs: Mapping[str, Sequence[Numbers]]) -> list[str]:
    """The end of the run: the dial left alone, and set to what is best on training prompts; both on held-out ones.

    `dial`: `points` and `training` of the first seeds. `runs`: of every method.
    """
    chosen = []
    for points, training in zip(dial["points"], dial["training"], strict=True):
        held_out, seen = front_of(points), front_of(training)
        best = max(range(len(seen)), key=lambda i: scores.overall(seen[i])["gm"])
        chosen.append(held_out[best])
    seeds = len(chosen)
    ends = {method: [tuple(shares(run)[-1]) for run in runs[method][:seeds]] for method in ("gdpo", "decoupled")}
    lines = []
    for title, found in (
        ("GDPO", ends["gdpo"]),
        ("DecoupledPO, equal weights", ends["decoupled"]),
        ("DecoupledPO, the dial set", chosen),
    ):
        values = [scores.overall(row)["gm"] for row in found]
        low, high = scores.interval(values)
        columns = [f"{statistics.mean(column):.2f}" for column in zip(*found, strict=True)]
        lines.append([title, f"{scores.iqm(values):.2f}", f"{low:.2f} to {high:.2f}", *columns])
    return table(["at the end of the run", "geometric", "95 %", *task_of(runs["gdpo"][0]).rewards], lines)


# ------------------------------------------------------------------------------------------------- pictures


def draw_curves(numbers: Mapping[str, Any], path: Path) -> None:
    """The geometric score and every reward over the run, mean and range of the middle half of seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.6), layout="constrained")
    panels = figure.subplots(1, 4)
    for color, method in enumerate(m for m in numbers["table"] if not METHODS[m].ablation):
        runs = numbers["table"][method]
        columns = [np.array([shares(run) for run in runs])[:, :, k] for k in range(len(REWARDS))]
        for axis, values in zip(panels, [np.array([curve(run) for run in runs]), *columns], strict=True):
            steps = 10 * (1 + np.arange(values.shape[1]))
            axis.plot(steps, values.mean(0), color=f"C{color}", label=METHODS[method].title, linewidth=1.4)
            low, high = np.percentile(values, [25, 75], axis=0)
            axis.fill_between(steps, low, high, color=f"C{color}", alpha=0.12, linewidth=0)
    for axis, title in zip(panels, ["geometric score / 10", *REWARDS], strict=True):
        axis.set(title=title, xlabel="batch", ylim=(0, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False, fontsize=8)
    _save(figure, path)


def draw_fronts(numbers: Mapping[str, Any], path: Path) -> None:
    """Every pair of rewards: what each set of preferences reaches."""
    from matplotlib.figure import Figure

    pairs = [(0, 1), (0, 2), (1, 2)]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(pairs))
    for axis, (a, b) in zip(panels, pairs, strict=True):
        for color, (title, sets) in enumerate(numbers["fronts"].items()):
            points = [point for found in sets["points"] for point in front_of(found)]
            axis.scatter(
                [p[a] for p in points], [p[b] for p in points], s=14, color=f"C{color}", label=title, alpha=0.8
            )
        axis.set(xlabel=REWARDS[a], ylabel=REWARDS[b], xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False, fontsize=8)
    _save(figure, path)


def draw_mechanism(numbers: Mapping[str, Any], path: Path) -> None:
    """What the summed and the decoupled advantage still see: distinct values, groups without a signal, correlations."""
    from matplotlib.figure import Figure

    names = ["adv/distinct", *(f"adv/corr/{name}" for name in REWARDS), "completions/mean_length"]
    figure = Figure(figsize=(16, 3.2), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for color, method in enumerate(("grpo", "grpo_no_std", "gdpo", "decoupled")):
            runs = [run["curves"][name] for run in numbers["table"][method] if name in run["curves"]]
            if runs:
                steps = [step for step, _ in runs[0]]
                mean = np.mean([[value for _, value in run] for run in runs], axis=0)
                axis.plot(steps, mean, color=f"C{color}", label=METHODS[method].title, linewidth=1.3)
        axis.set(title=name, xlabel="batch")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
