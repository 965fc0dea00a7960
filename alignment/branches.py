"""Where completions stand in a cache that holds each prompt once: the arithmetic of `alignment.shared_decoder`.

A cache row reads `prompt | step 1 of slots 1..S | step 2 of slots 1..S | ...`: the completions of a prompt are branches
of its row, one per slot, and a decode step adds one token to each. Prompts are right-aligned, so that the steps of all
rows start at the same column. A slot sees its prompt and its own columns.

How many slots a row should have is a trade. With all branches of a prompt in one row its keys and values are read once
for all of them; but each slot also computes scores with its neighbours' columns, which the mask throws away. Few
branches and long prompts favour wide rows, long completions favour narrow ones (`StepCosts`).

Legend: P prompts, n live completions, R rows, S slots of a row, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from alignment.layout import additive


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What one decode step costs besides reading the weights, in multiply-adds.

    Args:
        token: of a slot, in the linear layers. score: of a slot with one cached token. read: of one cached token.
    """

    token: float
    score: float
    read: float

    def of(self, rows: int, width: int, prompt: int, steps: float) -> float:
        """A step with `rows` rows of `width` slots, `prompt` tokens of prompt and `steps` tokens in each branch."""
        slots, columns = rows * width, prompt + width * steps
        return slots * self.token + slots * columns * self.score + rows * columns * self.read


def best_width(live: Sequence[int], prompt: int, steps: float, costs: StepCosts) -> tuple[int, float]:
    """Slots per row that make a step cheapest when prompt p has live[p] >= 1 live completions, and that step's cost."""

    def cost(width: int) -> float:
        return costs.of(sum(-(-k // width) for k in live), width, prompt, steps)

    width = min(range(1, max(live) + 1), key=cost)
    return width, cost(width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The live completions and their places.

    Args:
        lengths: [P] int64, prompt lengths.
        prompt_of: [n] int64, non-decreasing: the prompt of each live completion.
        slot: [n] int64, its place in the flattened [R * S].
        row_prompt: [R] int64, the prompt of each row.
        width: S. prompt_columns: columns before the first step. done: steps in the cache.
    """

    lengths: Tensor
    prompt_of: Tensor
    slot: Tensor
    row_prompt: Tensor
    width: int
    prompt_columns: int
    done: int

    @classmethod
    def opened(cls, lengths: Tensor, counts: Tensor) -> Branches:
        """Just read: one row per prompt; its counts[p] completions all stand at slot 0, before any step."""
        prompts = torch.arange(len(lengths), device=lengths.device)
        prompt_of = prompts.repeat_interleave(counts)
        return cls(
            lengths=lengths,
            prompt_of=prompt_of,
            slot=prompt_of,
            row_prompt=prompts,
            width=1,
            prompt_columns=int(lengths.max()),
            done=0,
        )

    @property
    def rows(self) -> int:
        return len(self.row_prompt)

    @property
    def row_lengths(self) -> Tensor:
        """[R] prompt length of each row."""
        return self.lengths[self.row_prompt]

    def kept(self, alive: Tensor) -> Branches:
        """Without the completions whose `alive` [n] bool is false; their slots stay where they are, dead."""
        return replace(self, prompt_of=self.prompt_of[alive], slot=self.slot[alive])

    def stepped(self) -> Branches:
        """One more step in the cache."""
        return replace(self, done=self.done + 1)

    # ------------------------------------------------------------------ how wide, at what cost

    def cost(self, costs: StepCosts, steps: int) -> float:
        """Of a step as things stand, averaged over those from now to `steps`."""
        return costs.of(self.rows, self.width, self.prompt_columns, (self.done + steps) / 2)

    def best(self, costs: StepCosts, steps: int) -> tuple[int, float]:
        """The best width for the live completions, and the cost of a step then."""
        live = torch.bincount(self.prompt_of)
        longest = int(self.lengths[self.prompt_of].max())
        return best_width(live[live > 0].tolist(), longest, (self.done + steps) / 2, costs)

    # ------------------------------------------------------------------ another arrangement

    def arranged(self, width: int) -> tuple[Branches, Tensor, Tensor]:
        """The live completions in as few rows of `width` slots as they need.

        Returns the new places, and for every cell of the new cache [R', T'] the row and the column of the old one it
        comes from. A cell that belongs to no one comes from somewhere, since it must hold finite numbers.
        """
        device = self.slot.device
        rank = torch.arange(len(self.slot), device=device) - torch.searchsorted(self.prompt_of, self.prompt_of)
        live = torch.bincount(self.prompt_of, minlength=len(self.lengths))
        rows_of = (live + width - 1) // width
        row = (rows_of.cumsum(0) - rows_of)[self.prompt_of] + rank // width
        row_prompt = torch.arange(len(live), device=device).repeat_interleave(rows_of)
        new = replace(
            self,
            slot=row * width + rank % width,
            row_prompt=row_prompt,
            width=width,
            prompt_columns=int(self.lengths[self.prompt_of].max()),
        )
        # any live branch of a prompt stands in a row that holds the prompt
        any_branch = torch.searchsorted(self.prompt_of, row_prompt)
        prompt_row = (self.slot // self.width)[any_branch]
        branch_row = prompt_row[:, None].repeat(1, width)
        branch_slot = torch.zeros_like(branch_row)
        branch_row.view(-1)[new.slot] = self.slot // self.width
        branch_slot.view(-1)[new.slot] = self.slot % self.width

        shape = (new.rows, self.done, width)
        steps = self.prompt_columns + self.width * torch.arange(self.done, device=device)[:, None]
        prompt = torch.arange(self.prompt_columns - new.prompt_columns, self.prompt_columns, device=device)
        source_row = [prompt_row[:, None].expand(-1, len(prompt)), branch_row[:, None].expand(shape).flatten(1)]
        source_column = [prompt.expand(new.rows, -1), (steps + branch_slot[:, None].expand(shape)).flatten(1)]
        return new, torch.cat(source_row, dim=1), torch.cat(source_column, dim=1)

    # ------------------------------------------------------------------ what a slot sees

    def visible(self, columns: int, dtype: torch.dtype) -> Tensor:
        """[R, 1, S, columns] additive mask: the row's prompt and the slot's own columns, up to any number of steps."""
        column = torch.arange(columns, device=self.slot.device) - self.prompt_columns
        slot = torch.arange(self.width, device=self.slot.device)
        in_prompt = column >= -self.row_lengths[:, None]
        own = column % self.width == slot[:, None]
        return additive(torch.where(column < 0, in_prompt[:, None], own)[:, None], dtype)

    def positions(self, columns: int) -> Tensor:
        """[R, columns] position of the token in each column; meaningless left of a prompt's first token."""
        column = torch.arange(columns, device=self.slot.device) - self.prompt_columns
        return self.row_lengths[:, None] + torch.where(column < 0, column, column // self.width)
