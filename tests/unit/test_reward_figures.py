"""Pictures of several rewards: their numbers by hand, runs of DecoupledPO and GRPO, resume, what cannot be drawn."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO, load_checkpoint_folder, resolve
from alignment.errors import UserError
from alignment.fusion_profile import FusionProfile
from alignment.reward_history import History, draw_fusion, draw_rewards, evaluation
from callbacks import Checkpoint, RewardFigures
from modules import GRPO, DecoupledPO
from tests.callback_toys import Leave
from tests.pictures import bars_of, check_readable, drawn, panels_of, texts_of
from tests.rl_toys import fit, here, odd, online, prompts
from tests.toys import FixedData, trainer


def even(completion: str, completion_ids: list[int]) -> float:
    return 1 - odd(completion, completion_ids)


def test_means_and_correlations_by_hand() -> None:
    rows = [{"a": 1.0, "b": 0.0, "c": 2.0}, {"a": 2.0, "b": None, "c": 2.0}, {"a": 3.0, "b": 4.0, "c": 2.0}]
    found = evaluation(7, rows, ["a", "b", "c"])
    assert found.means == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert found.correlation[0][1] == found.correlation[1][0] == pytest.approx(1.0)  # of the two that have both
    assert math.isnan(found.correlation[0][2])  # c does not vary
    assert math.isnan(evaluation(7, [{"a": None, "b": 1.0}], ["a", "b"]).means["a"])


def test_the_hypervolume_of_all_evaluations() -> None:
    history = History()
    for step, means in ((10, (0.5, 0.5)), (30, (0.25, 1.0)), (20, (1.0, 0.25)), (20, (0.2, 0.2))):
        history.add(evaluation(step, [dict(zip("ab", means, strict=True))], ["a", "b"]))
    assert [e.step for e in history.evaluations] == [10, 20, 30]  # the second 20 replaced the first
    assert history.hypervolume({"a": 0.0, "b": 0.0}) == pytest.approx(0.5 * 0.5 + 0.25 * 0.5)
    assert history.hypervolume({"a": 0.25, "b": 0.0}) == pytest.approx(0.25 * 0.5)
    other = History()
    other.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert [e.step for e in other.evaluations] == [10, 20, 30]
    assert other.points(["a", "b"]) == history.points(["a", "b"])


def test_fusion_weights_by_place() -> None:
    """Completions of 4 and 2 tokens, the first token of the second one not scored; bins of two tokens."""
    groups = [Group(prompt=[1], completions=[[5, 6, 7, 8], [5, 6]], scored=[[True] * 4, [False, True]])]
    micro = GroupBatch.from_groups(groups)
    profile = FusionProfile(["a", "b", "c"], bins=2, longest=4)
    alpha = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    profile.add(micro, [0, 2], alpha)  # head b takes no part
    assert profile.take(torch.device("cpu")) == [[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]
    assert profile.take(torch.device("cpu")) == [[None] * 3] * 2


def test_a_run_of_decoupled_po(tmp_path: Path) -> None:
    module = online(DecoupledPO, rewards={"odd": here(odd), "even": here(even)})
    figures = RewardFigures(bins=4)
    _, trainer = fit(module, tmp_path, callbacks=[figures], max_steps=2, val_check_interval=1, limit_val_batches=1)
    first, second = figures.history.evaluations
    for found in (first, second):
        assert found.means["odd"] + found.means["even"] == pytest.approx(1)
        assert found.correlation[0][1] == pytest.approx(-1)
        known = [row for row in found.profile if row != [None, None]]
        assert known
        for row in known:
            assert sum(row) == pytest.approx(1)
    # two points on one falling line: a box each, less what they share
    (a, b), (c, d) = sorted(figures.history.points(["odd", "even"]))
    assert float(trainer.callback_metrics["val/hypervolume"]) == pytest.approx(a * b + (c - a) * d)
    odds, evens = first.means["odd"], first.means["even"]
    assert [first.volume, second.volume] == pytest.approx([odds * evens, a * b + (c - a) * d])
    assert float(trainer.callback_metrics["val/reward_corr/odd/even"]) == pytest.approx(-1)
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == ["fusion.png", "rewards.png"]


def test_after_the_last_validation_and_in_a_test(tmp_path: Path) -> None:
    """Three updates, a validation after the second: the end of training is a second evaluation. `test` has its own.
    An evaluation stands where Lightning logs its metrics, which counts from 0."""
    module = online(DecoupledPO, rewards={"odd": here(odd), "even": here(even)})
    figures, data = RewardFigures(), FixedData(prompts(12), batch_size=4)
    run = trainer(
        tmp_path,
        callbacks=[figures],
        max_epochs=1,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    run.fit(module, datamodule=data)
    assert [e.step for e in figures.history.evaluations] == [1, 2]
    for found in figures.history.evaluations:
        assert found.means["odd"] + found.means["even"] == pytest.approx(1)
        assert any(row != [None, None] for row in found.profile)
    run.test(module, datamodule=data)
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    means = values["test/rewards/odd/mean"], values["test/rewards/even/mean"]
    assert values["test/hypervolume"] == pytest.approx(means[0] * means[1])
    assert values["test/reward_corr/odd/even"] == pytest.approx(-1)
    assert [e.step for e in figures.history.evaluations] == [1, 2]
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == ["fusion.png", "rewards.png", "test_rewards.png"]


def test_without_a_validation_the_end_is_the_only_evaluation(tmp_path: Path) -> None:
    module = online(GRPO, rewards={"odd": here(odd), "even": here(even)})
    figures = RewardFigures()
    fit(module, tmp_path, callbacks=[figures], max_steps=1, val_check_interval=2, limit_val_batches=1)
    assert [e.step for e in figures.history.evaluations] == [0]
    assert [path.name for path in tmp_path.rglob("*.png")] == ["rewards.png"]


def test_the_last_checkpoint_comes_before_the_last_figure(tmp_path: Path) -> None:
    """What goes wrong while sampling for it costs the figure alone; a resume of that checkpoint never saw it."""
    module, figures = online(GRPO, rewards={"odd": here(odd), "even": here(even)}), RewardFigures()

    def fails(batch: GroupBatch) -> None:
        raise RuntimeError("out of memory")

    module.judge = fails
    data, folder = FixedData(prompts(12), batch_size=4), tmp_path / "checkpoints"
    never: dict[str, Any] = {"val_check_interval": 4, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    run = trainer(
        tmp_path,
        callbacks=[figures, Checkpoint(dirpath=folder)],
        plugins=[SafeCheckpointIO()],
        enable_checkpointing=True,
        max_steps=3,
        **never,
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        run.fit(module, datamodule=data)
    saved = load_checkpoint_folder(resolve("last", folder))
    assert saved["global_step"] == 3
    (state,) = [state for name, state in saved["callbacks"].items() if name.startswith("RewardFigures")]
    assert state == {"evaluations": []}


def test_fusion_weights_of_an_interval_go_through_a_checkpoint(tmp_path: Path) -> None:
    """Saved after the second of three epochs of one update, with a validation after the third: the resumed run's heat
    map has all three."""

    def figures_of(run: L.Trainer) -> list[Any]:
        return [e.profile for c in run.callbacks if isinstance(c, RewardFigures) for e in c.history.evaluations]

    found = []
    for leave, start in ((None, None), (2, None), (None, tmp_path / "a.ckpt")):
        module = online(DecoupledPO, rewards={"odd": here(odd), "even": here(even)})
        extra = [] if leave is None else [Leave(leave, tmp_path / "a.ckpt")]
        run = trainer(
            tmp_path,
            callbacks=[RewardFigures(bins=4), *extra],
            plugins=[SafeCheckpointIO()],
            max_epochs=3,
            check_val_every_n_epoch=3,
            num_sanity_val_steps=0,
        )
        run.fit(module, datamodule=FixedData(prompts(4), batch_size=4), ckpt_path=start)
        found.append(figures_of(run))
    assert found[2] == found[0] != found[1]


def test_a_module_without_heads(tmp_path: Path) -> None:
    module = online(GRPO, rewards={"odd": here(odd), "even": here(even)})
    fit(module, tmp_path, callbacks=[RewardFigures()], max_steps=1, val_check_interval=1, limit_val_batches=1)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["rewards.png"]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bins is 0"):
        RewardFigures(bins=0)
    with pytest.raises(UserError, match="at least two rewards; GRPO has 1"):
        fit(online(GRPO), tmp_path, callbacks=[RewardFigures()])
    two = online(GRPO, rewards={"odd": here(odd), "even": here(even)})
    with pytest.raises(UserError, match="reference names warm, no reward; use odd, even"):
        fit(two, tmp_path, callbacks=[RewardFigures(reference={"warm": 0.0})])


# ---------------------------------------------------------------------- what is on the pictures

NAMES = ["right", "warm", "short", "repetition_penalty", "format"]


def history(count: int, evaluations: int, **constant: float) -> tuple[History, list[str]]:
    """Of so many rewards, which vary over completions and evaluations but where they are given."""
    names, found = NAMES[:count], History()
    for step in range(evaluations):
        means = {name: 0.1 + 0.03 * (k + 1) * step for k, name in enumerate(names)}
        rows = [
            {name: mean + 0.2 * ((k + 2) * n % 5) for k, (name, mean) in enumerate(means.items())} | constant
            for n in range(7)
        ]
        weights = [[1 / count + 0.005 * (-1) ** k for k in range(count)]] * 16
        one = evaluation(31 * step + 30, rows, names, weights)
        found.add(one)
        found.add(replace(one, volume=found.hypervolume(dict.fromkeys(names, 0.0))))
    return found, names


@pytest.mark.parametrize("evaluations", [1, 3, 20])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_pictures_are_readable(count: int, evaluations: int) -> None:
    """Correlation, each pair, hypervolume; one colour bar for all, and none where there is one point."""
    found, names = history(count, evaluations)
    figure = drawn(lambda path: draw_rewards(found, names, path))
    check_readable(figure)
    assert len(panels_of(figure)) == 2 + count * (count - 1) // 2
    assert len(bars_of(figure)) == (evaluations > 1)
    legends = [axes.get_legend() is not None for axes in panels_of(figure)]
    assert legends == [False, evaluations > 1, *[False] * (len(legends) - 2)]
    check_readable(drawn(lambda path: draw_fusion(found, names, 4, path)))


def test_one_evaluation_of_a_reward_that_is_0() -> None:
    """Blank cells say why, the axis at 0 is no magnifying glass, and the title says why there is no volume."""
    found, names = history(3, 1, right=0.0)
    correlation, pair, *_, growth = panels_of(drawn(lambda path: draw_rewards(found, names, path)))
    constant = [text == "constant" for text in texts_of(correlation)]
    assert constant == [True, True, True, True, False, False, True, False, False]
    assert pair.get_xlim() == pytest.approx((-0.5, 0.5))
    assert growth.get_title() == "hypervolume 0: right at or below the\nreference of 0"
    assert growth.get_ylim() == pytest.approx((0.0, 0.5))


def test_why_there_is_no_correlation() -> None:
    rows = [{"a": 1.0, "b": None, "c": 5.0, "d": None}, {"a": 2.0, "b": 1.0, "c": 5.0, "d": None}]
    rows.append({"a": None, "b": 2.0, "c": 5.0, "d": None})
    found, names = History([evaluation(0, rows, ["a", "b", "c", "d"])]), ["a", "b", "c", "d"]
    (correlation, *_) = panels_of(drawn(lambda path: draw_rewards(found, names, path)))
    said = texts_of(correlation)
    assert said[:4] == ["1.00", "too few", "constant", "no values"]  # one completion has both a and b
    assert said[12:] == ["no values"] * 4


def test_numbers_on_dark_colours_are_white() -> None:
    rows = [{"a": float(n), "b": float(n**2), "c": float(n % 2)} for n in range(6)]
    found, names = History([evaluation(0, rows, ["a", "b", "c"])]), ["a", "b", "c"]
    (correlation, *_) = panels_of(drawn(lambda path: draw_rewards(found, names, path)))
    colours = {text.get_text(): text.get_color() for text in correlation.texts}
    assert colours == {"1.00": "white", "0.96": "white", "0.29": "black", "0.28": "black"}


def test_a_front_of_one_point_is_seen() -> None:
    """The last of three is best in everything: a ring around it."""
    rows = [[{"a": float(n), "b": float(n)}] for n in range(3)]
    found = History([evaluation(n, row, ["a", "b"]) for n, row in enumerate(rows)])
    _, pair, _ = panels_of(drawn(lambda path: draw_rewards(found, ["a", "b"], path)))
    (front,) = (line for line in pair.lines if line.get_label() == "front")
    assert front.get_xydata().tolist() == [[2.0, 2.0]]
    assert (front.get_marker(), front.get_markerfacecolor()) == ("o", "none")


@pytest.mark.parametrize(
    ("means", "reference", "title"),
    [
        ([(0.5, 0.5)], {}, "hypervolume of the front so far"),
        ([(0.0, 0.5), (0.5, 0.0)], {}, "hypervolume 0: no evaluation is above the reference in every reward"),
        ([(0.0, 0.5), (-1.0, 0.7)], {}, "hypervolume 0: a at or below the reference of 0"),
        ([(0.5, 0.5)], {"a": 0.5, "b": 0.5}, "hypervolume 0: a, b at or below the reference of 0.5"),
        ([(0.5, None)], {"a": 2.0}, "hypervolume 0: a at or below the reference of 2; b without values"),
    ],
)
def test_why_a_hypervolume_is_0(means: list[tuple[float, float]], reference: dict[str, float], title: str) -> None:
    found = History()
    for step, values in enumerate(means):
        one = evaluation(step, [dict(zip("ab", values, strict=True))], ["a", "b"])
        found.add(one)
        found.add(replace(one, volume=found.hypervolume({"a": 0.0, "b": 0.0} | reference)))
    assert found.growth(["a", "b"]) == title


@pytest.mark.parametrize(("away", "shown"), [(0.005, 0.1), (0.3, 0.3)])
def test_small_differences_of_fusion_weights_stay_pale(away: float, shown: float) -> None:
    found = History([evaluation(0, [{"a": 0.0, "b": 1.0}], ["a", "b"], [[0.5 + away, 0.5 - away]])])
    for axes in panels_of(drawn(lambda path: draw_fusion(found, ["a", "b"], 4, path))):
        assert axes.images[0].get_clim() == pytest.approx((0.5 - shown, 0.5 + shown))
