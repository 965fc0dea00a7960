"""Advantages against [G-ADV] and [G-GAE], cases C11, C12, C16 and C17, and the properties every estimator has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alignment.advantages import ADVANTAGES, RewardTable, estimate, spread
from alignment.batches import Group, GroupBatch
from alignment.gae import gae, token_rewards, whiten
from alignment.reward_metrics import reward_metrics

NAN = float("nan")
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
R1 = [1, 1, 0, 0, 2.5, -1, -3, 0.5]
R2 = [1, 0, 1, 0, 1, 1, 1, 1]


def golden() -> RewardTable:
    return RewardTable(rewards=torch.tensor([R1, R2]).T, weights=torch.ones(2), group_of=GROUPS, groups=2)


def table(*groups: list[float]) -> RewardTable:
    """One reward; one list per group, NaN where it abstained."""
    index = [g for g, values in enumerate(groups) for _ in values]
    return RewardTable.of_scores(torch.tensor([v for g in groups for v in g]), torch.tensor(index), len(groups))


def values(name: str, rewards: RewardTable, **options: object) -> list[float]:
    return estimate(ADVANTAGES.get(name, options), rewards).values.tolist()


# ---------------------------------------------------------------------- golden values

GOLDEN = [
    ("group", {}, [1.224595, 0, 0, -1.224595, 1.181539, -0.322238, -1.181539, 0.322238]),
    ("group", {"eps": 1e-6}, [1.224743, 0, 0, -1.224743, 1.181589, -0.322252, -1.181589, 0.322252]),
    ("none", {}, [1, 0, 0, -1, 2.75, -0.75, -2.75, 0.75]),
    ("batch", {}, [0.617175, 0, 0, -0.617175, 1.697232, -0.462881, -1.697232, 0.462881]),
    ("rloo", {}, [1.333333, 0, 0, -1.333333, 3.666667, -1, -3.666667, 1]),
    # by hand: the centred scores' variance over the batch is (1 + 1 + 2 * 2.75^2 + 2 * 0.75^2) / 7 = 1.614665^2
    ("reinforce_pp", {}, [0.619324, 0, 0, -0.619324, 1.703140, -0.464493, -1.703140, 0.464493]),
]


@pytest.mark.parametrize(("name", "options", "expected"), GOLDEN, ids=lambda x: x if isinstance(x, str) else "")
def test_golden_values(name: str, options: dict[str, float], expected: list[float]) -> None:
    assert values(name, golden(), **options) == pytest.approx(expected, abs=1e-6)
    assert float(spread(golden().scores)) == pytest.approx(1.620185, abs=1e-6)  # what `batch` divides by


def test_the_score_is_the_weighted_sum_of_what_applies() -> None:
    rewards = torch.tensor([[1.0, 4.0], [2.0, NAN], [NAN, NAN]])
    scores = RewardTable(
        rewards=rewards, weights=torch.tensor([1.0, 0.5]), group_of=torch.tensor([0, 0, 0]), groups=1
    ).scores
    assert scores[:2].tolist() == [3.0, 2.0]
    assert scores[2].isnan()


# ---------------------------------------------------------------------- cases


def test_c11_leave_one_out() -> None:
    one_success = table([1, 0, 0, 0])
    assert values("rloo", one_success) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # the group's deviation is 1/2: one success in four stands out by sqrt(4)
    assert values("rloo", one_success, scale="group") == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3], abs=1e-3)
    # that of the advantages is sqrt((1 + 3/9) / 3) = 2/3
    assert values("rloo", one_success, scale="batch") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("size", [4, 64, 1000])
def test_c11_scaled_leave_one_out_stays_within_ten(scale: str, size: int) -> None:
    found = values("rloo", table([1.0] + [0.0] * (size - 1), [0.3] * size), scale=scale)
    assert max(abs(v) for v in found) <= 10
    assert found[0] > 0 > found[1]


def test_c12_abstentions() -> None:
    assert values("none", table([1, NAN, 0])) == [0.5, 0.0, -0.5]
    assert values("rloo", table([1, NAN, 0, 0])) == [1.0, 0.0, -0.5, -0.5]
    for name in ADVANTAGES:
        assert values(name, table([1, NAN, NAN])) == [0.0, 0.0, 0.0]
    found = estimate(ADVANTAGES.get("group"), table([1, NAN, 0], [NAN, NAN], [1, 1]))
    assert found.valid.tolist() == [True, False, True, False, False, True, True]
    assert found.active.tolist() == [True, False, False]
    assert found.informative.tolist() == [[True], [False], [False]]


def test_rows_without_any_reward_leave_the_batch_statistics() -> None:
    with_gap, without = table([1, 0, NAN], [2, 0]), table([1, 0], [2, 0])
    for name in ADVANTAGES:
        found = values(name, with_gap)
        assert found[:2] + found[3:] == values(name, without)
        assert found[2] == 0.0


def test_c14_normalising_over_completions_knows_no_lengths() -> None:
    """Centred scores [2, -1, -1] have deviation sqrt(3), whether the last completion has 1 token or 8: over tokens the
    mean would be -0.7 and every advantage another."""
    per_completion = estimate(ADVANTAGES.get("reinforce_pp"), table([5, 2, 2])).values
    assert per_completion.tolist() == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)
    for lengths in ([1, 1, 1], [1, 1, 8]):
        batch = ragged(*lengths)
        assert batch.mean_tokens(per_completion[batch.row_of()]).tolist() == pytest.approx(per_completion.tolist())


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("size", [2, 3, 7, 64])
@pytest.mark.parametrize("constant", [0.3, 1 / 3, -7.1, 1e-8, 1e6, 0.0])
def test_c16_a_constant_group_gives_exactly_zero(name: str, size: int, constant: float) -> None:
    """Beside a group with a signal, so that statistics of the batch are not 0."""
    found = estimate(ADVANTAGES.get(name), table([constant] * size, [0.0, 1.0]))
    assert found.values[:size].tolist() == [0.0] * size
    assert found.values[size:].tolist() != [0.0, 0.0]
    assert found.active.tolist() == [False, True]


def test_c16_sums_of_rewards_that_differ_in_rounding_only_are_constant() -> None:
    """The float32 numbers 0.1 + 0.2 and 0.3 differ in the ninth digit; a batch with nothing else."""
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1]])
    same = RewardTable(rewards=rewards, weights=torch.ones(2), group_of=torch.zeros(3, dtype=torch.long), groups=1)
    assert rewards.double().sum(1).unique().numel() > 1
    for name in ADVANTAGES:
        found = estimate(ADVANTAGES.get(name), same)
        assert found.values.tolist() == [0.0, 0.0, 0.0]
        assert found.informative.tolist() == [[True, True]]


def test_one_completion_per_group_is_worth_nothing_and_a_warning() -> None:
    found = estimate(ADVANTAGES.get("group"), table([1.0], [0.0], [5.0]))
    assert found.values.tolist() == [0.0, 0.0, 0.0]
    assert "sample more" in found.warning
    assert estimate(ADVANTAGES.get("group"), table([1.0], [0.0, 0.0])).warning == ""


# ---------------------------------------------------------------------- properties

RAGGED = st.lists(
    st.lists(st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda x: x / 4)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(RAGGED, st.sampled_from(sorted(ADVANTAGES)), st.floats(-3, 3), st.randoms(use_true_random=False))
def test_order_and_shift_change_nothing_and_groups_sum_to_zero(groups, name, shift, random) -> None:  # type: ignore[no-untyped-def]
    found = torch.tensor(values(name, table(*groups)))
    turned, sizes = [list(g) for g in groups], [len(g) for g in groups]
    orders = [random.sample(range(n), n) for n in sizes]
    shuffled = table(*[[g[i] + shift for i in order] for g, order in zip(turned, orders, strict=True)])
    for before, after, order in zip(
        found.split(sizes), torch.tensor(values(name, shuffled)).split(sizes), orders, strict=True
    ):
        assert after.tolist() == pytest.approx(before[order].tolist(), abs=1e-5)
        assert float(before.sum()) == pytest.approx(0, abs=1e-4)


def test_a_users_estimator_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_advantages.py").write_text(
        "import torch\n"
        "def best_only(table, *, bonus=1.0):\n"
        '    """The best of each group gets the bonus."""\n'
        "    best = torch.zeros(table.groups).double()\n"
        "    best = best.scatter_reduce(0, table.group_of, table.scores, 'amax', include_self=False)\n"
        "    return bonus * (table.scores == best[table.group_of]).double()\n"
        "def wrong(table):\n"
        "    return torch.zeros(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert values("own_advantages.best_only", table([1, 3, 2], [5, 4]), bonus=2.0) == [0, 2, 0, 2, 0]
    with pytest.raises(ValueError, match=r"returned \(1,\) for 2 completions"):
        values("own_advantages.wrong", table([1, 3]))


# ---------------------------------------------------------------------- tokens


def ragged(*lengths: int, scored: list[list[bool]] | None = None) -> GroupBatch:
    groups = [
        Group(prompt=[1], completions=[[5] * n], scored=None if scored is None else [scored[i]])
        for i, n in enumerate(lengths)
    ]
    return GroupBatch.from_groups(groups)


OLD = torch.tensor([-1, -2, -0.5, -0.7, -1.5])
REF = torch.tensor([-1.1, -1.9, -0.6, -0.9, -1.4])


def golden_rewards() -> tuple[GroupBatch, Tensor]:
    batch = ragged(3, 2)
    return batch, token_rewards(batch, torch.tensor([1.0, -0.5]), penalty=0.05 * (OLD - REF))


def test_golden_token_rewards_and_gae() -> None:
    batch, rewards = golden_rewards()
    assert rewards.tolist() == pytest.approx([-0.005, 0.005, 0.995, -0.01, -0.495], abs=1e-6)
    advantages, returns = gae(batch, rewards, torch.tensor([0.2, 0.1, 0.3, 0.0, -0.1]))
    assert advantages.tolist() == pytest.approx([0.716987, 0.865250, 0.695, -0.485250, -0.395], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.916988, 0.965250, 0.995, -0.485250, -0.495], abs=1e-6)
    whitened = whiten(advantages, batch.scored)
    assert whitened.tolist() == pytest.approx([0.662155, 0.886503, 0.628884, -1.157053, -1.020488], abs=1e-6)


def test_c17_the_score_stands_on_the_last_real_token() -> None:
    assert token_rewards(ragged(3, 5), torch.tensor([1.0, 2.0])).tolist() == [0, 0, 1, 0, 0, 0, 0, 2]
    # an empty completion has no place for it, and a token that does not count is no place either
    batch = ragged(2, 0, 3, scored=[[True, True], [], [True, True, False]])
    assert token_rewards(batch, torch.tensor([1.0, 9.0, 3.0])).tolist() == [0, 1, 0, 3, 0]
    assert token_rewards(ragged(1, 1), torch.tensor([NAN, 2.0])).tolist() == [0, 2]


def test_gae_runs_over_scored_tokens_only() -> None:
    """A token in the middle that is not scored (a tool's output) is skipped, and what stands there does not matter."""
    plain, holed = ragged(3), ragged(5, scored=[[True, False, True, False, True]])
    rewards, state_values = torch.tensor([0.1, 0.2, 1.0]), torch.tensor([0.5, 0.4, 0.3])
    expected = gae(plain, rewards, state_values, gamma=0.9, lam=0.8)
    spread_out = torch.full((2, 5), NAN)
    spread_out[:, [0, 2, 4]] = torch.stack([rewards, state_values])
    for got, want in zip(gae(holed, spread_out[0], spread_out[1], gamma=0.9, lam=0.8), expected, strict=True):
        assert got[[0, 2, 4]].tolist() == want.tolist()
        assert got[[1, 3]].tolist() == [0, 0]
    # by hand: A_3 = 1 - .3, A_2 = .2 + .27 - .4 + .72 * .7, A_1 = .1 + .36 - .5 + .72 A_2
    assert expected[0].tolist() == pytest.approx([0.373280, 0.574, 0.7], abs=1e-6)


def test_gae_of_a_batch_is_that_of_its_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = [4, 0, 1, 7]
    batch = ragged(*lengths)
    rewards, state_values = torch.randn(2, 12, generator=draw)
    together = gae(batch, rewards, state_values)[0].split(lengths)
    for n, one, r, v in zip(lengths, together, rewards.split(lengths), state_values.split(lengths), strict=True):
        assert torch.equal(gae(ragged(n), r, v)[0], one)


def test_whitening_of_nothing_of_one_and_of_equals_is_zero() -> None:
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).tolist() == []
    assert whiten(torch.tensor([3.0, NAN]), torch.tensor([True, False])).tolist() == [0, 0]
    assert whiten(torch.full((7,), 0.3), torch.ones(7, dtype=torch.bool)).tolist() == [0] * 7


# ---------------------------------------------------------------------- metrics


def test_metrics_of_the_golden_batch() -> None:
    rewards = golden()
    found = estimate(ADVANTAGES.get("group"), rewards).values
    metrics = {k: float(s / c) for k, (s, c) in reward_metrics(rewards, found, ["r1", "r2"], ["easy", "hard"]).items()}
    assert metrics["reward"] == pytest.approx((4 + 3) / 8)
    # deviations within the groups: sqrt(2/3) and sqrt((2.75^2 + .75^2 + 2.75^2 + .75^2) / 3)
    assert metrics["reward_std"] == pytest.approx((0.816497 + 2.327373) / 2, abs=1e-6)
    assert metrics["rewards/r2/mean"] == pytest.approx(6 / 8)
    assert metrics["rewards/r2/std"] == pytest.approx(0.462910, abs=1e-6)
    assert (metrics["frac_reward_zero_std"], metrics["adv/zero_std/r1"], metrics["adv/zero_std/r2"]) == (0, 0, 0.5)
    assert (metrics["adv/active_groups"], metrics["adv/distinct"]) == (2, 3.5)
    assert (metrics["strata/easy/reward"], metrics["strata/hard/reward"]) == (1.0, 0.75)
    assert metrics["strata/hard/share"] == 0.5
    assert "reward_length_slope" not in metrics  # nothing is known of lengths
    # within the first group the advantages are (r1 + r2) rescaled, in the second r1 itself
    assert metrics["adv/corr/r1"] > metrics["adv/corr/r2"] > 0


def test_completions_on_their_own_are_not_compared() -> None:
    alone = RewardTable(
        rewards=torch.tensor([[1.0], [0.0]]), weights=torch.ones(1), group_of=torch.tensor([0, 1]), groups=2
    )
    metrics = reward_metrics(alone, torch.tensor([0.5, -0.5]), ["r"], ["easy", "hard"])
    shown = {"reward", "rewards/r/mean", "rewards/r/std", "adv/active_groups", "adv/batch_std"}
    assert set(metrics) == shown | {
        f"strata/{label}/{what}" for label in ("easy", "hard") for what in ("reward", "share")
    }


def test_a_reward_that_abstains_has_no_mean_and_no_deviation() -> None:
    """`b` on all completions, `c` on all but one: one value has a mean, and a deviation needs two."""
    nan = torch.nan
    rewards = RewardTable(
        rewards=torch.tensor([[1.0, nan, nan], [0.0, nan, 4.0], [1.0, nan, nan], [nan, nan, nan]]),
        weights=torch.ones(3),
        group_of=torch.tensor([0, 0, 1, 1]),
        groups=2,
    )
    found = reward_metrics(rewards, torch.tensor([0.5, -0.5, 0.0, 0.0]), ["a", "b", "c"])
    metrics = {name: float(total / count) for name, (total, count) in found.items()}
    kept = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    assert kept == pytest.approx({"rewards/a/mean": 2 / 3, "rewards/a/std": 3**-0.5, "rewards/c/mean": 4.0})
    assert metrics["adv/zero_std/b"] == 1.0
    rewards = replace(rewards, rewards=torch.full((4, 3), nan))
    assert "adv/batch_std" not in reward_metrics(rewards, torch.zeros(4), ["a", "b", "c"])


def test_metrics_of_an_empty_batch_are_absent() -> None:
    empty = RewardTable(rewards=torch.zeros(0, 1), weights=torch.ones(1), group_of=torch.zeros(0).long(), groups=0)
    assert reward_metrics(empty, torch.zeros(0), ["r"]) == {}


def test_the_slope_of_the_score_on_the_length() -> None:
    """Group one: scores -1, 0, 1 about their mean at lengths -2, 0, 2; two: one length; three: one score without a
    reward, so -1/2, 1/2 at -1, 1. Together (2 + 2 + 1/2 + 1/2) / (4 + 4 + 1 + 1)."""
    rewards = RewardTable(
        rewards=torch.tensor([[1.0], [2.0], [3.0], [0.0], [1.0], [5.0], [6.0], [torch.nan]]),
        weights=torch.ones(1),
        group_of=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]),
        groups=3,
        lengths=torch.tensor([2, 4, 6, 3, 3, 7, 9, 50]),
    )
    found = reward_metrics(rewards, torch.zeros(8), ["r"])["reward_length_slope"]
    assert float(found[0] / found[1]) == pytest.approx(0.5)
    same = replace(rewards, lengths=torch.full((8,), 4))
    assert "reward_length_slope" not in reward_metrics(same, torch.zeros(8), ["r"])
    alone = replace(rewards, group_of=torch.arange(8), groups=8)
    assert "reward_length_slope" not in reward_metrics(alone, torch.zeros(8), ["r"])
