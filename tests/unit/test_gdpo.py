"""GDPO through the module: golden values, abstentions, conditions, KL, every policy loss, minibatches, logs, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.advantages import FEW_GROUPS
from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, BEFORE, REF_LOGPS, table_of
from alignment.objective import OLD_LOGPS
from alignment.policy_losses import POLICY_LOSSES
from alignment.rewards.protocol import Condition
from alignment.rollout import SAMPLER_LOGPS
from modules import GDPO, GRPO
from tests.rl_toys import fit, here, odd, odd_in_some, online, prompts, scripted
from tests.toys import FixedData, trainer

NAN = float("nan")
G_ADV = [[[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[2.5, 1.0], [-1.0, 1.0], [-3.0, 1.0], [0.5, 1.0]]]
LENGTHS = [[4, 2, 3, 1], [5, 2, 2, 4]]


def given(completions: list[str]) -> list[float]:
    raise AssertionError("the rewards of this module are given")


def short(completion_ids: list[int], completion: str) -> float:
    """1, 1/2, 1/3, ... for 1, 2, 3, ... tokens."""
    return 1 / max(1, len(completion_ids))


def last(completion_ids: list[int], completion: str) -> float | None:
    """The last id; nothing to say of 9."""
    return None if completion_ids[-1] == 9 else float(completion_ids[-1])


TWO = {"odd": here(odd), "short": here(short)}


def gdpo(**settings: Any) -> Any:
    return online(GDPO, **{"rewards": TWO, **settings})


def credited(rewards: list[list[list[float]]], weights: tuple[float, ...] = (1.0, 1.0), **settings: Any) -> GroupBatch:
    """The module's advantages for rewards[group][completion][reward]; lengths are those of [G-ADV]."""
    groups = [
        Group(prompt=[1], completions=[[5] * n for n in lengths[: len(group)]])
        for group, lengths in zip(rewards, LENGTHS, strict=False)
    ]
    values = torch.tensor([row for group in rewards for row in group])
    batch = GroupBatch.from_groups(groups)
    batch = batch.with_rows(**{f"reward/r{k}": values[:, k] for k in range(len(weights))})
    module = gdpo(rewards={f"r{k}": here(given, weight=w) for k, w in enumerate(weights)}, **settings)
    out: GroupBatch = module.credit(batch, table_of(batch, module.suite.names, module.suite.weights))
    return out


# ---------------------------------------------------------------------- advantages


@pytest.mark.parametrize(
    ("weights", "settings", "expected"),
    [
        ((1, 1), {}, [1.527324, 0, 0, -1.527324, 1.042063, -0.284199, -1.042063, 0.284199]),
        ((1, 0.5), {}, [1.322664, 0.440888, -0.440888, -1.322664, 1.203236, -0.328155, -1.203236, 0.328155]),
        (
            (1, 1),
            {"eps": 1e-6, "batch_eps": 0.0},
            [1.527525, 0, 0, -1.527525, 1.042065, -0.284200, -1.042065, 0.284200],
        ),
        (
            (1, 1),
            {"whiten": "token", "eps": 1e-6},
            [1.337234, -0.412144, -0.412144, -2.161523, 0.781267, -0.737620, -1.605556, -0.086668],
        ),
        ((1, 1), {"whiten": "none"}, [1.731751, 0, 0, -1.731751, 1.181539, -0.322238, -1.181539, 0.322238]),
    ],
)
def test_golden_advantages(weights: tuple[float, ...], settings: dict[str, Any], expected: list[float]) -> None:
    """[G-ADV]."""
    batch = credited(G_ADV, weights, **settings)
    assert batch.rows[ADVANTAGE].tolist() == pytest.approx(expected, abs=1.01e-6)
    if weights == (1, 1) and not settings:
        before = [1.731751, 0, 0, -1.731751, 1.181539, -0.322238, -1.181539, 0.322238]
        assert batch.rows[BEFORE].tolist() == pytest.approx(before, abs=1e-6)


def test_golden_one_reward() -> None:
    """K = 1: its group's z-score, not normalised again."""
    batch = credited([[[1.0], [1.0], [0.0], [0.0]], [[1.0], [0.0], [0.0], [0.0]]], (1.0,), eps=0.0)
    half = 0.866025
    assert batch.rows[ADVANTAGE].tolist() == pytest.approx([half, half, -half, -half, 1.5, -0.5, -0.5, -0.5], abs=1e-6)


def test_c13() -> None:
    rows = [[[0.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]]
    batch = credited(rows, whiten="none")
    assert batch.rows[ADVANTAGE].tolist() == pytest.approx([-0.7071, 0.7071, -1.4142, 1.4142], abs=3e-4)


def test_abstentions_and_completions_without_reward() -> None:
    """Only what no reward applies to is not trained on."""
    batch = credited([[[1.0, NAN], [NAN, NAN], [0.0, 3.0]]], whiten="none", eps=0.0)
    h = 0.5**0.5
    assert batch.rows[ADVANTAGE].tolist() == pytest.approx([h, 0, -h])
    assert batch.scored.tolist() == [True] * 4 + [False] * 2 + [True] * 3


def experience(module: Any, folder: Path, said: list[list[int]]) -> GroupBatch:
    """What one rollout that says this for each of two prompts leaves to train on."""
    module, seen = scripted(module, said), []
    collect = module.collect
    module.collect = lambda batch: seen.append(collect(batch)) or seen[0]
    fit(module, folder, FixedData(prompts(2), batch_size=2), max_steps=1)
    out: GroupBatch = seen[0]
    return out


def test_a_condition_acts_before_normalisation(tmp_path: Path) -> None:
    """`short` counts where `last` is at least 7 and abstains where `last` does: of 1, 1/2, 1 and 1/3 it leaves 0, 1/2,
    nothing and 1/3. `last` itself is 6, 8 and 10: -1, 0 and 1."""
    rewards = {"last": here(last), "short": here(short, condition=Condition(reward="last", at_least=7))}
    module = gdpo(rewards=rewards, completions=4, whiten="none", eps=0.0)
    batch = experience(module, tmp_path, [[6], [5, 8], [9], [5, 5, 10]])
    gated = [0, 1 / 2, NAN, 1 / 3]
    assert batch.rows["reward/short"][:4].tolist() == pytest.approx(gated, nan_ok=True)
    mean = (1 / 2 + 1 / 3) / 3
    std = ((mean**2 + (1 / 2 - mean) ** 2 + (1 / 3 - mean) ** 2) / 2) ** 0.5
    expected = [-1 - mean / std, (1 / 2 - mean) / std, 0, 1 + (1 / 3 - mean) / std]
    assert batch.rows[ADVANTAGE].tolist() == pytest.approx(expected * 2, abs=1e-5)


def test_minibatches_are_cut_from_advantages_of_the_whole(tmp_path: Path) -> None:
    said = [[5], [6, 7], [8, 9, 11]]
    settings: dict[str, Any] = {"completions": 3, "whiten": "token"}
    whole = experience(gdpo(**settings), tmp_path, said)
    cut = experience(gdpo(minibatches=2, micro_batch_tokens=8, **settings), tmp_path, said)
    assert torch.equal(whole.rows[ADVANTAGE], cut.rows[ADVANTAGE])
    assert cut.rows[ADVANTAGE].abs().max() > 1


# ---------------------------------------------------------------------- KL


def test_kl_in_the_reward_is_not_one_more_reward() -> None:
    """k1 is .3, .2, -.2 and .1 nats, .1 in the mean: half of what is above that is subtracted from the advantage. By
    itself that is S = (z, -z, 0, 0), z = sqrt(3), over its deviation sqrt(2)."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 6], [7], [8], [5]])])
    old = torch.tensor([-1, -2, -0.5, -1.0, -0.3])
    ref = torch.tensor([-1.5, -1.8, -0.7, -0.8, -0.4])
    batch = batch.with_tokens(**{OLD_LOGPS: old, SAMPLER_LOGPS: old, REF_LOGPS: ref})
    rows = {"reward/odd": [1.0, 0.0, 1.0, 0.0], "reward/short": [100.0, 0.0, 0.0, 100.0]}
    batch = batch.with_rows(**{name: torch.tensor(values) for name, values in rows.items()})
    kl = {"coefficient": 0.5, "estimator": "k1", "place": "reward"}
    module = gdpo(kl=kl, eps=0.0)
    out = module.credit(batch, table_of(batch, module.suite.names, module.suite.weights))
    a = 1.5**0.5
    assert out.rows[ADVANTAGE].tolist() == pytest.approx([a - 0.1, -a - 0.05, 0.15, 0], abs=1e-6)
    assert out.rows[BEFORE].tolist() == pytest.approx([3**0.5, -(3**0.5), 0, 0], abs=1e-6)


def test_kl_is_in_the_loss_by_default(tmp_path: Path) -> None:
    module = gdpo(kl={"coefficient": 0.1})
    assert (module.kl.in_loss, module.kl.in_reward, module.skips) == (True, False, False)
    watch, _ = fit(module, tmp_path)
    assert watch.logged[1]["kl"] > 0


# ---------------------------------------------------------------------- losses and updates


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_loss_is_that_of_grpo(loss: str, tmp_path: Path) -> None:
    """The same run, bit for bit, with the advantage named in GRPO."""
    settings = {"rewards": TWO, "loss": loss, "epochs": 2}
    ours, named = (
        fit(online(kind, **settings, **more), tmp_path, max_steps=2)[0]
        for kind, more in ((GDPO, {}), (GRPO, {"advantage": "gdpo"}))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients, named.gradients, strict=True))
    assert ours.updates == named.updates
    assert float(ours.gradients[0].norm()) > 1e-3


def test_one_reward_is_grpo(tmp_path: Path) -> None:
    rewards = {"odd": here(odd, weight=2.0)}
    ours, theirs = (fit(online(kind, rewards=rewards), tmp_path)[0] for kind in (GDPO, GRPO))
    assert ours.updates == theirs.updates
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True))


@pytest.mark.parametrize(
    "settings", [{"whiten": "token", "minibatches": 2}, {"kl": {"coefficient": 0.1, "place": "reward"}, "epochs": 2}]
)
def test_micro_batches_change_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """C1: loss, gradient and every metric."""
    whole, split = (fit(gdpo(micro_batch_tokens=n, **settings), tmp_path, max_steps=1)[0] for n in (None, 30))
    for a, b in zip(whole.gradients, split.gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    for a, b in zip(whole.updates + whole.logged, split.updates + split.logged, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------------- what is told


def test_what_is_logged(tmp_path: Path) -> None:
    """Of completions (odd, short) = (1, 1), (0, 1/2), (1, 1/3) twice: z of odd is (1, -2, 1) / sqrt(3)."""
    watch, _ = fit(
        scripted(gdpo(completions=3, eps=0.0), [[5], [6, 8], [5, 7, 11]]), tmp_path, FixedData(prompts(2), batch_size=2)
    )
    z = [x / 3**0.5 for x in (1, -2, 1)]
    mean = (1 + 1 / 2 + 1 / 3) / 3
    std = (sum((x - mean) ** 2 for x in (1, 1 / 2, 1 / 3)) / 2) ** 0.5
    other = [(x - mean) / std for x in (1, 1 / 2, 1 / 3)]
    sums = [a + b for a, b in zip(z, other, strict=True)]
    row = watch.logged[0]
    batch_std = (2 * sum(s**2 for s in sums) / 5) ** 0.5
    assert row["adv/batch_std"] == pytest.approx(batch_std, abs=1e-5)
    assert row["adv/before/abs_max"] == pytest.approx(max(map(abs, sums)), abs=1e-5)
    assert row["adv/after/abs_max"] == pytest.approx(max(map(abs, sums)) / batch_std, abs=1e-5)
    assert row["adv/before/abs_mean"] == pytest.approx(sum(map(abs, sums)) / 3, abs=1e-5)
    assert row["adv/after/abs_mean"] == pytest.approx(sum(map(abs, sums)) / 3 / batch_std, abs=1e-5)
    assert (row["adv/distinct"], row["adv/active_groups"]) == (3, 2)
    assert (row["adv/zero_std/odd"], row["adv/zero_std/short"], row["frac_reward_zero_std"]) == (0, 0, 0)
    # Both rewards have squares that sum to 2, so they are heard alike.
    overlap = sum(a * b for a, b in zip(z, sums, strict=True)) / (2 * sum(s**2 for s in sums)) ** 0.5
    assert [row["adv/corr/odd"], row["adv/corr/short"]] == pytest.approx([overlap] * 2, abs=1e-5)


def test_a_warning_when_fewer_than_two_groups_are_active(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, whatever follows; not where two groups of a batch have a signal."""
    rewards = {"odd": here(odd_in_some), "same": here(lambda completions: [1.0] * len(completions))}
    for alive, count in (([True, True] * 4, 0), ([False, True, False, False] * 2, 1)):
        caplog.clear()
        watch, _ = fit(gdpo(rewards=rewards, completions=8), tmp_path, FixedData(prompts(8, alive=alive), batch_size=4))
        assert caplog.text.count(FEW_GROUPS) == count
        assert (watch.logged[0]["adv/active_groups"] < 2) == bool(count)
        assert watch.logged[0]["adv/zero_std/same"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whiten": "tokens"}, "whiten is 'tokens'; use sequence, token, none"),
        ({"eps": -1e-4}, "eps is -0.0001 and batch_eps None; they are at least 0"),
        ({"batch_eps": NAN}, "eps is 0.0001 and batch_eps nan; they are at least 0"),
        ({"advantage": "group"}, "advantage cannot be set: GDPO is an advantage; use modules.GRPO"),
        ({"rewards": {}}, "no rewards are given; name at least one"),
        ({"loss": "clp"}, "policy loss 'clp' is not known, did you mean 'clip'"),
    ],
)
def test_mistakes_are_told_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        gdpo(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- checkpoints


def train(module: Any, folder: Path, start: Path | None = None) -> None:
    t = trainer(folder, max_steps=1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(prompts(4)), ckpt_path=start)
    t.save_checkpoint(folder / "checkpoint")


def test_a_checkpoint_holds_what_the_class_takes(tmp_path: Path) -> None:
    module = gdpo(whiten="token", eps=1e-6)
    train(module, tmp_path)
    assert {"whiten", "eps", "batch_eps", "rewards", "completions"} <= set(module.hparams)
    assert not {"advantage", "advantage_args"} & set(module.hparams)
    again = GDPO.load_from_checkpoint(tmp_path / "checkpoint", rewards=TWO)
    assert (again.hparams.whiten, again.hparams.eps) == ("token", 1e-6)
    assert GDPO.load_from_checkpoint(tmp_path / "checkpoint", rewards=TWO, whiten="none").hparams.whiten == "none"
    with pytest.raises(UserError, match="is of a GDPO, not of a GRPO"):
        train(online(GRPO, rewards=TWO), tmp_path, tmp_path / "checkpoint")
