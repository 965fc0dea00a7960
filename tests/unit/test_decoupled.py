"""The estimator `gdpo`: [G-ADV] and [G-CNT] of ALGORITHMS section 4, C13, C14, TRL's formula, properties, metrics."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from alignment.advantages import ADVANTAGES, FEW_GROUPS, Advantages, RewardTable, estimate
from alignment.reward_metrics import reward_metrics

NAN = float("nan")
Rows = list[list[list[float]]]
"""[group][completion][reward]."""

G_ADV: Rows = [[[1, 1], [1, 0], [0, 1], [0, 0]], [[2.5, 1], [-1, 1], [-3, 1], [0.5, 1]]]
LENGTHS = [4, 2, 3, 1, 5, 2, 2, 4]
EXACT = {"eps": 0.0, "batch_eps": 0.0}


def table(rows: Rows, weights: list[float] | None = None, lengths: list[int] | None = None) -> RewardTable:
    sizes = [len(group) for group in rows]
    rewards = torch.tensor([row for group in rows for row in group], dtype=torch.float64)
    return RewardTable(
        rewards=rewards,
        weights=torch.tensor(weights or [1.0] * rewards.shape[1]),
        group_of=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes)),
        groups=len(rows),
        lengths=None if lengths is None else torch.tensor(lengths),
    )


def gdpo(rows: Rows, weights: list[float] | None = None, **options: Any) -> Advantages:
    lengths = (LENGTHS * 5)[: sum(len(group) for group in rows)]
    return estimate(ADVANTAGES.get("gdpo", options), table(rows, weights, lengths))


def values(rows: Rows, weights: list[float] | None = None, **options: Any) -> list[float]:
    return gdpo(rows, weights, **options).values.tolist()


def summed(rows: Rows, weights: list[float] | None = None, **options: Any) -> list[float]:
    """Before normalisation over the batch."""
    parts = gdpo(rows, weights, **options).parts
    assert parts is not None
    return parts.summed.tolist()


# ---------------------------------------------------------------------- golden values

GOLDEN: list[tuple[list[float], dict[str, Any], list[float]]] = [
    ([1, 1], {}, [1.527324, 0, 0, -1.527324, 1.042063, -0.284199, -1.042063, 0.284199]),
    ([1, 0.5], {}, [1.322664, 0.440888, -0.440888, -1.322664, 1.203236, -0.328155, -1.203236, 0.328155]),
    # NeMo-RL
    (
        [1, 1],
        {"eps": 1e-6, "batch_eps": 0.0},
        [1.527525, 0, 0, -1.527525, 1.042065, -0.284200, -1.042065, 0.284200],
    ),
    # verl
    (
        [1, 1],
        {"whiten": "token", "eps": 1e-6},
        [1.337234, -0.412144, -0.412144, -2.161523, 0.781267, -0.737620, -1.605556, -0.086668],
    ),
    ([1, 1], {"whiten": "none"}, [1.731751, 0, 0, -1.731751, 1.181539, -0.322238, -1.181539, 0.322238]),
]


@pytest.mark.parametrize(("weights", "options", "expected"), GOLDEN)
def test_golden_values(weights: list[float], options: dict[str, Any], expected: list[float]) -> None:
    """[G-ADV]."""
    assert values(G_ADV, weights, **options) == pytest.approx(expected, abs=1.01e-6)


def test_golden_parts() -> None:
    """A_k of each reward, S, and its deviation with eps."""
    parts = gdpo(G_ADV).parts
    assert parts is not None
    z = 0.865875
    assert parts.each[:4].flatten().tolist() == pytest.approx([z, z, z, -z, -z, z, -z, -z], abs=1e-6)
    assert parts.each[4:, 0].tolist() == pytest.approx([1.181539, -0.322238, -1.181539, 0.322238], abs=1e-6)
    assert parts.each[4:, 1].tolist() == [0.0] * 4
    assert parts.summed.tolist() == pytest.approx(GOLDEN[4][2], abs=1e-6)
    assert parts.summed[1:3].tolist() == [0.0, 0.0]
    assert float(parts.deviation) == pytest.approx(1.133746 + 1e-4, abs=1e-6)


def test_one_reward_is_group() -> None:
    """K = 1: its z-score alone, [.866025, ...] and [1.5, -.5, ...]; whitened it would be divided by .925820."""
    rows = [[[1.0], [1.0], [0.0], [0.0]], [[1.0], [0.0], [0.0], [0.0]]]
    half = 0.866025
    expected = [half, half, -half, -half, 1.5, -0.5, -0.5, -0.5]
    for whiten in ("sequence", "token", "none"):
        assert values(rows, eps=0.0, whiten=whiten) == pytest.approx(expected, abs=1e-6)
        for weight in (1.0, 3.0, -2.0):
            same = estimate(ADVANTAGES.get("group"), table(rows, [weight])).values.tolist()
            assert values(rows, [weight], whiten=whiten) == same


def test_golden_scale_factors_of_the_brief() -> None:
    """Factors inside the rewards do next to nothing."""
    group = [[0.9, 0.2, 0.3], [0.5, 0.8, 0.4], [0.1, 0.4, 0.2], [0.7, 0.6, 0.5]]
    scaled = [[[r * f for r, f in zip(row, (2.0, 0.8, 1.5), strict=True)] for row in group]]
    assert summed([group]) == pytest.approx([-0.524049, 1.402102, -2.865224, 1.987171], abs=1e-6)
    assert summed(scaled) == pytest.approx([-0.523886, 1.402068, -2.865679, 1.987497], abs=1e-6)


# ---------------------------------------------------------------------- cases


def test_c13_decoupled_keeps_what_summing_collapses() -> None:
    rows: Rows = [[[0, 0], [0, 1]], [[0, 0], [1, 1]], [[0, 0], [0, 0]]]
    expected = [-0.7071, 0.7071, -1.4142, 1.4142, 0, 0]
    assert summed(rows) == pytest.approx(expected, abs=3e-4)
    assert summed(rows)[4:] == values(rows)[4:] == [0, 0]
    together = estimate(ADVANTAGES.get("group"), table(rows)).values.tolist()
    assert together == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071, 0, 0], abs=3e-4)
    for weights in ([1.0, 1.0], [1.0, 0.25]):
        swapped = [[row[::-1] for row in group] for group in rows]
        assert values(swapped, weights[::-1]) == values(rows, weights)


@pytest.mark.parametrize("lengths", [[1, 1, 8], [3, 3, 3], [8, 1, 0]])
def test_c14_lengths_change_nothing(lengths: list[int]) -> None:
    """(5, 2, 2) is [2, -1, -1] / sqrt(3) within its group, so two such rewards of weight sqrt(3) / 2 sum to that."""
    rows: Rows = [[[5, 5], [2, 2], [2, 2]]]
    weights = [math.sqrt(3) / 2] * 2
    found = estimate(ADVANTAGES.get("gdpo", EXACT), table(rows, weights, lengths))
    assert found.parts is not None
    assert found.parts.summed.tolist() == pytest.approx([2, -1, -1])
    assert found.values.tolist() == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)


def test_c14_over_tokens_they_do() -> None:
    """verl's form: the mean over 10 tokens is (2 - 1 - 8) / 10 = -.7, the variance (2.7^2 + 9 * .3^2) / 9 = .9."""
    rows: Rows = [[[5, 5], [2, 2], [2, 2]]]
    options = {"whiten": "token", "eps": 0.0}
    found = estimate(ADVANTAGES.get("gdpo", options), table(rows, [math.sqrt(3) / 2] * 2, [1, 1, 8]))
    assert found.values.tolist() == pytest.approx([2.7 / 0.9**0.5, -0.3 / 0.9**0.5, -0.3 / 0.9**0.5], abs=1e-6)


def test_abstentions() -> None:
    """A reward is missing where it abstained: of (1, -, 0) and (0, 4, 2) the first row has 1/sqrt(2) and -1, the second
    1 alone, the third -1/sqrt(2) and 0. With one value a reward says nothing; a row without any is left out."""
    h = math.sqrt(0.5)
    rows: Rows = [[[1, 0], [NAN, 4], [0, 2]], [[NAN, NAN], [1, 3], [NAN, NAN]], [[2, NAN], [NAN, NAN], [4, NAN]]]
    found = gdpo(rows, **EXACT)
    assert found.parts is not None
    sums = [h - 1, 1, -h, 0, 0, 0, -h, 0, h]
    assert found.parts.summed.tolist() == pytest.approx(sums, abs=1e-6)
    assert found.valid.tolist() == [True, True, True, False, True, False, True, False, True]
    # Six rows are left; their mean is 0.
    std = math.sqrt(((h - 1) ** 2 + 1 + 3 * h**2) / 5)
    assert found.values.tolist() == pytest.approx([s / std for s in sums], abs=1e-6)
    assert found.informative.tolist() == [[True, True], [False, False], [True, False]]
    # Not one is counted where it abstains everywhere.
    nothing = gdpo([[[NAN, NAN]] * 3] * 2)
    assert nothing.values.tolist() == [0.0] * 6
    assert not nothing.valid.any()


@pytest.mark.parametrize("options", [{}, EXACT, {"whiten": "none", "eps": 0.0}, {"whiten": "token", "eps": 0.0}])
@pytest.mark.parametrize("constant", [0.3, 1 / 3, -7.1, 1e6, 0.0])
def test_all_constant_is_exactly_zero(options: dict[str, Any], constant: float) -> None:
    """C16, at any eps; in float32 rewards whose sum is."""
    assert values([[[constant, 2 * constant]] * 7, [[constant, constant]] * 7], **options)[:7] == [0.0] * 7
    single = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1]])
    cancel = RewardTable(rewards=single, weights=torch.ones(2), group_of=torch.zeros(3).long(), groups=1)
    whiten = {name: value for name, value in options.items() if name != "whiten"}
    assert estimate(ADVANTAGES.get("gdpo", whiten), cancel).values.tolist() == [0.0] * 3


def test_a_penalty_is_not_normalised() -> None:
    """It is centred in its group and subtracted from what is otherwise the advantage; rewards that do not differ leave
    it alone; a row without reward and a single row have none."""
    plain = table([[[1, 1], [1, 0], [0, 1], [0, 0]], [[1, 2], [1, 2], [NAN, NAN]], [[1, 1], [NAN, NAN]]])
    penalty = torch.tensor([0.1, 0.2, 0.3, 0.4, 5.0, 7.0, 100.0, 9.0, 1.0])
    with_kl = replace(plain, penalty=penalty)
    before, after = (estimate(ADVANTAGES.get("gdpo"), t).values for t in (plain, with_kl))
    expected = [0.15, 0.05, -0.05, -0.15, 1, -1, 0, 0, 0]
    assert (after - before).tolist() == pytest.approx(expected, abs=1e-6)
    assert with_kl.scores[:2].tolist() == pytest.approx([1.9, 0.8])


def test_fewer_than_two_active_groups_are_told() -> None:
    alive, dead = [[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]
    assert gdpo([alive, dead]).warning == gdpo([dead, dead]).warning == FEW_GROUPS
    assert gdpo([alive, alive]).warning == ""
    assert gdpo([alive, dead], whiten="none").warning == ""
    assert "sample more" in gdpo([[[1.0, 2.0]]]).warning


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="whiten 'tokens' is not known; use sequence, token, none"):
        values(G_ADV, whiten="tokens")
    with pytest.raises(ValueError, match="needs the lengths of the completions"):
        estimate(ADVANTAGES.get("gdpo", {"whiten": "token"}), table(G_ADV))
    with pytest.raises(ValueError, match=r"lengths is \(2,\), it must be \(8,\)"):
        table(G_ADV, lengths=[1, 2])


def test_an_empty_table_and_tokens_without_any() -> None:
    empty = RewardTable(rewards=torch.zeros(0, 2), weights=torch.ones(2), group_of=torch.zeros(0).long(), groups=0)
    assert estimate(ADVANTAGES.get("gdpo"), empty).values.shape == (0,)
    silent = estimate(ADVANTAGES.get("gdpo", {"whiten": "token"}), table(G_ADV, lengths=[0] * 8))
    assert silent.values.tolist() == [0.0] * 8


# ---------------------------------------------------------------------- what it does to advantages


def distinct(rewards: int, size: int, estimator: str, **options: Any) -> int:
    """Advantage vectors that differ, of all groups of `size` completions under 0-1 rewards; order does not count."""
    kinds = list(itertools.product((0.0, 1.0), repeat=rewards))
    rows = [[list(kind) for kind in group] for group in itertools.combinations_with_replacement(kinds, size)]
    found = estimate(ADVANTAGES.get(estimator, options), table(rows)).values.double()
    vectors = found.view(-1, size).sort(dim=1).values
    return len({tuple(round(v, 6) + 0.0 for v in vector) for vector in vectors.tolist()})


def test_golden_counts() -> None:
    """[G-CNT]: two rewards, groups of 2 to 11."""
    sizes = range(2, 12)
    assert [distinct(2, size, "group", eps=0.0) for size in sizes] == [2, 4, 7, 11, 16, 22, 29, 37, 46, 56]
    assert [distinct(2, size, "none") for size in sizes] == [3, 6, 10, 15, 21, 28, 36, 45, 55, 66]
    counts = [distinct(2, size, "gdpo", whiten="none", eps=0.0) for size in sizes]
    assert counts == [3, 6, 14, 26, 38, 59, 81, 109, 145, 186]


def test_a_sum_ranks_the_long_wrong_answer_first() -> None:
    """Right or not, and polite words, which take room, of a short right answer and three wrong ones. The sums are
    2, 6, 5, 0; decoupled, 3/2 - 2/sqrt(26/3) = .820634 is ahead of -1/2 + 3/sqrt(26/3) = .519049."""
    rows: Rows = [[[1, 1], [0, 6], [0, 5], [0, 0]]]
    assert table(rows).scores.tolist() == [2, 6, 5, 0]
    assert summed(rows, eps=0.0) == pytest.approx([0.820634, 0.519049, 0.179366, -1.519049], abs=1e-6)
    by_sum = estimate(ADVANTAGES.get("group"), table(rows)).values.tolist()
    assert by_sum[0] < 0 < by_sum[1] == max(by_sum)


def test_two_opposed_rewards_cancel() -> None:
    """Against section 3.1 of the paper: with two rewards of constant sum S is 0; a third reward or unequal weights keep
    a signal."""
    opposed: Rows = [[[1, 0], [1, 0], [0, 1]]]
    assert summed(opposed, eps=0.0) == [0, 0, 0]
    assert summed(opposed, [1, 0.5], eps=0.0) == pytest.approx([0.288675, 0.288675, -0.577350], abs=1e-6)
    three: Rows = [[[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]]
    assert summed(three, eps=0.0) == pytest.approx([-0.133975, -0.133975, 0.133975, 0.133975], abs=1e-6)
    assert estimate(ADVANTAGES.get("group"), table(three)).values.tolist() == [0, 0, 0, 0]


def test_a_lone_group_loses_its_size() -> None:
    """(0,0), (0,1) and (0,0), (1,1) both end at .707107 when each is all there is."""
    for rows in ([[[0.0, 0.0], [0.0, 1.0]]], [[[0.0, 0.0], [1.0, 1.0]]]):
        assert values(rows, **EXACT) == pytest.approx([-0.707107, 0.707107], abs=1e-6)


def test_few_active_groups_are_amplified() -> None:
    """One of ten: .866025 becomes 3.122499."""
    rows: Rows = [[[1, 0], [1, 0], [0, 0], [0, 0]], *[[[1, 0]] * 4] * 9]
    assert summed(rows, eps=0.0)[0] == pytest.approx(0.866025, abs=1e-6)
    assert values(rows, **EXACT)[0] == pytest.approx(3.122499, abs=1e-6)


def test_eps_matters_for_rewards_of_small_spread() -> None:
    """A deviation of 1e-3 beside eps 1e-4 is off by 1 / 1.1; eps 0 is not."""
    unit = [[1 / math.sqrt(3) * 1e-3 * r] * 2 for r in (1.5, 1.5, -1.5, -1.5)]
    assert summed([unit])[0] == pytest.approx(math.sqrt(3) / 1.1, rel=1e-5)
    assert summed([unit], eps=0.0)[0] == pytest.approx(math.sqrt(3), rel=1e-5)


# ---------------------------------------------------------------------- TRL 1.16, by its formula


def normalize_then_sum(rewards: Tensor, weights: Tensor, size: int) -> Tensor:
    """`multi_objective_aggregation="normalize_then_sum"` for [N, K] rewards with NaN and groups of `size`, in words:
    each reward minus its group's mean over its deviation + 1e-4, both over what is not NaN; weighted sum of what is not
    NaN; then the same over all completions that have a reward; 0 for the others."""

    def scaled(column: list[float]) -> list[float]:
        known = [v for v in column if v == v]
        mean = sum(known) / max(1, len(known))
        if len(known) < 2:
            return [NAN] * len(column)
        std = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1))
        return [(v - mean) / (std + 1e-4) for v in column]

    groups = rewards.split(size)
    parts = [torch.tensor([scaled(column) for column in group.T.tolist()], dtype=torch.float64).T for group in groups]
    sums = (torch.cat(parts) * weights).nansum(dim=1)
    sums[rewards.isnan().all(dim=1)] = NAN
    return torch.tensor(scaled(sums.tolist()), dtype=torch.float64).nan_to_num(0.0)


CELL = st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda x: x / 4))


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    groups, size, rewards = draw(st.integers(1, 4)), draw(st.integers(2, 5)), draw(st.integers(2, 4))
    return [[[draw(CELL) for _ in range(rewards)] for _ in range(size)] for _ in range(groups)]


WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, 2.0, 0.25]), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@example([[[0.0, 0.0], [0.25, -0.5]]], [1.0, 1.0, 1.0, 1.0])  # two rewards that nearly cancel
@given(batches(), WEIGHTS)
def test_equals_trl(rows: Rows, weights: list[float]) -> None:
    weights = weights[: len(rows[0][0])]
    whole = table(rows, weights)
    expected = normalize_then_sum(whole.rewards, whole.weights.double(), len(rows[0]))
    assert estimate(ADVANTAGES.get("gdpo"), whole).values.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


# ---------------------------------------------------------------------- properties


@settings(max_examples=40, deadline=None)
@given(batches(), WEIGHTS, st.randoms(use_true_random=False))
def test_order_changes_nothing_and_groups_sum_to_zero(rows: Rows, weights: list[float], random: Any) -> None:
    weights = weights[: len(rows[0][0])]
    found = torch.tensor(values(rows, weights)).view(len(rows), -1)
    sums = torch.tensor(summed(rows, weights)).view(len(rows), -1)
    assert sums.sum(1).tolist() == pytest.approx([0] * len(rows), abs=1e-5)
    groups = random.sample(range(len(rows)), len(rows))
    orders = [random.sample(range(len(rows[0])), len(rows[0])) for _ in groups]
    names = random.sample(range(len(weights)), len(weights))
    turned = [[[rows[g][i][k] for k in names] for i in order] for g, order in zip(groups, orders, strict=True)]
    again = torch.tensor(values(turned, [weights[k] for k in names])).view(len(rows), -1)
    for g, order, row in zip(groups, orders, again, strict=True):
        assert row.tolist() == pytest.approx(found[g][order].tolist(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(batches(), st.lists(st.tuples(st.sampled_from([0.01, 0.5, 3.0, 100.0]), st.integers(-50, 50)), min_size=4))
def test_unit_and_offset_of_a_reward_and_the_size_of_all_weights_do_not_matter(rows: Rows, maps: Any) -> None:
    weights = [1.0, 0.5, 2.0, 0.25][: len(rows[0][0])]
    before = values(rows, weights, **EXACT)
    mapped = [[[a * r + b for r, (a, b) in zip(row, maps, strict=False)] for row in group] for group in rows]
    assert values(mapped, weights, **EXACT) == pytest.approx(before, abs=1e-5)
    assert values(rows, [100 * w for w in weights], **EXACT) == pytest.approx(before, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from([0.3, 1 / 3, 1e5, 0.0]))
def test_a_constant_reward_is_no_reward(rows: Rows, constant: float) -> None:
    """It abstains where the others do: it would make rows count that otherwise do not."""
    more = [[[*row, NAN if all(r != r for r in row) else constant] for row in group] for group in rows]
    weights = [1.0] * len(rows[0][0])
    assert values(more, [*weights, 3.0]) == values(rows, weights)


# ---------------------------------------------------------------------- metrics


def metrics(rows: Rows, estimator: str = "gdpo", **options: Any) -> dict[str, float]:
    rewards = table(rows)
    found = estimate(ADVANTAGES.get(estimator, options), rewards)
    before = None if found.parts is None else found.parts.summed
    names = [f"r{k + 1}" for k in range(rewards.rewards.shape[1])]
    return {n: float(s / c) for n, (s, c) in reward_metrics(rewards, found.values, names, before=before).items()}


def test_metrics_of_the_golden_batch() -> None:
    found = metrics(G_ADV)
    assert found["adv/batch_std"] == pytest.approx(1.133746, abs=1e-6)
    assert (found["adv/active_groups"], found["adv/distinct"]) == (2, 3.5)
    assert (found["adv/zero_std/r1"], found["adv/zero_std/r2"]) == (0, 0.5)
    assert found["adv/before/abs_max"] == pytest.approx(1.731751, abs=1e-6)
    assert found["adv/before/abs_mean"] == pytest.approx((2 * 1.731751 + 2 * 1.181539 + 2 * 0.322238) / 8, abs=1e-6)
    assert found["adv/after/abs_max"] == pytest.approx(1.527324, abs=1e-6)
    assert found["adv/after/abs_mean"] == pytest.approx((2 * 1.527324 + 2 * 1.042063 + 2 * 0.284199) / 8, abs=1e-6)
    # Squares of A_1 sum to 3 in each group, of A_2 to 3 in the first, of S to 6 and 3; A_1 S to 3 and 3, A_2 S to 3.
    assert found["adv/corr/r1"] == pytest.approx(6 / math.sqrt(6 * 9), abs=1e-4)
    assert found["adv/corr/r2"] == pytest.approx(3 / math.sqrt(3 * 9), abs=1e-4)


def test_over_tokens_active_groups_are_those_with_a_signal() -> None:
    """Every advantage is then something else than 0."""
    rows: Rows = [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    rewards = table(rows, lengths=[1, 3, 2, 2])
    found = estimate(ADVANTAGES.get("gdpo", {"whiten": "token"}), rewards)
    assert (found.values != 0).all()
    assert found.parts is not None
    logged = reward_metrics(rewards, found.values, ["a", "b"], before=found.parts.summed)
    assert float(logged["adv/active_groups"][0]) == 1
    assert found.warning == FEW_GROUPS


def test_correlations_show_the_reward_that_drowns() -> None:
    """Summed, a reward of deviation .6 is lost beside one of 35; apart, both are heard alike."""
    rows: Rows = [[[1, 30], [0, 30], [1, -30], [0, -30]]]
    together, apart = metrics(rows, "group"), metrics(rows)
    assert (together["adv/corr/r1"], together["adv/corr/r2"]) == pytest.approx((1 / 60, 1), abs=1e-3)
    assert (apart["adv/corr/r1"], apart["adv/corr/r2"]) == pytest.approx((0.5**0.5, 0.5**0.5), abs=1e-3)
    assert "adv/before/abs_max" not in together


def test_correlations_are_over_what_a_reward_applies_to() -> None:
    """Of the second reward two completions: it rises, the advantage falls."""
    assert metrics([[[4, 0], [0, 1], [2, NAN], [2, NAN]]], whiten="none", eps=0.0)["adv/corr/r2"] == pytest.approx(-1)
