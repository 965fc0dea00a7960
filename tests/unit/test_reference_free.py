"""SimPO, ORPO and CPO as modules: [G-DPO]'s log-probs by hand, metrics, no reference anywhere, mistakes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.logprobs import TokenStats
from alignment.update import Counts
from modules import CPO, ORPO, SimPO
from tests.rl_toys import moved
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

# Summed log-probs and lengths of [G-DPO]; means -2, -2.5, -5 and -2, -4.75, -3. The chosen have 45 nats in 16 tokens.
CHOSEN, REJECTED, LENGTHS = (-10.0, -20.0, -15.0), (-12.0, -19.0, -9.0), ((5, 6), (8, 4), (3, 3))
NLL = 45 / 16


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def golden(kind: Any, **settings: Any) -> tuple[float, dict[str, float]]:
    module = kind(policy=TINY, **settings)
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5] * a, [6] * b]) for a, b in LENGTHS])
    sums = [x for pair in zip(CHOSEN, REJECTED, strict=True) for x in pair]
    lengths = [n for pair in LENGTHS for n in pair]
    logps = torch.tensor([s / n for s, n in zip(sums, lengths, strict=True) for _ in range(n)])
    module.engine = lambda micro: TokenStats(logps=logps, entropy=None, hidden=None)
    share, metrics = module.loss(batch, Counts(prompts=3.0, rows=6.0, tokens=29.0))
    return float(share), {name: float(total / count) for name, (total, count) in metrics.items()}


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


SIMPO = [softplus(0.5), softplus(-4.0), softplus(4.5)]
ORPO_TERM = [0.1 * math.log(1 + odds(b) / odds(a)) for a, b in ((-2, -2), (-2.5, -4.75), (-5, -3))]
CPO_TERM = [softplus(-0.2), softplus(0.1), softplus(0.6)]


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (SimPO, {}, sum(SIMPO) / 3),
        (SimPO, {"sft_weight": 0.5}, sum(SIMPO) / 3 + 0.5 * NLL),
        (SimPO, {"beta": 1.0, "gamma": 0.0}, (softplus(0.0) + softplus(-2.25) + softplus(2.0)) / 3),
        # Label smoothing moves each by e times its logit, since -log sigmoid(-x) = x - log sigmoid(x).
        (SimPO, {"label_smoothing": 0.1}, (sum(SIMPO) + 0.1 * (-0.5 + 4.0 - 4.5)) / 3),
        (ORPO, {}, NLL + sum(ORPO_TERM) / 3),
        (ORPO, {"beta": 0.2, "sft_weight": 0.0}, 2 * sum(ORPO_TERM) / 3),
        (CPO, {}, NLL + sum(CPO_TERM) / 3),
        (CPO, {"loss": "hinge", "sft_weight": 0.0}, (0.8 + 1.1 + 1.6) / 3),
        # Means 0, 2.25, -2, each less 1 / (2 beta) = 5.
        (CPO, {"loss": "ipo", "sft_weight": 0.0}, (25 + 2.75**2 + 49) / 3),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else getattr(value, "__name__", ""),
)
def test_losses_by_hand(kind: Any, settings: dict[str, Any], expected: float) -> None:
    share, metrics = golden(kind, **settings)
    assert share == pytest.approx(expected, rel=1e-6)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)


def test_metrics_by_hand() -> None:
    """Rewards of SimPO are of means, those of CPO of sums."""
    _, simpo = golden(SimPO)
    assert simpo == pytest.approx(
        {
            "loss": sum(SIMPO) / 3,
            "rewards/chosen": 2 * -9.5 / 3,
            "rewards/rejected": 2 * -9.75 / 3,
            "rewards/margins": 2 * 0.25 / 3,
            "rewards/accuracies": 1 / 3,
            "logps/chosen": -15.0,
            "logps/rejected": -40 / 3,
            "delta": 0.25 / 3,
            "beta": 2.0,
        },
        rel=1e-5,
    )
    _, cpo = golden(CPO)
    assert cpo["loss/sft"] == pytest.approx(NLL)
    assert cpo["loss/sigmoid"] == pytest.approx(sum(CPO_TERM) / 3, rel=1e-6)
    assert cpo["rewards/chosen"] == pytest.approx(0.1 * -15.0)
    assert cpo["rewards/accuracies"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", [SimPO, ORPO, CPO])
def test_there_is_no_reference_and_predictions_have_rewards(kind: Any, tmp_path: Path) -> None:
    module = kind(policy=TINY, optim=OPTIM)
    t = trainer(tmp_path, max_steps=1)
    t.fit(module, datamodule=FixedData(groups(8, 2)))
    assert not hasattr(module, "reference")
    assert math.isfinite(float(t.callback_metrics["val/loss"]))
    (rows,) = trainer(tmp_path).predict(module, datamodule=FixedData(groups(2, 2)))
    scored = sum(groups(2, 2)[0].scored[0])  # type: ignore[index]
    expected = module.beta * rows[0]["logps_chosen"] / (scored if module.means else 1)
    assert rows[0]["reward_chosen"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SimPO, {"gamma": "wide"}, "gamma 'wide'; it is a number"),
        (SimPO, {"sft_weight": -1.0}, "sft_weight is -1.0"),
        (ORPO, {"beta": 0.0}, "beta is 0.0"),
        (CPO, {"loss": "simpo"}, "loss 'simpo' is not one of CPO's; use sigmoid, hinge or ipo"),
        (CPO, {"loss": "hinge", "label_smoothing": 0.1}, "does not use label_smoothing"),
    ],
)
def test_mistakes(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(policy=TINY, **settings)


@pytest.mark.parametrize(("kind", "mean"), [(SimPO, True), (ORPO, True), (CPO, False)])
def test_gaps_are_those_of_the_rewards(kind: Any, mean: bool) -> None:
    """What callbacks know as a model's confidence: of means of log-probs where rewards are, else of sums."""
    module = moved(kind(policy=TINY, micro_batch_tokens=20))
    batch = GroupBatch.from_groups(groups(5, 2))
    logps = module.engine(batch).logps
    size = batch.scored_lengths() if mean else torch.ones(batch.num_completions)
    chosen, rejected = batch.pair(batch.sum_tokens(logps) / size)
    torch.testing.assert_close(module.preference_gaps(batch), (chosen - rejected).detach(), rtol=1e-4, atol=1e-5)
