"""A completion depends on its prompt, its number, the seed and the step; never on what is sampled beside it."""

from __future__ import annotations

import random
from itertools import zip_longest

import pytest
import torch

from alignment.batches import Group
from alignment.local_rollout import LocalRollout
from alignment.rollout import Rollout, SamplingConfig, completion_keys
from alignment.sampling import gumbel
from tests.architectures import DENSE, MIXTURES, PLAIN_ONLY, build, token_ids

ARCHITECTURES = {**DENSE, **MIXTURES, **PLAIN_ONLY}
SAMPLED = ["llama", "gemma3", "mistral", "gpt2", "llama4-chunked", "mixtral", "bloom (alibi)"]
STOP = [2, *range(80, 97)]  # a fifth of the vocabulary: lengths differ, and completions end one after the other
SETTINGS = {
    "plain": SamplingConfig(max_tokens=12),
    "filtered": SamplingConfig(max_tokens=12, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, min_tokens=2),
    "greedy": SamplingConfig(max_tokens=12, temperature=0.0),
}

Completions = dict[tuple[int, int], tuple[list[int], list[float], bool]]


def prompts() -> list[Group]:
    """Lengths on both sides of the window of 8."""
    return [Group(prompt=token_ids(n, n), completions=(), index=10 + i) for i, n in enumerate((3, 20, 9, 3, 14, 1))]


def engine(name: str, dtype: torch.dtype = torch.float64, **options: object) -> LocalRollout:
    model = build(ARCHITECTURES[name](), dtype=dtype)
    model.set_experts_implementation("eager")  # the others know no float64
    return LocalRollout(model, pad_id=0, stop_ids=STOP, **options)


def by_name(rollout: Rollout, n: int) -> Completions:
    """(dataset position, completion number) -> ids, log-probs, truncated."""
    lengths = rollout.batch.completion_lengths.tolist()
    ids = [part.tolist() for part in torch.split(rollout.batch.completion_ids, lengths)]
    logps = [part.tolist() for part in torch.split(rollout.sampler_logps, lengths)]
    index = [int(i) for i in rollout.batch.group_index]
    names = [(index[g], row % n) for row, g in enumerate(rollout.batch.group_of.tolist())]
    return dict(zip(names, zip(ids, logps, rollout.truncated.tolist(), strict=True), strict=True))


def assert_same(found: Completions, expected: Completions) -> None:
    assert found
    for name, (ids, logps, cut) in found.items():
        assert (ids, cut) == (expected[name][0], expected[name][2])
        assert logps == pytest.approx(expected[name][1], abs=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", SAMPLED)
def test_micro_batches_change_no_token(name, settings):
    sampling, groups = SETTINGS[settings], prompts()
    whole = by_name(engine(name).generate(groups, 3, sampling, seed=5, step=9), 3)
    assert len({len(ids) for ids, _, _ in whole.values()}) > 1
    for bound in (1, 40, 90, 10_000):
        parts = engine(name, max_batch_tokens=bound).generate(groups, 3, sampling, seed=5, step=9)
        assert_same(by_name(parts, 3), whole)


@pytest.mark.parametrize("name", SAMPLED)
def test_company_changes_no_token(name):
    """Other prompts, another order, fewer or more completions of each."""
    rollout, sampling, groups = engine(name), SETTINGS["plain"], prompts()
    whole = by_name(rollout.generate(groups, 4, sampling, seed=5, step=9), 4)
    shuffled = random.Random(0).sample(groups, len(groups))
    assert_same(by_name(rollout.generate(shuffled, 4, sampling, seed=5, step=9), 4), whole)
    for group in groups[:3]:
        assert_same(by_name(rollout.generate([group], 2, sampling, seed=5, step=9), 2), whole)


def test_layouts_change_no_token(monkeypatch):
    """However many branches share a row, and however little room the cache has at first."""
    from alignment import branches, shared_decoder

    sampling, groups = SETTINGS["plain"], prompts()
    expected = by_name(engine("gemma3").generate(groups, 5, sampling, seed=5, step=9), 5)
    for width, room in ((1, 1), (2, 3), (3, 1), (5, 2)):
        monkeypatch.setattr(shared_decoder, "_FIRST_ROOM", room)
        monkeypatch.setattr(shared_decoder, "_PREFILL_TOKENS", 10 * width)
        monkeypatch.setattr(branches, "best_width", lambda live, *_, width=width: (min(width, max(live)), 0.0))
        assert_same(by_name(engine("gemma3").generate(groups, 5, sampling, seed=5, step=9), 5), expected)


def test_both_paths_draw_the_same():
    sampling, groups = SETTINGS["filtered"], prompts()
    shared = by_name(engine("qwen2-window").generate(groups, 3, sampling, seed=5, step=9), 3)
    plain = engine("qwen2-window", path="plain").generate(groups, 3, sampling, seed=5, step=9)
    assert_same(by_name(plain, 3), shared)


def test_fp32_agrees_but_for_ties():
    """A difference may start only where two tokens' runs end closer than 1e-5: of 96 completions, hardly ever."""
    groups = [Group(prompt=token_ids(3 + 5 * (i % 4), i), completions=(), index=i) for i in range(12)]
    sampling = SETTINGS["plain"]
    whole = by_name(engine("qwen3", torch.float32).generate(groups, 8, sampling, seed=0, step=0), 8)
    parts = engine("qwen3", torch.float32, max_batch_tokens=70).generate(groups, 8, sampling, seed=0, step=0)
    other = by_name(parts, 8)
    differing = [name for name, found in other.items() if found[0] != whole[name][0]]
    assert len(differing) <= 1
    keys = completion_keys(groups, 8, seed=0, step=0)
    model = build(ARCHITECTURES["qwen3"]())

    def ends(index: int, number: int, said: list[int]) -> torch.Tensor:
        """[V] where each token's run ends; the vocabulary is one block, so that the race is among tokens alone."""
        with torch.no_grad():
            logits = model(torch.tensor([[*groups[index].prompt, *said]])).logits[0, -1].double()
        return logits + gumbel(torch.tensor([keys[index][number]]), len(said), torch.arange(len(logits)))[0]

    ids = whole[3, 2][0]
    assert [int(ends(3, 2, ids[:at]).argmax()) for at in range(len(ids))] == ids
    for name in differing:
        ids, theirs = whole[name][0], other[name][0]
        at = next(i for i, (a, b) in enumerate(zip_longest(ids, theirs)) if a != b)
        places = ends(*name, ids[:at])
        assert abs(places[ids[at]] - places[theirs[at]]) < 1e-5


def test_seed_and_step_change_everything():
    rollout, sampling, groups = engine("llama"), SETTINGS["plain"], prompts()
    first = by_name(rollout.generate(groups, 4, sampling, seed=5, step=9), 4)
    for seed, step in ((6, 9), (5, 10)):
        other = by_name(rollout.generate(groups, 4, sampling, seed=seed, step=step), 4)
        assert sum(other[name][0] == first[name][0] for name in first) <= 4
