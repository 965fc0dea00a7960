"""Policy and value losses against [G-PG], cases C1 to C4 and C8, reductions that micro-batches cannot change."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from alignment.batches import Group, GroupBatch
from alignment.kl import KL_ESTIMATORS, token_kl
from alignment.policy_losses import (
    POLICY_LOSSES,
    PolicyTokens,
    Reduction,
    entropy_bonus,
    entropy_threshold,
    explained_variance,
    form_of,
    high_entropy,
    mask_truncated,
    policy_loss,
    ratio_metrics,
    reduce_tokens,
    token_weights,
    value_loss,
    value_metrics,
)
from alignment.update import Counts

NAN = float("nan")
REDUCTIONS: list[Reduction] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const"]


def ragged(*lengths: int, scored: list[list[bool]] | None = None, weights: list[float] | None = None) -> GroupBatch:
    """One group per completion."""
    groups = [
        Group(
            prompt=[1],
            completions=[[5] * n],
            scored=None if scored is None else [scored[i]],
            weights=None if weights is None else [weights[i]],
        )
        for i, n in enumerate(lengths)
    ]
    return GroupBatch.from_groups(groups)


# ---------------------------------------------------------------------- golden values

BATCH = ragged(3, 2)
OLD = torch.tensor([-1, -2, -0.5, -0.7, -1.5])
NEW = torch.tensor([-0.7, -2.3, -0.5, -1.1, -1.2])
REF = torch.tensor([-1.1, -1.9, -0.6, -0.9, -1.4])
COUNTS = Counts(prompts=2, rows=2, tokens=5)


def golden_tokens(new: Tensor = NEW) -> PolicyTokens:
    return PolicyTokens.of(BATCH, new, OLD, torch.tensor([1.0, -1.0])[BATCH.row_of()])


def golden_loss(name: str, reduction: Reduction | None = None, **options: float) -> float:
    values = POLICY_LOSSES.get(name, options)(golden_tokens())
    return float(reduce_tokens(values, BATCH, COUNTS, reduction or form_of(name).reduction, max_length=4))


def test_golden_ratios_and_token_losses() -> None:
    tokens = golden_tokens()
    assert tokens.ratio().tolist() == pytest.approx([1.349859, 0.740818, 1, 0.670320, 1.349859], abs=1e-6)
    assert tokens.ratio("sequence").tolist() == pytest.approx([1, 1, 1, 0.951229, 0.951229], abs=1e-6)
    losses = POLICY_LOSSES.get("clip")(tokens).tolist()
    assert losses == pytest.approx([-1.2, -0.740818, -1, 0.8, 1.349859], abs=1e-6)
    # minus the gate under advantage 1, the gate under -1
    gates = [-2.346333, -1.742259, -2, 1.578335, 2.250739]
    assert POLICY_LOSSES.get("sapo")(tokens).tolist() == pytest.approx(gates, abs=1e-6)


GOLDEN: list[tuple[str, Reduction | None, dict[str, float], float]] = [
    ("clip", "seq_mean_token_mean", {}, 0.047328),
    ("clip", "token_mean", {}, -0.158192),
    ("clip", "const", {}, -0.098870),
    ("clip", "seq_mean_token_sum", {}, -0.395480),
    ("clip_higher", None, {}, -0.174192),
    ("clip", "token_mean", {"high": 0.28}, -0.174192),
    ("gspo", None, {"low": 0.2, "high": 0.2}, -0.024385),
    ("gspo", None, {}, -0.000150),
    ("cispo", None, {"cap": 1.28}, 0.165306),
    ("cispo", None, {}, 0.158320),
    ("cispo", None, {"floor": 0.8, "cap": 1.2}, 0.172000),
    ("sapo", None, {}, -0.057497),
]


@pytest.mark.parametrize(("name", "reduction", "options", "expected"), GOLDEN)
def test_golden_losses(name: str, reduction: Reduction | None, options: dict[str, float], expected: float) -> None:
    assert golden_loss(name, reduction, **options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("reduction", "k3", "expected"),
    [
        ("seq_mean_token_mean", "k3", 0.048843),
        ("token_mean", "k3", -0.156535),
        ("const", "k3", -0.097834),
        ("token_mean", "k3_is", -0.156533),
    ],
)
def test_golden_losses_with_kl(reduction: Reduction, k3: str, expected: float) -> None:
    kl = token_kl(KL_ESTIMATORS.get(k3), NEW, REF, BATCH.scored, OLD)
    values = POLICY_LOSSES.get("clip")(golden_tokens()) + 0.04 * kl
    assert float(reduce_tokens(values, BATCH, COUNTS, reduction, max_length=4)) == pytest.approx(expected, abs=1e-6)
    if k3 == "k3":
        assert kl.tolist() == pytest.approx([0.070320, 0.091825, 0.004837, 0.021403, 0.018731], abs=1e-6)


def test_golden_clip_metrics() -> None:
    weights, _ = token_weights(BATCH, COUNTS)
    metrics = {k: float(s / c) for k, (s, c) in ratio_metrics(golden_tokens(), weights).items()}
    assert metrics["clip_ratio/low_mean"] == pytest.approx(0.2)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(0.2)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(0.4)
    # log ratios .3, -.3, 0, -.4, .3
    assert metrics["policy/approxkl_avg"] == pytest.approx((3 * 0.09 + 0.16) / 10, abs=1e-6)
    assert metrics["policy/kl_old"] == pytest.approx(0.1 / 5, abs=1e-6)


def of_ratios(ratios: list[float], advantage: float) -> PolicyTokens:
    batch = ragged(len(ratios))
    old = torch.full((len(ratios),), -2.0)
    return PolicyTokens.of(batch, old + torch.tensor(ratios).log(), old, torch.full_like(old, advantage))


def test_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    tokens = of_ratios([0.5, 1, 2, 5], -1.0)
    assert POLICY_LOSSES.get("clip")(tokens).tolist() == pytest.approx([0.8, 1, 2, 5])
    assert POLICY_LOSSES.get("dual_clip")(tokens).tolist() == pytest.approx([0.8, 1, 2, 3])
    good = of_ratios([0.5, 1, 2, 5], 1.0)
    assert torch.equal(POLICY_LOSSES.get("dual_clip")(good), POLICY_LOSSES.get("clip")(good))


def test_delta_caps_the_ratio_itself() -> None:
    assert POLICY_LOSSES.get("delta")(of_ratios([0.5, 1, 2, 5], -1.0)).tolist() == pytest.approx([0.8, 1, 2, 4])
    assert POLICY_LOSSES.get("delta")(of_ratios([0.5, 1, 2, 5], 1.0)).tolist() == pytest.approx([-0.5, -1, -1.2, -1.2])


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_gradients_by_finite_differences(name: str) -> None:
    """At ratios off the corners, where the losses have one slope. CISPO stops the ratio's gradient, so its loss is
    differentiated with the weight held fixed."""
    old = OLD.double()

    def loss(new: Tensor) -> Tensor:
        tokens = PolicyTokens.of(BATCH, new, old, torch.tensor([1.0, -1.0]).double()[BATCH.row_of()])
        if name == "cispo":
            fixed = PolicyTokens.of(BATCH, NEW.double(), old, torch.tensor([1.0, -1.0]).double()[BATCH.row_of()])
            return -fixed.ratio() * tokens.advantages * new
        return POLICY_LOSSES.get(name)(tokens)

    new = NEW.double().requires_grad_()
    assert torch.autograd.gradcheck(loss, new)
    if name == "cispo":
        mine = torch.autograd.grad(POLICY_LOSSES.get(name)(golden_tokens(new)).sum(), new)[0]
        assert torch.equal(mine, torch.autograd.grad(loss(new).sum(), new)[0])


def test_cispo_trains_tokens_that_clipping_drops() -> None:
    """A token of ratio e and advantage 1."""
    slopes = {}
    for name in ("clip", "cispo"):
        new = torch.tensor([-1.0], requires_grad=True)
        tokens = PolicyTokens.of(ragged(1), new, torch.tensor([-2.0]), torch.tensor([1.0]))
        slopes[name] = float(torch.autograd.grad(POLICY_LOSSES.get(name)(tokens).sum(), new)[0])
    assert slopes == {"clip": 0.0, "cispo": pytest.approx(-math.e)}


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_c8_first_pass_after_a_rollout(name: str) -> None:
    """Ratio 1 on every token, nothing clipped; a gradient of minus the advantage for each token nonetheless."""
    new = NEW.clone().requires_grad_()
    tokens = PolicyTokens.of(BATCH, new, NEW, torch.tensor([1.0, -1.0])[BATCH.row_of()])
    assert tokens.ratio().tolist() == [1.0] * 5
    assert tokens.ratio("sequence").tolist() == [1.0] * 5
    weights, _ = token_weights(BATCH, COUNTS)
    metrics = ratio_metrics(tokens, weights, level=form_of(name).level, low=3e-4, high=4e-4)
    assert float(metrics.pop("ratio")[0]) == 5.0
    assert all(float(total) == 0 for total, _ in metrics.values())
    loss = reduce_tokens(POLICY_LOSSES.get(name)(tokens), BATCH, COUNTS, "seq_mean_token_mean")
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.tolist() == pytest.approx([-1 / 6] * 3 + [1 / 4] * 2, abs=1e-6)
    if name in ("clip", "clip_higher", "dual_clip", "delta", "gspo"):
        assert float(loss.detach()) == pytest.approx(0.0)  # minus the mean advantage


@pytest.mark.parametrize("name", ["clip", "gspo", "sapo", "cispo"])
def test_c4_ratios_far_beyond_the_bound_stay_finite(name: str) -> None:
    """The policy gives 100 nats more to a bad token than when it was sampled: the loss pushes it back."""
    logps = nn.Parameter(torch.tensor([-1.0]))
    optimizer = torch.optim.AdamW([logps], lr=1.0, weight_decay=0.0)
    tokens = PolicyTokens.of(ragged(1), logps, torch.tensor([-101.0]), torch.tensor([-1.0]))
    loss = POLICY_LOSSES.get(name)(tokens).sum()
    loss.backward()
    assert loss.isfinite()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()
    optimizer.step()
    assert logps.isfinite().all()
    if name != "sapo":  # its gate is shut there, by design
        assert logps.item() < -1.5


# ---------------------------------------------------------------------- reductions


def random_batch() -> tuple[GroupBatch, Tensor, Tensor, Tensor]:
    """(batch with unscored tokens, an empty and a fully masked completion and weights; old log-probs; changes of the
    log-probs; advantages)."""
    draw = torch.Generator().manual_seed(3)
    lengths = [[4, 1, 7], [0, 3], [5, 2, 2, 6]]
    groups = []
    for sizes in lengths:
        scored = [[bool(torch.rand((), generator=draw) < 0.7) for _ in range(n)] for n in sizes]
        scored[-1] = [False] * sizes[-1] if sizes[-1] == 3 else scored[-1]
        weights = [1.0, 0.5, 2.0, 1.0][: len(sizes)]
        groups.append(Group(prompt=[1, 2], completions=[[5] * n for n in sizes], scored=scored, weights=weights))
    batch = GroupBatch.from_groups(groups)
    tokens = len(batch.completion_ids)
    old = -torch.rand(tokens, generator=draw) - 0.1
    return batch, old, torch.randn(tokens, generator=draw) / 3, torch.randn(batch.num_completions, generator=draw)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_c1_micro_batches_change_neither_loss_nor_gradient(name: str, reduction: Reduction) -> None:
    batch, old, change, advantages = random_batch()
    counts = Counts.of(batch)
    results = []
    for micro_batch_tokens in (None, 9, 1):
        shift = torch.ones((), requires_grad=True)
        parts = batch.with_tokens(old=old, change=change).with_rows(advantage=advantages)
        total = torch.zeros(())
        for micro in parts.split(micro_batch_tokens, keep_groups=False):
            new = micro.tokens["old"] + shift * micro.tokens["change"]
            tokens = PolicyTokens.of(micro, new, micro.tokens["old"], micro.rows["advantage"][micro.row_of()])
            kl = token_kl(KL_ESTIMATORS.get("k3_is"), new, micro.tokens["old"], micro.scored, micro.tokens["old"])
            values = POLICY_LOSSES.get(name)(tokens) + 0.1 * kl
            total = total + reduce_tokens(values, micro, counts, reduction, max_length=8)
        results.append(torch.stack([total.detach(), torch.autograd.grad(total, shift)[0]]))
    for split in results[1:]:
        torch.testing.assert_close(split, results[0], rtol=1e-5, atol=1e-6)
    assert (results[0] != 0).all()


def test_c1_one_token_and_three() -> None:
    batch = ragged(1, 3)
    values = torch.tensor([1.0, 0, 0, 0])
    counts = Counts.of(batch)
    parts = [values[1:], values[:1]]  # the longer group comes first
    shares = [reduce_tokens(v, m, counts) for v, m in zip(parts, batch.split(4), strict=True)]
    assert [float(s) for s in shares] == [0.0, 0.25]


def test_reductions_by_hand() -> None:
    """Completions of 3 and 1 tokens with weights 1 and 2, token losses 1, 2, 3 and 5."""
    batch = ragged(3, 1, weights=[1.0, 2.0])
    values, counts = torch.tensor([1.0, 2, 3, 5]), Counts.of(batch)
    assert (counts.rows, counts.tokens) == (3.0, 5.0)
    expected = {
        "token_mean": (6 + 10) / 5,
        "seq_mean_token_mean": (2 + 10) / 3,
        "seq_mean_token_sum": (6 + 10) / 3,
        "const": (6 + 10) / (3 * 4),
    }
    for reduction in REDUCTIONS:
        assert float(reduce_tokens(values, batch, counts, reduction, max_length=4)) == pytest.approx(
            expected[reduction]
        )
    with pytest.raises(ValueError, match="'const' divides by max_length, in tokens; got None"):
        token_weights(batch, counts, "const")
    with pytest.raises(ValueError, match="'mean' is not known; use token_mean"):
        token_weights(batch, counts, "mean")  # type: ignore[arg-type]


def test_c2_truncated_completions_leave_the_denominator() -> None:
    batch = ragged(2, 2)
    half = mask_truncated(batch, torch.tensor([False, True]))
    ones = torch.ones(4, requires_grad=True)
    for reduction in ("token_mean", "seq_mean_token_mean"):
        assert reduce_tokens(ones, half, Counts.of(half), reduction).item() == 1.0
    none = mask_truncated(batch, torch.tensor([True, True]))
    for reduction in REDUCTIONS:
        loss = reduce_tokens(ones, none, Counts.of(none), reduction, max_length=4)
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, ones)[0].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_c3_a_masked_nan_reaches_neither_loss_nor_gradient(name: str) -> None:
    batch = ragged(2, scored=[[True, False]])
    new = torch.tensor([0.0, NAN], requires_grad=True)
    tokens = PolicyTokens.of(batch, new, torch.tensor([0.0, NAN]), torch.tensor([NAN, NAN]).nan_to_num(1.0))
    loss = reduce_tokens(POLICY_LOSSES.get(name)(tokens), batch, Counts.of(batch), "token_mean")
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.isfinite()
    assert gradient.tolist() == [-1.0, 0.0]


# ---------------------------------------------------------------------- a user's own


def test_a_users_loss_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policy_losses.py").write_text(
        "from alignment.policy_losses import policy_loss\n"
        "def plain(tokens, *, scale=1.0):\n"
        '    """REINFORCE: -A log pi."""\n'
        "    return -scale * tokens.advantages * tokens.logps\n"
        "@policy_loss('whole_completions', level='sequence', reduction='seq_mean_token_sum')\n"
        "def whole(tokens):\n"
        "    return -tokens.ratio('sequence') * tokens.advantages\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert golden_loss("own_policy_losses.plain", scale=2.0) == pytest.approx(2 / 5 * (0.7 + 2.3 + 0.5 - 1.1 - 1.2))
    assert form_of("own_policy_losses.plain").reduction == "token_mean"
    assert form_of("own_policy_losses.whole").level == "sequence"
    assert form_of("whole_completions").reduction == "seq_mean_token_sum"
    with pytest.raises(ValueError, match="a policy loss called 'clip' exists already"):
        policy_loss("clip")(lambda tokens: tokens.logps)


# ---------------------------------------------------------------------- entropy


def test_golden_high_entropy_mask() -> None:
    entropy = torch.tensor([0.1, 0.9, NAN, 0.5, 1.2, 0.3], dtype=torch.float64)
    scored = ~entropy.isnan()
    threshold = entropy_threshold(entropy, scored)
    assert threshold == pytest.approx(0.96)
    assert high_entropy(entropy, scored, threshold).tolist() == [False, False, False, False, True, False]
    assert entropy_threshold(entropy, scored, keep=1.0) == pytest.approx(0.1)
    assert entropy_threshold(entropy, torch.zeros(6, dtype=torch.bool)) == math.inf
    with pytest.raises(ValueError, match="keep is 0"):
        entropy_threshold(entropy, scored, keep=0)


def test_the_entropy_bonus_is_a_token_mean() -> None:
    batch = ragged(3, 1)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    bonus = entropy_bonus(entropy, batch, Counts.of(batch), 0.01)
    assert bonus.item() == pytest.approx(-0.025)
    assert torch.autograd.grad(bonus, entropy)[0].tolist() == pytest.approx([-0.0025] * 4)


# ---------------------------------------------------------------------- values


def test_value_loss_by_hand() -> None:
    """V_old 0, R 1. V = .1 is inside the clip of .2; V = .5 counts as .2; V = 2 is worse than its clipped form."""
    values = torch.tensor([0.1, 0.5, 2.0], requires_grad=True)
    old, returns = torch.zeros(3), torch.ones(3)
    loss = value_loss(values, old, returns)
    assert loss.tolist() == pytest.approx([0.405, 0.32, 0.5])
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == pytest.approx([-0.9, 0.0, 1.0])
    assert value_loss(values, old, returns, clip=None).tolist() == pytest.approx([0.405, 0.125, 0.5])
    metrics = value_metrics(values, old, returns, torch.tensor([True, True, False]), 0.2)
    assert float(metrics["val/clipfrac_avg"][0] / metrics["val/clipfrac_avg"][1]) == 0.5


def test_explained_variance() -> None:
    scored = torch.tensor([True] * 4 + [False])
    returns, values = torch.tensor([1.0, 2, 3, 4, NAN]), torch.tensor([1.0, 2, 3, 5, NAN])
    # errors 0, 0, 0, -1: variance 3/16 against 5/4
    assert explained_variance(values, returns, scored) == pytest.approx(1 - 3 / 20)
    assert explained_variance(returns + 7, returns, scored) == pytest.approx(1.0)  # a constant offset explains as much
    flat = torch.ones(5)
    assert explained_variance(flat, flat, scored) == 1.0
    assert explained_variance(values, flat, scored) == 0.0
    assert math.isnan(explained_variance(values, returns, torch.zeros(5, dtype=torch.bool)))
