"""What is configured is what is computed: golden values through the whole module, not only the pure functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.logprobs import TokenStats
from alignment.update import UNIT, Counts
from modules import DPO, RewardModel
from tests.toys import TINY

# [G-DPO] of ALGORITHMS section 6: summed log-probs and lengths, spread evenly over the tokens of each completion.
CHOSEN, REJECTED = (-10.0, -20.0, -15.0), (-12.0, -19.0, -9.0)
REFERENCE_CHOSEN, REFERENCE_REJECTED = (-11.0, -20.5, -14.0), (-11.5, -18.2, -9.4)
CHOSEN_LENGTHS, REJECTED_LENGTHS = (5, 8, 3), (6, 4, 3)

COUNTS = Counts(prompts=3.0, rows=6.0, tokens=29.0)


def batch(**rows: list[list[float]]) -> GroupBatch:
    lengths = zip(CHOSEN_LENGTHS, REJECTED_LENGTHS, strict=True)
    return GroupBatch.from_groups(
        [
            Group(prompt=[1], completions=[[5] * a, [6] * b], rows={k: v[i] for k, v in rows.items()})
            for i, (a, b) in enumerate(lengths)
        ]
    )


def per_token(chosen: tuple[float, ...], rejected: tuple[float, ...]) -> Tensor:
    """[29] each sum spread over its completion."""
    out = []
    for a, n, b, m in zip(chosen, CHOSEN_LENGTHS, rejected, REJECTED_LENGTHS, strict=True):
        out += [a / n] * n + [b / m] * m
    return torch.tensor(out)


def golden_dpo(**settings: Any) -> tuple[float, dict[str, float]]:
    """Mean loss and mean metrics of the golden pairs; only the two models are replaced."""
    module = DPO(policy=TINY, reference="copy", **settings)
    logps = per_token(CHOSEN, REJECTED)
    module.engine = lambda micro: TokenStats(logps=logps, entropy=None, hidden=None)  # type: ignore[assignment, method-assign]
    module.reference_logps = lambda micro: per_token(REFERENCE_CHOSEN, REFERENCE_REJECTED)  # type: ignore[method-assign]
    share, metrics = module.loss(batch(), COUNTS)
    return float(share), {name: float(total / count) for name, (total, count) in metrics.items()}


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


GOLDEN: list[tuple[dict[str, Any], float]] = [
    ({}, 0.672270),
    ({"beta": 0.2}, 0.656281),
    ({"loss": "hinge", "beta": 0.1}, 0.953333),
    ({"loss": "ipo"}, 24.858432),
    ({"loss": "ipo_sum"}, 22.3),
    ({"label_smoothing": 0.1}, 0.676937),
    ({"loss": "robust", "beta": 0.1}, 0.666437),
    ({"loss": "sigmoid_norm", "beta": 5.0}, 0.960458),
]
"""[G-DPO]: settings of a module -> its loss."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *GOLDEN,
        # Beyond the shared 5, 4 and 3 tokens half counts: j = -0.5 (5 + 1/2) / 6 in the first pair, c = 0.5 (4 + 2) / 8
        # in the second, so delta = 1.458333, 1.175, -1.4.
        ({"ld_alpha": 0.5}, (softplus(-0.1458333) + softplus(-0.1175) + softplus(0.14)) / 3),
        # The chosen's mean log-probs are -2, -2.5 and -5: 0.672270 + 0.3 * 9.5 / 3.
        ({"sft_weight": 0.3}, 0.672270 + 0.95),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_dpo_options_reach_the_loss(settings: dict[str, Any], expected: float) -> None:
    assert golden_dpo(**settings)[0] == pytest.approx(expected, rel=1e-6, abs=2e-6)


def test_dpo_metrics_by_hand() -> None:
    _, metrics = golden_dpo()
    assert metrics == pytest.approx(
        {
            "loss": 0.672270,
            "rewards/chosen": (0.1 + 0.05 - 0.1) / 3,
            "rewards/rejected": (-0.05 - 0.08 + 0.04) / 3,
            "rewards/margins": 0.046667,
            "rewards/accuracies": 2 / 3,
            "logps/chosen": -15.0,
            "logps/rejected": -40 / 3,
            "delta": 1.4 / 3,
            "kl/data": (1 + 0.25 + 1 + 0.25 + 0.64 + 0.16) / 4 / 3,
            "beta": 0.1,
        },
        abs=2e-6,
    )


# ---------------------------------------------------------------------- reward model

# [G-RM] of section 7 as the scores of three members for the chosen and the rejected completion of one pair.
SCORES = torch.tensor([[1.0, 0.8, 1.3], [0.2, 0.9, -0.4]])


def golden_reward(**settings: Any) -> RewardModel:
    module = RewardModel(policy=TINY, members=3, **settings)
    module.heads = lambda micro: SCORES  # type: ignore[assignment]
    return module


def pair(**rows: list[float]) -> GroupBatch:
    return GroupBatch.from_groups([Group(prompt=[1], completions=[[5], [6]], rows=rows)])


@pytest.mark.parametrize(
    ("settings", "chosen", "rejected"),
    [
        ({}, 1.033333, 0.233333),
        ({"aggregation": "min"}, 0.8, -0.4),
        ({"aggregation": "uwo"}, 1.012222, 0.092222),
        # Population variances 0.126667 / 3 = 0.042222 and 0.846667 / 3 = 0.282222.
        ({"aggregation": "uwo", "uncertainty_penalty": 2.0}, 1.033333 - 0.084444, 0.233333 - 0.564444),
    ],
    ids=str,
)
def test_aggregation_reaches_rewards_and_metrics(settings: dict[str, Any], chosen: float, rejected: float) -> None:
    module = golden_reward(**settings)
    assert module.rewards(pair()).tolist() == pytest.approx([chosen, rejected], abs=2e-6)
    metrics = {name: float(total / count) for name, (total, count) in module.loss(pair(), UNIT)[1].items()}
    assert metrics["rewards/chosen"] == pytest.approx(chosen, abs=2e-6)
    assert metrics["rewards/rejected"] == pytest.approx(rejected, abs=2e-6)
    assert metrics["rewards/margins"] == pytest.approx(chosen - rejected, abs=2e-6)
    assert metrics["rewards/accuracies"] == 1.0
    assert metrics["rewards/std"] == pytest.approx((math.sqrt(0.042222) + math.sqrt(0.282222)) / 2, abs=2e-6)


@pytest.mark.parametrize("centre", [0.0, 0.1])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_every_member_is_trained_on_its_own_scores(centre: float, margin: float) -> None:
    """Differences 0.8, -0.1, 1.7 and sums 1.2, 1.7, 0.9, whose squares are 1.44, 2.89, 0.81."""
    share, _ = golden_reward(centre_coefficient=centre, aggregation="min").loss(pair(margin=[margin] * 2), UNIT)
    preference = sum(softplus(margin - d) for d in (0.8, -0.1, 1.7)) / 3
    assert float(share) == pytest.approx(preference + centre * (1.44 + 2.89 + 0.81) / 3, abs=2e-6)
