"""Pictures of several rewards: their numbers by hand, runs of DecoupledPO and GRPO, resume, what cannot be drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO, load_checkpoint_folder, resolve
from alignment.errors import UserError
from alignment.fusion_profile import FusionProfile
from alignment.reward_history import History, evaluation
from callbacks import Checkpoint, RewardFigures
from modules import GRPO, DecoupledPO
from tests.callback_toys import Leave
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
