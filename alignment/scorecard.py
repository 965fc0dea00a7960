"""What a policy does on held-out prompts of the support world, in a few numbers that can be read aloud.

Every number is about products that no training row names:

    preference_accuracy  share of held-out comparisons whose chosen reply has the larger implicit reward
                         beta (log pi(y) - log pi_ref(y)), ties half (arXiv 2305.18290); pi_ref is the policy that the
                         stage of training began from, so 0.5 where nothing was trained
    reward_margin        mean implicit reward of chosen minus rejected against the same pi_ref; 0 where nothing was
                         trained
    right, warmth        judged on the policy's own greedy replies (`alignment.world`), share and mean in [0, 1]
    length               tokens of those replies, the end included, at most `MAX_REPLY`
    kl                   nats per token: KL(pi || pi_start) over the whole vocabulary, mean over those replies' tokens;
                         pi_start is the policy before any training
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alignment import world
from alignment.batches import Group, GroupBatch
from alignment.chat import ChatEncoder, Message
from alignment.logprobs import LogProbEngine

MAX_REPLY = 48
_ROWS = 16
"""Rows in one forward of the KL: bounds the [rows, reply, vocabulary] logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One column of the table (module docstring). `accuracy_of` splits preference_accuracy by `world.ASPECTS`."""

    preference_accuracy: float
    reward_margin: float
    right: float
    warmth: float
    length: float
    kl: float
    accuracy_of: dict[str, float]
    replies: list[str]

    @property
    def numbers(self) -> dict[str, float]:
        """The six numbers, by name."""
        return {k: v for k, v in asdict(self).items() if isinstance(v, float)}


class Scorecard:
    """Scores policies that share one tokenizer.

    Args:
        start: the policy before training; kept, and never changed.
        tokenizer: of the start and of every policy to score.
        prompts: how many held-out prompts are answered; the comparisons are those of half as many prompts.
        beta: scale of the implicit reward.
        batch_size: prompts generated together.
    """

    def __init__(
        self, start: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: int, beta: float, batch_size: int = 32
    ) -> None:
        self.beta, self.batch_size = beta, batch_size
        self.start = cast(PreTrainedModel, start.eval())
        self.tokenizer = tokenizer
        encoder = ChatEncoder(tokenizer=tokenizer)
        self._end = encoder.end_id
        self.rows = world.load("prompts", "test", size=prompts)
        self._prompts = [encoder.prompt(_messages(row)) for row in self.rows]
        comparisons = world.load("preference", "test", size=len(world.ASPECTS) * max(1, prompts // 2))
        self._aspects = [row["aspect"] for row in comparisons]
        self._pairs = _pairs(encoder, comparisons)

    @torch.no_grad()
    def score(self, policy: nn.Module, logps: Tensor, reference_logps: Tensor) -> Score:
        """Score one policy (set to evaluation mode).

        Args:
            policy: the policy.
            logps, reference_logps: [2 x comparisons] `pair_logps` of the policy and of the one its training began from.
        """
        model = cast(PreTrainedModel, policy.eval())
        rewards = self.beta * (logps - reference_logps).view(-1, 2)
        margins = (rewards[:, 0] - rewards[:, 1]).double()
        wins = (margins > 0).double() + 0.5 * (margins == 0).double()
        replies: list[str] = []
        kl, tokens = 0.0, 0
        for first in range(0, len(self._prompts), self.batch_size):
            prompts = self._prompts[first : first + self.batch_size]
            ids, mask, count = self._generate(model, prompts)
            spoken = [row[m].tolist() for row, m in zip(ids[:, -count:], mask, strict=True)]
            replies += [str(self.tokenizer.decode(row, skip_special_tokens=True)).strip() for row in spoken]
            if model is not self.start:
                kl += self._kl(model, prompts, ids, mask)
            tokens += int(mask.sum())
        return Score(
            preference_accuracy=float(wins.mean()),
            reward_margin=float(margins.mean()),
            right=_mean([float(world.right(text, row)) for text, row in zip(replies, self.rows, strict=True)]),
            warmth=_mean([world.warmth(text) for text in replies]),
            length=tokens / len(replies),
            kl=kl / tokens,
            accuracy_of={
                aspect: _mean([float(w) for w, a in zip(wins, self._aspects, strict=True) if a == aspect])
                for aspect in world.ASPECTS
            },
            replies=replies,
        )

    @torch.no_grad()
    def pair_logps(self, policy: nn.Module) -> Tensor:
        """[2 x comparisons] summed log-probs of the held-out comparisons' replies, chosen and rejected in turn."""
        engine = LogProbEngine(policy.eval())
        engine.verify()
        out = torch.zeros(self._pairs.num_prompts, 2 * len(world.ASPECTS))
        for micro in self._pairs.split(2048):  # which reorders groups
            logps = engine(micro).logps
            assert logps is not None
            out[micro.group_index] = micro.sum_tokens(logps).float().view(micro.num_prompts, -1)
        return out.flatten()

    def _generate(self, model: PreTrainedModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor, int]:
        """Greedy replies to left-padded prompts: (ids [B, prompt + R], which of the R reply tokens count [B, R], R)."""
        width = max(map(len, prompts))
        pad = cast(int, self.tokenizer.pad_token_id)
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        out = cast(Any, model).generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=MAX_REPLY,
            do_sample=False,
            eos_token_id=self._end,
            pad_token_id=pad,
        )
        reply = out[:, width:]
        ended_before = (reply == self._end).cumsum(1) - (reply == self._end).long()
        return out, ended_before == 0, reply.shape[1]

    def _kl(self, model: PreTrainedModel, prompts: Sequence[list[int]], ids: Tensor, counts: Tensor) -> float:
        """Sum over reply tokens of KL(model || start), full vocabulary."""
        width = ids.shape[1] - counts.shape[1]
        lengths = torch.tensor([len(p) for p in prompts], device=ids.device)
        prompt_mask = torch.arange(width, device=ids.device)[None] >= (width - lengths)[:, None]
        mask = torch.cat([prompt_mask, counts], dim=1).long()
        total = 0.0
        for first in range(0, len(prompts), _ROWS):
            part = slice(first, first + _ROWS)
            new, old = (self._reply_logprobs(m, ids[part], mask[part], counts[part]) for m in (model, self.start))
            total += float((new.exp() * (new - old)).sum(-1).double().sum())
        return total

    @staticmethod
    def _reply_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
        """[counted tokens, V] log-probs of each counted reply token's distribution."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        keep = counts.shape[1] + 1
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep).logits
        return cast(Tensor, logits[:, -keep:-1][counts].float().log_softmax(-1))


def _messages(row: dict[str, Any]) -> list[Message]:
    return [Message(m["role"], m["content"]) for m in row["prompt"]]


def _pairs(encoder: ChatEncoder, rows: Sequence[dict[str, Any]]) -> GroupBatch:
    """One group per prompt with its comparisons' replies in order, chosen before rejected: each prompt is read once."""
    groups: list[Group] = []
    for first in range(0, len(rows), len(world.ASPECTS)):
        part = rows[first : first + len(world.ASPECTS)]
        texts = [row[side][0]["content"] for row in part for side in ("chosen", "rejected")]
        encoded = encoder.encode(_messages(part[0]), texts)
        groups.append(Group(prompt=encoded.prompt, completions=encoded.completions, index=len(groups)))
    return GroupBatch.from_groups(groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
