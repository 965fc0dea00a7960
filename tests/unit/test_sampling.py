"""Drawing tokens: the noise, the distribution with and without filters, the stored log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.rollout import SamplingConfig
from alignment.sampling import draw, gumbel

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def mixed(x: int) -> int:
    """splitmix64's finaliser on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def random_logits(vocab: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return scale * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype)


def frequencies(logits: torch.Tensor, sampling: SamplingConfig, draws: int, **options: torch.Tensor) -> torch.Tensor:
    """[V] how often each token comes in `draws` draws: 2,000 completions, and as many positions as that takes."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    keys = torch.arange(2000) * 7919
    for position in range(draws // len(keys)):
        ids, _ = draw(logits.repeat(len(keys), 1), keys, position, sampling, **options)
        counts += torch.bincount(ids, minlength=len(logits))
    return counts


def assert_drawn_from(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square at p = 0.001; tokens expected less than 8 times share a bin."""
    assert counts[probabilities == 0].sum() == 0
    total = int(counts.sum())
    expected = probabilities.double() * total
    rare = expected < 8
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected).square() / expected).sum())
    df = len(expected) - 1
    # Wilson and Hilferty's normal approximation of the chi-square quantile, z = 3.09 for 0.999
    critical = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3
    assert statistic < critical, f"chi-square {statistic:.1f} with {df} degrees of freedom, critical {critical:.1f}"


# ------------------------------------------------------------------------------------------------------------- noise


def test_noise_is_splitmix64():
    # The generator's published first outputs from state 0.
    assert [mixed(GAMMA * k & MASK) for k in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    keys, position, items = [3, 2**62 + 5], 4, [0, 9, (1 << 40) + 1]
    for row, key in zip(gumbel(torch.tensor(keys), position, torch.tensor(items)).tolist(), keys, strict=True):
        for value, item in zip(row, items, strict=True):
            bits = mixed((mixed((key + GAMMA * (position + 1)) & MASK) + GAMMA * (item + 1)) & MASK)
            uniform = ((bits >> 11) + 0.5) / 2**53
            assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_noise_of_rows_does_not_depend_on_other_rows():
    keys, items = torch.tensor([11, 12, 13]), torch.arange(300)
    together = gumbel(keys, 2, items)
    assert torch.equal(together[1:2], gumbel(keys[1:2], 2, items))
    assert torch.equal(together, gumbel(keys, 2, items.expand(3, -1)))


# ------------------------------------------------------------------------------------------------------ distribution


@pytest.mark.parametrize("vocab", [5, 256, 300, 1100], ids=lambda v: f"V={v}")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_softmax(vocab, temperature):
    logits = random_logits(vocab)
    counts = frequencies(logits, SamplingConfig(temperature=temperature), 40_000)
    assert_drawn_from(counts, (logits.double() / temperature).softmax(0))


def kept_by_hand(p: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The filters by their definitions, one token at a time, each renormalising what the one before left."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[:top_k] if top_k else order
    if top_p < 1.0:
        mass, reached, nucleus = sum(p[i] for i in kept), 0.0, []
        for i in kept:
            if reached >= top_p:
                break
            nucleus.append(i)
            reached += p[i] / mass
        kept = nucleus
    kept = [i for i in kept if p[i] >= min_p * p[kept[0]]]
    total = sum(p[i] for i in kept)
    return torch.tensor([p[i] / total if i in kept else 0.0 for i in range(len(p))], dtype=torch.float64)


FILTERS = [
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_with_filters(filters):
    logits = random_logits(300)
    counts = frequencies(logits, SamplingConfig(temperature=0.8, **filters), 20_000)
    assert_drawn_from(counts, kept_by_hand((logits.double() / 0.8).softmax(0).tolist(), **filters))


def test_a_nucleus_of_many_tokens_is_whole():
    # 1,500 equally likely tokens hold 0.75, the other 1,500 hold 0.25: top_p 0.5 keeps 1,000 of the likely ones.
    logits = torch.log(torch.tensor([3.0, 1.0]).repeat_interleave(1500))
    counts = frequencies(logits, SamplingConfig(top_p=0.5), 20_000)
    assert (counts > 0).sum() == 1000
    assert counts[1500:].sum() == 0


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"min_p": 0.01}, {"temperature": 0.0}], ids=str)
def test_banned_tokens_never_come_and_do_not_change_the_stored_log_prob(filters):
    logits = random_logits(300)
    banned = torch.tensor([int(logits.argmax()), 17])
    sampling = SamplingConfig(**filters)
    keys = torch.arange(500)
    ids, logps = draw(logits.repeat(500, 1), keys, 0, sampling, banned)
    assert not torch.isin(ids, banned).any()
    torch.testing.assert_close(logps, logits.log_softmax(0)[ids], atol=2e-6, rtol=0)


def test_a_ban_of_nearly_all_probability_leaves_a_proper_draw():
    # Beside e^0, the weights e^-200 and e^-201 vanish in fp32; without it they are 1 to 1/e.
    logits = torch.tensor([0.0, -200.0, -201.0])
    counts = frequencies(logits, SamplingConfig(), 20_000, banned=torch.tensor([0]))
    p = 1 / (1 + math.exp(-1))
    assert_drawn_from(counts, torch.tensor([0.0, p, 1 - p]))


# ---------------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("filters", [{}, *FILTERS], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_stored_log_probs_are_of_the_whole_vocabulary(filters, temperature):
    logits = random_logits(1100)
    ids, logps = draw(logits.repeat(200, 1), torch.arange(200), 3, SamplingConfig(temperature=temperature, **filters))
    torch.testing.assert_close(logps, (logits / temperature).log_softmax(0)[ids], atol=2e-6, rtol=0)


def test_greedy_takes_the_likeliest_and_scores_it_at_temperature_one():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -5.0]])
    ids, logps = draw(logits.clone(), torch.tensor([1, 2]), 0, SamplingConfig(temperature=0.0))
    assert ids.tolist() == [1, 0]
    torch.testing.assert_close(logps, logits.log_softmax(1).gather(1, ids[:, None])[:, 0])


def test_rounding_changes_no_token():
    """2,000 draws from logits that differ by fp32 rounding: no two runners of these came that close."""
    exact = random_logits(1100, dtype=torch.float64).repeat(2000, 1)
    keys = torch.arange(2000) * 31
    rounded, _ = draw(exact.float(), keys, 0, SamplingConfig(temperature=0.9))
    expected, _ = draw(exact.clone(), keys, 0, SamplingConfig(temperature=0.9))
    assert torch.equal(rounded, expected)


def test_a_token_depends_on_its_key_and_position_alone():
    logits = random_logits(300).repeat(64, 1)
    keys = torch.arange(64)
    ids, _ = draw(logits.clone(), keys, 5, SamplingConfig())
    alone, _ = draw(logits[:1].clone(), keys[40:41], 5, SamplingConfig())
    assert alone.item() == ids[40].item()
    elsewhere, _ = draw(logits.clone(), keys, 6, SamplingConfig())
    assert (elsewhere != ids).float().mean() > 0.5
