"""The KL of each head's own policy to the reference, over the whole vocabulary, at some tokens of a rollout.

It is what bounds a head: the fused policy's KL does not see heads that pull apart and cancel. Every token would cost K
times the LM head's forward and backward, and a mean needs no more than a sample: every n-th token of each completion,
from a drawn one on, whatever else is in the batch. States of the reference at these tokens are kept beside the batch,
which carries their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from alignment import distributed
from alignment.batches import GroupBatch, within
from alignment.full_kl import Head, full_kl
from alignment.losses import share

CHOSEN = "own_kl_chosen"
"""Token tensor, bool: the tokens."""
PLACE = "own_kl_place"
"""Token tensor: which of the kept states a token has; -1 for none."""


class OwnKL:
    """Of one rollout.

    Args:
        every: n.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._tokens = 0.0
        self._kept: list[Tensor] = []
        self._head: Head | None = None

    def choose(self, batch: GroupBatch, keys: Sequence[Sequence[int]]) -> GroupBatch:
        """A copy of a rollout with its tokens chosen; `keys` are numbers for each completion of each prompt. What was
        kept of an earlier rollout is forgotten."""
        self._kept = []
        first = torch.tensor([key % self.every for group in keys for key in group], dtype=torch.int64)
        first = first.to(batch.device)[batch.row_of()]
        return batch.with_tokens(**{CHOSEN: (within(batch.completion_lengths) - first) % self.every == 0})

    def keep(self, micro: GroupBatch, states: Tensor, head: Head) -> Tensor:
        """Take in the reference's states [C, H] that predict the tokens of a micro-batch, and its LM head; returns the
        token tensor PLACE."""
        chosen = micro.tokens[CHOSEN] & micro.scored
        kept = states[chosen]
        places = torch.arange(len(kept), device=kept.device) + sum(map(len, self._kept))
        self._kept.append(kept)
        self._head = head
        return torch.full_like(micro.completion_ids, -1).masked_scatter(chosen, places)

    def count(self, part: GroupBatch) -> None:
        """Note how many tokens an update has. A collective: every rank calls it, also with an empty part."""
        chosen = (part.tokens[PLACE] >= 0) & part.scored
        self._tokens = float(distributed.all_reduce_sum(chosen.sum().double()))

    def __call__(
        self, micro: GroupBatch, own: Sequence[Tensor], head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(share of the mean over the update's tokens, summed over heads; [A, m] nats at this micro-batch's).

        Args:
            own: A states [scored, H] of the sub-policies. head: their LM head, which gets no gradient.
        """
        assert self._head is not None, "keep() comes first"
        places = micro.tokens[PLACE][micro.scored]
        at = places >= 0
        ref = torch.cat(self._kept)[places[at]]
        held = replace(head, weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())
        states = torch.stack([state[at] for state in own])
        reference = (ref.repeat(len(own), 1), self._head)
        values = full_kl("full_reverse", states.flatten(0, 1), held, *reference, temperature=temperature)
        total = share(values, torch.ones_like(values), self._tokens)
        return total, values.detach().view(len(own), -1)
