"""The dial's grid and front by hand, and the callback that turns it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.dial import draw, grid, points_of, summary
from alignment.errors import UserError
from alignment.tracking import TrackingLogger
from callbacks import PreferenceDial
from modules import GRPO, DecoupledPO
from tests.pictures import bars_of, check_readable, drawn, panels_of, texts_of
from tests.rl_toys import fit, here, odd, online, prompts
from tests.toys import FixedData, trainer


def even(completion: str, completion_ids: list[int]) -> float:
    return 1 - odd(completion, completion_ids)


def test_grid_by_hand() -> None:
    assert grid(["a", "b"], 2) == [{"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.5}, {"a": 0.0, "b": 1.0}]
    three = grid(["a", "b", "c"], 4)
    assert len(three) == 15
    assert all(sum(point.values()) == 1 for point in three)
    assert len({tuple(point.values()) for point in three}) == 15


def test_points_are_means_over_completions_with_a_reward() -> None:
    rows = [
        [{"rewards": {"a": 1.0, "b": None}}, {"rewards": {"a": 0.0, "b": 2.0}}],
        [{"rewards": {"a": 0.1, "b": 1.0}}],
    ]
    first, second = points_of([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], rows)
    assert (first.rewards, first.completions, first.front) == ({"a": 0.5, "b": 2.0}, 2, True)
    assert (second.rewards, second.front) == ({"a": 0.1, "b": 1.0}, False)


def test_the_front_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    module = online(DecoupledPO, rewards={"odd": here(), "even": here(even)})
    turn = module.turn_dial

    def watched(weights: dict[str, float]) -> None:
        seen.append(weights)
        turn(weights)

    module.turn_dial = watched
    dial = PreferenceDial(steps=2, batches=1)
    logger = TrackingLogger(root=str(tmp_path), tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    fit(module, tmp_path, callbacks=[dial], logger=logger, limit_val_batches=1)
    assert seen == [*grid(["odd", "even"], 2), {"odd": 0.5, "even": 0.5}]
    assert module.dial == (0.5, 0.5)
    picture = Path(capsys.readouterr().out.rsplit(" preferences gave ", 1)[1].splitlines()[0].rpartition(": ")[2])
    assert picture.stat().st_size > 1000
    written: list[dict[str, Any]] = json.loads(picture.with_suffix(".json").read_text())
    assert [point["weights"] for point in written] == grid(["odd", "even"], 2)
    for point in written:
        assert point["completions"] == 4
        assert sum(point["rewards"].values()) == pytest.approx(1.0)
    logger.finalize("success")
    artifacts = {item.path for item in logger.experiment.list_artifacts(logger.run_id)}
    assert {"dial.json", "dial.png"} <= artifacts


def test_a_run_that_is_asked_to_stop_leaves_its_sweep(tmp_path: Path) -> None:
    """At the next point, with the dial where it was and nothing written."""
    seen = []
    module = online(DecoupledPO, rewards={"odd": here(), "even": here(even)})
    turn = module.turn_dial

    def watched(weights: dict[str, float]) -> None:
        seen.append(weights)
        module.trainer._signal_connector.received_sigterm = True
        turn(weights)

    module.turn_dial = watched
    with pytest.warns(UserWarning, match="PreferenceDial leaves its sweep"):
        fit(module, tmp_path, callbacks=[PreferenceDial(steps=2, batches=1)], limit_val_batches=1)
    assert seen == [{"odd": 1.0, "even": 0.0}, {"odd": 0.5, "even": 0.5}]
    assert module.dial == (0.5, 0.5)
    assert not list(tmp_path.rglob("dial.json"))


def said(*means: tuple[float | None, ...]) -> list[Any]:
    """Points of a grid of as many preferences between a and b, one completion each."""
    settings = grid(["a", "b"], len(means) - 1)
    return points_of(settings, [[{"rewards": dict(zip("ab", values, strict=True))}] for values in means])


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ([(0.5, 0.5)] * 3, "all 3 preferences gave the same rewards"),
        ([(None, 0.5)] * 3, "all 3 preferences gave the same rewards"),
        ([(1, 0), (1, 0), (0, 1)], "3 preferences gave 2 different points, 2 of them on the front"),
        ([(1, 0), (0, 0), (0, 1)], "3 preferences gave 3 different points, 2 of them on the front"),
    ],
)
def test_what_it_says(means: list[Any], expected: str) -> None:
    assert summary(said(*means)) == expected


def test_equal_points_are_drawn_once() -> None:
    """Preferences (1, 0), (2/3, 1/3) gave one point, whose colour is that of their mean, 5/6."""
    figure = drawn(lambda path: draw(said((1, 0), (1, 0), (0.5, 0.5), (0, 1)), path))
    (axes,) = panels_of(figure)
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    assert dots.get_array().tolist() == pytest.approx([5 / 6, 1 / 3, 0])
    assert texts_of(axes) == ["2x"]
    assert "4 preferences gave 3 different points, 3 of them on the front" in figure.get_suptitle().replace("\n", " ")
    sizes = dots.get_sizes().tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert dots.get_alpha() < 1


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_the_picture_is_readable(names: str) -> None:
    settings = grid(list(names), 4)
    rows = [[{"rewards": {name: share**0.5 for name, share in point.items()}}] for point in settings]
    figure = drawn(lambda path: draw(points_of(settings, rows), path))
    check_readable(figure)
    assert len(panels_of(figure)) == len(names) * (len(names) - 1) // 2
    assert len(bars_of(figure)) == 1


def test_heads_that_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the start the policy is the same at every point of the dial."""
    module = online(DecoupledPO, rewards={"odd": here(), "even": here(even)})
    run = trainer(tmp_path, callbacks=[PreferenceDial(steps=2, batches=1)])
    run.test(module, datamodule=FixedData(prompts(4), batch_size=4), verbose=False)
    assert "all 3 preferences gave the same rewards: " in capsys.readouterr().out
    assert len(json.loads(next(tmp_path.rglob("test_dial.json")).read_text())) == 3


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps is 0"):
        PreferenceDial(steps=0)
    with pytest.raises(UserError, match="needs a policy with heads"):
        fit(online(GRPO), tmp_path, callbacks=[PreferenceDial()])
