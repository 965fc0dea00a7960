"""benchmarks.multi_reward: rewards and scores by hand, configurations, the collapse counted, a small run of it all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from alignment.dial import grid
from benchmarks.multi_reward import collapse, plan, report, runs, scores, support, triconflict
from benchmarks.multi_reward.methods import METHODS, configuration
from benchmarks.multi_reward.tasks import TASKS
from benchmarks.multi_reward.triconflict import accuracy, efficiency, sentiment
from benchmarks.online.bench import read_lines


def test_rewards_by_hand() -> None:
    asked = "a f b >"
    assert accuracy("b f a", asked, False) == 1
    assert accuracy("b a f", asked, False) == pytest.approx(1 / 3)
    assert accuracy("p1 b f0 f a p2", asked, False) == 1  # polite words and fillers move no symbol
    assert accuracy("b f a b", asked, True) == 0.5
    assert accuracy("", asked, False) == 0
    assert sentiment("p1 a p2", False) == 0.5
    assert sentiment("p1 p1 p2 p2 p1", False) == 1
    assert triconflict.Polite(2)("p1 a", False) == 0.5
    assert triconflict.Polite(2)("p1 a p2 p1", True) == 0.5
    assert triconflict.Scaled("sentiment", 6)("p1 p1 p2 p2", asked, [1] * 12, True) == 3
    assert efficiency("b f a", [1, 2, 3, 4], False) == pytest.approx(0.419060, abs=1e-6)
    assert efficiency("", [], False) == 1
    assert efficiency("a", [1] * 12, True) == pytest.approx(0.286952 / 2, abs=1e-6)


def test_rewards_of_the_support_world_by_hand() -> None:
    row = ("5 years", "warranty")
    assert support.professionalism("It has a warranty of 5 years.", *row) == 1
    assert support.professionalism("5 years.", *row) == 0.75  # right, but a fragment
    assert support.professionalism("Happy to help! It has a warranty of 4 years. Ask me.", *row) == 0.5
    assert support.professionalism("It has a warranty of 5 years", *row) == 0.75  # cut off
    assert support.professionalism("You can have it in red and blue.", *row) == 0.5
    assert support.professionalism("Read the FAQ, please, it is there.", *row) == 0
    assert support.sentiment("Happy to help!") == 3
    assert support.efficiency("", [1] * 8) == support.HIGH["efficiency"]


def test_the_scale_of_a_reward() -> None:
    normalised = TASKS["triconflict"].normalised
    assert normalised("efficiency", 1 / (1 + math.log(3))) == 1
    assert normalised("efficiency", 1 / (1 + math.log(12))) == 0
    assert normalised("efficiency", 0.1) == 0
    assert normalised("accuracy", 0.25) == 0.25


def test_files(tmp_path: Path) -> None:
    triconflict.write_files(tmp_path)
    training, held_out, sft = ([*read_lines(tmp_path / f"{name}.jsonl")] for name in ("rl", "held_out", "sft"))
    assert [sum(row["difficulty"] == name for row in held_out) for name in triconflict.STRATA] == [90, 26, 12]
    unseen = {row["prompt"] for row in held_out}
    assert len(unseen) == 128
    assert not unseen & {row["prompt"] for row in training + sft}
    for row in training:
        assert len(row["prompt"].split()) == triconflict.STRATA[row["difficulty"]] + 1
    long = read_lines(tmp_path / "held_out_long.jsonl")
    assert [sum(row["difficulty"] == name for row in long) for name in triconflict.STRATA] == [12, 26, 90]
    assert len(prompts := {row["prompt"] for row in long}) == 128
    assert not prompts & {row["prompt"] for row in training + sft}
    # every second symbol is right by chance or by the draw: 1/2 + 1/2 * 1/12
    said = [accuracy(row["completion"], row["prompt"], False) for row in sft]
    assert sum(said) / len(said) == pytest.approx(0.5 + 0.5 / 12, abs=0.01)


def test_golden_scores() -> None:
    """G-MET."""
    curve = [0.1, 0.3, 0.5, 0.4, 0.6, 0.2, 0.5, 0.7]
    found = scores.stability(curve)
    assert found["drawdown"] == pytest.approx(0.4)
    assert found["iqr"] == pytest.approx(0.15)
    assert found["cvar"] == pytest.approx(0.4)  # the worst of eight
    assert found["collapsed"] == 0
    assert scores.stability([0.5, 1.0, 0.79])["collapsed"] == 1
    assert scores.iqm([0.2, 0.5, 0.55, 0.6, 0.62, 0.64, 0.7, 0.95]) == pytest.approx(0.6025)
    assert scores.iqm([3.0]) == 3
    assert scores.iqm([1.0, 2.0, 6.0]) == pytest.approx((0.25 * 1 + 2 + 0.25 * 6) / 1.5)
    found = scores.overall((0.8, 0.5, 0.4))
    assert (found["am"], found["gm"], found["min"]) == pytest.approx((5.66667, 5.42884, 4.0), abs=1e-5)
    assert scores.sensitivity([[0.9, 0.5, 0.3], [0.4, 0.8, 0.6]]) == pytest.approx(0.2)
    assert scores.within([1.0, 0.5, 0.9]) == pytest.approx(0.2)
    assert scores.within([0.0, 0.0]) == 0


def test_percentiles_by_hand() -> None:
    """Of 0, 1, ..., 20 the 5th percentile is 1 and the 95th 19."""
    assert scores.percentiles([1, 10, 19, 20, 0], range(21)) == pytest.approx([0, 0.5, 1, 19 / 18, -1 / 18])
    assert scores.percentiles([3.0, 4.0], [3.0, 3.0]) == [0, 0]


def test_runs_needed_by_hand() -> None:
    """One good setting of three is found at the first, second or third draw: 2 on average. Of two good ones of three
    the first draw misses one time in three: 4 / 3."""
    assert scores.runs_needed([10.0, 9.4, 1.0]) == 2
    assert scores.runs_needed([10.0, 9.5, 1.0]) == pytest.approx(4 / 3)
    assert scores.runs_needed([0.0, 0.0]) == 1


def test_classes() -> None:
    assert [scores.stability_class(*pair) for pair in ((0.05, 0), (0.05, 0.1), (0.15, 0.1), (0.16, 0), (0.1, 0.2))] == [
        "high",
        "medium",
        "medium",
        "low",
        "low",
    ]
    assert [scores.sensitivity_class(phi) for phi in (0.05, 0.15, 0.16)] == ["low", "medium", "high"]


def test_chance_alone() -> None:
    assert scores.seed_noise([2.0, 2.0, 2.0], cells=11, per_cell=3) == 0
    assert 0 < scores.seed_noise([1.0, 2.0, 3.0], cells=11, per_cell=3) < 0.5
    assert scores.interval([4.0] * 5) == (4, 4)
    assert scores.paired({0: 1.0, 1: 2.0, 2: 9.0}, {0: 0.5, 1: 1.5}) == (0.5, 0.5, 0.5)


def test_the_collapse_is_counted() -> None:
    """G-CNT."""
    sizes = collapse.SIZES
    assert [collapse.distinct("GRPO", 2, size) for size in sizes] == [2, 4, 7, 11, 16, 22, 29, 37, 46, 56]
    assert [collapse.distinct("GRPO, no std", 2, size) for size in sizes] == [3, 6, 10, 15, 21, 28, 36, 45, 55, 66]
    assert [collapse.distinct("GDPO", 2, size) for size in sizes] == [3, 6, 14, 26, 38, 59, 81, 109, 145, 186]


def test_configurations() -> None:
    base = yaml.safe_load((Path(runs.__file__).parent / "triconflict.yaml").read_text())
    for method in METHODS.values():
        config = configuration(base, method, {"model": {"init_args": {"optim": {"lr": 0.5}}}})
        assert config["model"]["class_path"] == f"modules.{method.module}"
        assert config["model"]["init_args"]["optim"]["lr"] == 0.5
        assert config["model"]["init_args"]["optim"]["clip_norm"] == 1
        assert set(config["model"]["init_args"]["rewards"]) == set(TASKS["triconflict"].rewards)
    assert base["model"]["init_args"]["optim"]["lr"] == 1e-3


@pytest.mark.parametrize("task", ["triconflict", "support"])
def test_every_method_gets_as_many_batches(task: str) -> None:
    """max_steps counts optimizer steps: passes over a rollout are the same for all, and no module's default."""
    base = yaml.safe_load(TASKS[task].yaml.read_text())
    for method in METHODS.values():
        settings = configuration(base, method)["model"]["init_args"]
        assert settings["epochs"] == base["model"]["init_args"]["epochs"]
        assert "minibatches" not in settings


@pytest.mark.parametrize("part", ["table", "language"])
def test_every_method_was_evaluated_as_often(part: str) -> None:
    found = json.loads(Path("reports/multi_reward.json").read_text())["parts"][part]
    counts = {len(values) for runs in found.values() for run in runs for values in run["rewards"].values()}
    assert len(counts) == 1


def test_few_seeds_are_not_called_clear() -> None:
    """Three seeds that agree in sign are three seeds."""

    def row(gap: float, seeds: int) -> SimpleNamespace:
        return SimpleNamespace(seeds={seed: seed + gap for seed in range(seeds)})

    for seeds, told in ((3, "the same sign in all 3 seeds"), (5, "clear")):
        (line,) = report.paired_lines({"gdpo": row(1, seeds), "grpo": row(0, seeds)}, "gdpo", ["grpo"])[2:]
        assert line == f"| GDPO minus GRPO, summed | +1.00 | +1.00 to +1.00 | {told} |"


def test_every_run_has_a_name_of_its_own() -> None:
    jobs = [*plan.table_jobs(range(10)), *plan.grid_jobs(range(3)), *plan.study_jobs(range(5))]
    jobs += [*plan.front_jobs(range(2)), *plan.dial_jobs(range(10)), *plan.language_jobs(), *plan.language_dial_jobs()]
    by_name = {job.name: job for job in jobs}
    assert len(by_name) == len(jobs)
    varied = {job.name: job for job in plan.variant_jobs([0])}
    assert len(varied) == 48
    shared = set(varied) & set(by_name)  # runs that the table and the sensitivity have already
    assert shared == {f"{method}{cell}-0" for method in plan.VARIED for cell in ("", "-cell4")}
    assert all(varied[name] == by_name[name] for name in shared)
    assert len(plan.CELLS) == 10
    assert plan.share(range(10), 3) == [0, 1, 2]
    assert plan.share(range(2), 5) == [0]


def numbers(seed: int, values: list[tuple[float, float, float]]) -> dict[str, object]:
    columns = zip(*values, strict=True)
    rewards = {name: list(column) for name, column in zip(TASKS["triconflict"].rewards, columns, strict=True)}
    return {"seed": seed, "rewards": rewards, "cpu_seconds": 2.0, "seconds": 2.0, "curves": {}}


def test_a_row_by_hand() -> None:
    high = triconflict.HIGH["efficiency"]
    run = numbers(0, [(0.0, 0.0, 0.0), (0.5, 0.5, high), (1.0, 1.0, high), (0.5, 0.25, high)])
    assert report.result(run) == pytest.approx([0.75, 0.625, 1.0])
    assert report.score(run) == pytest.approx(10 * (0.75 * 0.625) ** (1 / 3))
    row = report.Row([run], {"cell": [numbers(0, [(1.0, 1.0, high)] * 2)]})
    # the curve is 0, .25^(1/3), 1, .125^(1/3) = .5
    assert row.steady["drawdown"] == pytest.approx(0.5)
    assert row.drawdown == pytest.approx((0.5, 0.5, 0.5))
    assert row.steady["sd"] == pytest.approx(0.125**0.5)  # of 1 and .5
    assert (row.ends, report.Row([run, numbers(1, [(1.0, 1.0, high)] * 2)], None).ends) == pytest.approx((0, 0.25))
    assert row.stability == "low"
    plain = 10 * (0.75 * 0.625) ** (1 / 3)
    assert row.phi == pytest.approx((10 - (10 + plain) / 2) / 10)


def test_variants_by_hand() -> None:
    """Scores of the first method (9, 1; 3, 7), of the second 5 everywhere. Percentiles of the first variant's
    1, 5, 5, 9 are 1.6 and 8.4, of the second's 3, 5, 5, 7 are 3.3 and 6.7: the first method has 1.0882, -.0882;
    -.0882, 1.0882."""
    high = triconflict.HIGH["efficiency"]

    def runs(value: float) -> list[dict[str, object]]:
        return [numbers(0, [((value / 10) ** 3, 1.0, high)] * 2)]

    def form(table: list[list[float]]) -> dict[str, object]:
        return {v: dict(zip("ab", map(runs, row), strict=True)) for v, row in zip("xy", table, strict=True)}

    parts = {"variants": {"gdpo": form([[9, 1], [3, 7]]), "grpo": form([[5, 5], [5, 5]])}}
    first, second = report.variants_table(parts)[2:]
    # tuned for each (9 + 7) / 2, one for all (9 + 3) / 2; phi 1.0882 - 1/2
    assert first == "| GDPO | 8.00 | 6.00 | high (0.588) | 1.5 |"
    assert second == "| GRPO, summed | 5.00 | 5.00 | low (0.000) | 1.0 |"
    assert report.variant_scores(parts)[2:] == [
        "| x; a | 9.00 | 5.00 |",
        "| x; b | 1.00 | 5.00 |",
        "| y; a | 3.00 | 5.00 |",
        "| y; b | 7.00 | 5.00 |",
    ]


def test_the_readme_shows_what_was_measured() -> None:
    kept = Path("reports/multi_reward.json")
    inner = Path("README.md").read_text().split("<!-- multi_reward -->\n")[1].split("\n<!-- end -->")[0]
    assert inner == report.readme_table(json.loads(kept.read_text())["parts"])


@pytest.mark.parametrize("method", ["grpo", "decoupled", "soups"])
def test_a_short_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches from random weights, by the ordinary command line; one reward six times as large."""
    task = tmp_path / "triconflict-task"
    task.mkdir()
    triconflict.write_files(task)
    triconflict.write_model(task / "base")
    monkeypatch.setitem(TASKS, "triconflict", replace(TASKS["triconflict"], stride=2))
    short = {
        **plan.CELLS["sentiment reward x 6"],
        "trainer": {"max_steps": 4, "val_check_interval": 1},
    }
    (tmp_path / "numbers").mkdir()
    job = runs.Job(name="short", method=method, seed=0, changes=short, dial=method == "decoupled")
    name = runs._Make(tmp_path)(job)
    found = json.loads((tmp_path / "numbers" / f"{name}.json").read_text())
    assert {len(values) for values in found["rewards"].values()} == {2}
    if method != "soups":
        files = tmp_path.rglob("metrics.jsonl")
        logged = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        raw = [line["val/rewards/sentiment/mean"] for line in logged if "val/reward" in line]
        assert found["rewards"]["sentiment"] == pytest.approx([value / 6 for value in raw])
    if method == "decoupled":
        assert [point["weights"] for point in found["training_dial"]] == grid(TASKS["triconflict"].rewards, runs.GRID)
        assert found["dial"] != found["training_dial"]
    if method == "soups":
        assert [point["weights"] for point in found["dial"]] == grid(TASKS["triconflict"].rewards, runs.GRID)
