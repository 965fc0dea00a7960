"""The scorecard against slow and plain computations: one prompt at a time, no padding."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from alignment import world
from alignment.scorecard import MAX_REPLY, Scorecard
from alignment.world_model import world_model, world_tokenizer

PROMPTS = 6
BETA = 0.25


@pytest.fixture(scope="module")
def tokenizer():
    return world_tokenizer()


@pytest.fixture(scope="module")
def models(tokenizer):
    """A start and a policy some way off: sharpened, so that its replies are not all alike."""
    start = world_model(len(tokenizer), seed=0).eval()
    policy = copy.deepcopy(start)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else torch.zeros_like(weight))
        policy.model.norm.weight.mul_(4.0)
    return start, policy


@pytest.fixture(scope="module")
def card(models, tokenizer):
    return Scorecard(models[0], tokenizer, prompts=PROMPTS, beta=BETA, batch_size=4)


@pytest.fixture(scope="module")
def score(card, models):
    start, policy = models
    return card.score(policy, card.pair_logps(policy), card.pair_logps(start))


def _prompt(tokenizer, row):
    text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _greedy(model, prompt, end):
    ids = list(prompt)
    while len(ids) - len(prompt) < MAX_REPLY and (len(ids) == len(prompt) or ids[-1] != end):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_replies_length_and_kl_are_those_of_prompts_answered_one_by_one(models, tokenizer, score):
    start, policy = models
    replies, kl, tokens = [], 0.0, 0
    for row in world.load("prompts", "test", size=PROMPTS):
        prompt = _prompt(tokenizer, row)
        reply = _greedy(policy, prompt, tokenizer.eos_token_id)
        replies.append(tokenizer.decode(reply, skip_special_tokens=True).strip())
        with torch.no_grad():
            ids = torch.tensor([prompt + reply])
            new, old = (m(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for m in (policy, start))
        kl += float((new.exp() * (new - old)).sum())
        tokens += len(reply)
    assert score.replies == replies
    assert score.length == tokens / PROMPTS
    assert score.kl == pytest.approx(kl / tokens, rel=1e-4)
    assert kl > 0.1


def test_preference_numbers_are_those_of_pairs_read_one_by_one(models, tokenizer, score):
    start, policy = models
    margins, aspects = [], []
    for row in world.load("preference", "test", size=len(world.ASPECTS) * (PROMPTS // 2)):
        prompt = _prompt(tokenizer, row)
        rewards = []
        for side in ("chosen", "rejected"):
            text = row[side][0]["content"]
            reply = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([prompt + reply])
            spoken = ids[0, len(prompt) :, None]
            with torch.no_grad():
                all_new, all_old = (m(ids).logits[0, len(prompt) - 1 : -1].double() for m in (policy, start))
            new, old = (logits.log_softmax(-1).gather(1, spoken) for logits in (all_new, all_old))
            rewards.append(BETA * float((new - old).sum()))
        margins.append(rewards[0] - rewards[1])
        aspects.append(row["aspect"])
    assert score.reward_margin == pytest.approx(sum(margins) / len(margins), abs=1e-3)
    assert score.preference_accuracy == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    for aspect in world.ASPECTS:
        mine = [m > 0 for m, a in zip(margins, aspects, strict=True) if a == aspect]
        assert score.accuracy_of[aspect] == pytest.approx(sum(mine) / len(mine))


def test_a_policy_equal_to_the_start_scores_half_zero_and_zero(card, models):
    reference = card.pair_logps(models[0])
    same = card.score(copy.deepcopy(models[0]), reference, reference)
    assert (same.preference_accuracy, same.reward_margin) == (0.5, 0.0)
    assert same.kl == pytest.approx(0.0, abs=1e-6)
    assert card.score(models[0], reference, reference).numbers == {**same.numbers, "kl": 0.0}
    assert not math.isnan(same.length)


def test_every_text_of_the_world_survives_the_closed_vocabulary(tokenizer):
    for split in ("train", "test"):
        for row in world.load("preference", split, size=400):
            asked = [m["content"] for m in row["prompt"]]
            said = [row[side][0]["content"] for side in ("chosen", "rejected")]
            for text in (*asked, *said):
                assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in said:
                assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
