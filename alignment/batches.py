"""One prompt, many completions: the ragged container every algorithm works on.

SFT is a group of 1 completion, a preference pair is a group of 2 (chosen, then rejected), GRPO is a group of G.

Shape legend, used in every docstring of the project
    P  prompts (groups)            N  completions (rows)
    L  prompt tokens in total      C  completion tokens in total
    H  hidden size                 V  vocabulary size

Flat tensors are the rows concatenated in order; rows of one group are contiguous. Nothing here is padded, so nothing
here depends on a pad id: whether a token counts is known from lengths and from `scored`, never from its value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt with its completions, as plain Python lists (what a dataset row becomes after tokenisation).

    Args:
        prompt: token ids of the prompt, at least one (a BOS will do): the first completion token needs a predecessor.
        completions: token ids of each completion, EOS included where the text ended.
        scored: per completion, per token, whether it enters losses and log-probs. None: every token does.
        weights: per completion, its weight in losses. None: 1 each.
        rows: named numbers, one per completion (for example `{"margin": [0.5, 0.5]}`).
        columns: any other data column of the row (text, answer, difficulty), kept as it is for rewards and reports.
        index: position of the row in its dataset, -1 when it has none.
    """

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    scored: Sequence[Sequence[bool]] | None = None
    weights: Sequence[float] | None = None
    rows: Mapping[str, Sequence[float]] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    index: int = -1

    @property
    def tokens(self) -> int:
        """Tokens the model reads for this group: the prompt once, every completion once."""
        return len(self.prompt) + sum(len(c) for c in self.completions)

    @property
    def key(self) -> int:
        """63-bit digest of prompt and completions: equal content, equal key, wherever the row stands."""
        digest = hashlib.blake2b(digest_size=8)
        for ids in (self.prompt, *self.completions):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(torch.tensor(list(ids), dtype=torch.int64).numpy().tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """The plain form: one right-padded row per completion, all [N, T]; T is the longest prompt with its completion.

    `labels` is -100 wherever nothing is scored (prompt, padding, unscored tokens); `position[n, t]` is the index into
    the batch's flat completion tensors for a scored or unscored completion token and -1 elsewhere.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """P prompts with N completions. See the module docstring for the shape legend.

    Args:
        prompt_ids: [L] int64. prompt_lengths: [P] int64, each >= 1.
        completion_ids: [C] int64. completion_lengths: [N] int64, each >= 0.
        group_of: [N] int64, non-decreasing: the prompt of each completion.
        scored: [C] bool. weights: [N] float32.
        group_index: [P] int64, dataset position or -1. group_key: [P] int64, content digest.
        rows: named float tensors [N]. tokens: named tensors [C] (for example cached reference log-probs).
        columns: P mappings of untouched data columns.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_lengths: Tensor
    group_of: Tensor
    scored: Tensor
    weights: Tensor
    group_index: Tensor
    group_key: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    columns: tuple[Mapping[str, Any], ...] = ()

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> GroupBatch:
        """Collate. Raises ValueError naming the row for an empty prompt or masks of another length."""
        for g in groups:
            _check_group(g)
        names = sorted({name for g in groups for name in g.rows})
        missing = [(g.index, name) for g in groups for name in names if name not in g.rows]
        if missing:
            index, name = missing[0]
            raise ValueError(f"row {index} has no value '{name}' while other rows of the batch have one")
        completions = [c for g in groups for c in g.completions]
        scored = [
            torch.tensor([True] * len(c) if g.scored is None else list(g.scored[i]), dtype=torch.bool)
            for g in groups
            for i, c in enumerate(g.completions)
        ]
        weights = [w for g in groups for w in (g.weights if g.weights is not None else [1.0] * len(g.completions))]
        return cls(
            prompt_ids=_flat([g.prompt for g in groups]),
            prompt_lengths=_ints([len(g.prompt) for g in groups]),
            completion_ids=_flat(completions),
            completion_lengths=_ints([len(c) for c in completions]),
            group_of=_ints([p for p, g in enumerate(groups) for _ in g.completions]),
            scored=torch.cat(scored) if scored else torch.zeros(0, dtype=torch.bool),
            weights=torch.tensor(weights, dtype=torch.float32),
            group_index=_ints([g.index for g in groups]),
            group_key=_ints([g.key for g in groups]),
            rows={n: torch.tensor([float(v) for g in groups for v in g.rows[n]], dtype=torch.float32) for n in names},
            columns=tuple(g.columns for g in groups),
        )

    def with_rows(self, **values: Tensor) -> GroupBatch:
        """A copy with per-completion values [N] added or replaced."""
        return replace(self, rows={**self.rows, **values})

    def with_tokens(self, **values: Tensor) -> GroupBatch:
        """A copy with per-token values [C] added or replaced."""
        return replace(self, tokens={**self.tokens, **values})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GroupBatch:
        """Every tensor on `device`; Lightning calls this."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> GroupBatch:
        """Every tensor in page-locked memory; the DataLoader calls this."""
        return self._map(lambda t: t.pin_memory())

    def _map(self, f: Any) -> GroupBatch:
        tensors = {n: f(getattr(self, n)) for n in _TENSORS}
        rows, tokens = ({k: f(v) for k, v in d.items()} for d in (self.rows, self.tokens))
        return replace(self, rows=rows, tokens=tokens, **tensors)

    # ------------------------------------------------------------------ sizes

    @property
    def num_prompts(self) -> int:
        return int(self.prompt_lengths.numel())

    @property
    def num_completions(self) -> int:
        return int(self.completion_lengths.numel())

    @property
    def device(self) -> torch.device:
        return self.completion_ids.device

    def __len__(self) -> int:
        return self.num_prompts

    def group_tokens(self) -> Tensor:
        """[P] tokens the model reads per group on the shared path (prompt once + all its completions)."""
        return self.prompt_lengths.index_add(0, self.group_of, self.completion_lengths)

    def row_of(self) -> Tensor:
        """[C] the completion each token belongs to."""
        rows = torch.arange(self.num_completions, device=self.device)
        return rows.repeat_interleave(self.completion_lengths)

    def scored_lengths(self) -> Tensor:
        """[N] number of scored tokens of each completion."""
        return self.sum_tokens(self.scored.long())

    # ------------------------------------------------------------------ reductions

    def sum_tokens(self, values: Tensor) -> Tensor:
        """[C] -> [N]: sum over each completion's scored tokens.

        Unscored values are dropped, not multiplied by zero, so a NaN there stays there.
        """
        kept = torch.where(self.scored, values, torch.zeros_like(values))
        return torch.zeros(self.num_completions, dtype=kept.dtype, device=kept.device).index_add(0, self.row_of(), kept)

    def mean_tokens(self, values: Tensor) -> Tensor:
        """[C] -> [N]: mean over each completion's scored tokens; 0 for a completion without any."""
        return self.sum_tokens(values) / self.scored_lengths().clamp(min=1)

    def pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[N] -> (chosen [P], rejected [P]). Raises ValueError unless every group has exactly two completions."""
        if self.num_completions != 2 * self.num_prompts or not torch.equal(
            self.group_of, torch.arange(self.num_prompts, device=self.device).repeat_interleave(2)
        ):
            raise ValueError("a preference batch needs exactly two completions per prompt: chosen, then rejected")
        return values[0::2], values[1::2]

    # ------------------------------------------------------------------ cutting

    def select_groups(self, index: Tensor | Sequence[int]) -> GroupBatch:
        """The named groups, in the given order, with all their completions."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.device)
        sizes = torch.zeros(self.num_prompts, dtype=torch.int64, device=self.device)
        sizes.index_add_(0, self.group_of, torch.ones_like(self.group_of))
        rows = _ranges(index, sizes)
        return self._take(index, rows, torch.arange(len(index), device=self.device).repeat_interleave(sizes[index]))

    def select_rows(self, rows: Tensor | Sequence[int]) -> GroupBatch:
        """The named completions with the prompts they need, each prompt once; those of earlier groups first."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        groups, group_of = torch.unique(self.group_of[rows], return_inverse=True)
        return self._take(groups, rows, group_of)

    def _take(self, groups: Tensor, rows: Tensor, group_of: Tensor) -> GroupBatch:
        prompt_tokens = _ranges(groups, self.prompt_lengths)
        tokens = _ranges(rows, self.completion_lengths)
        return replace(
            self,
            prompt_ids=self.prompt_ids[prompt_tokens],
            prompt_lengths=self.prompt_lengths[groups],
            completion_ids=self.completion_ids[tokens],
            completion_lengths=self.completion_lengths[rows],
            group_of=group_of,
            scored=self.scored[tokens],
            weights=self.weights[rows],
            group_index=self.group_index[groups],
            group_key=self.group_key[groups],
            rows={k: v[rows] for k, v in self.rows.items()},
            tokens={k: v[tokens] for k, v in self.tokens.items()},
            columns=tuple(self.columns[int(g)] for g in groups) if self.columns else (),
        )

    def split(self, max_tokens: int | None, keep_groups: bool = True) -> Iterator[GroupBatch]:
        """Cut into micro-batches of at most `max_tokens` tokens read by the model (each prompt counted once).

        Groups of similar length go together (longest first), so that a micro-batch pads little. A single group over the
        bound becomes a micro-batch of its own; with `keep_groups=False` its completions are spread over several, the
        prompt repeated in each. `max_tokens=None` yields the batch as it is. An empty batch yields nothing.
        """
        if self.num_prompts == 0:
            return
        if max_tokens is None:
            yield self
            return
        sizes = self.group_tokens().tolist()
        bin_: list[int] = []
        used = 0
        for g in sorted(range(len(sizes)), key=lambda g: (-sizes[g], g)):
            if sizes[g] > max_tokens and not keep_groups:
                yield from self._split_group(g, max_tokens)
                continue
            if bin_ and used + sizes[g] > max_tokens:
                yield self.select_groups(bin_)
                bin_, used = [], 0
            bin_.append(g)
            used += sizes[g]
        if bin_:
            yield self.select_groups(bin_)

    def _split_group(self, group: int, max_tokens: int) -> Iterator[GroupBatch]:
        prompt = int(self.prompt_lengths[group])
        part: list[int] = []
        used = prompt
        for row in (self.group_of == group).nonzero().flatten().tolist():
            length = int(self.completion_lengths[row])
            if part and used + length > max_tokens:
                yield self.select_rows(part)
                part, used = [], prompt
            part.append(row)
            used += length
        if part:
            yield self.select_rows(part)

    # ------------------------------------------------------------------ the plain form

    def padded(self, pad_id: int) -> PaddedRows:
        """Right-padded rows for the plain path and for `generate`-style callers. `pad_id` fills, it never masks."""
        n = self.num_completions
        prompt_length = self.prompt_lengths[self.group_of]
        width = int((prompt_length + self.completion_lengths).max()) if n else 0
        shape, device = (n, width), self.device
        input_ids = torch.full(shape, pad_id, dtype=torch.int64, device=device)
        attention = torch.zeros(shape, dtype=torch.int64, device=device)
        labels = torch.full(shape, -100, dtype=torch.int64, device=device)
        position = torch.full(shape, -1, dtype=torch.int64, device=device)

        prompt_tokens = _ranges(self.group_of, self.prompt_lengths)
        prompt_row = torch.arange(n, device=device).repeat_interleave(prompt_length)
        prompt_col = within(prompt_length)
        input_ids[prompt_row, prompt_col] = self.prompt_ids[prompt_tokens]
        attention[prompt_row, prompt_col] = 1

        row = self.row_of()
        col = prompt_length[row] + within(self.completion_lengths)
        input_ids[row, col] = self.completion_ids
        attention[row, col] = 1
        labels[row, col] = torch.where(self.scored, self.completion_ids, torch.full_like(self.completion_ids, -100))
        position[row, col] = torch.arange(len(self.completion_ids), device=device)
        return PaddedRows(input_ids=input_ids, attention_mask=attention, labels=labels, position=position)


_TENSORS = (
    "prompt_ids",
    "prompt_lengths",
    "completion_ids",
    "completion_lengths",
    "group_of",
    "scored",
    "weights",
    "group_index",
    "group_key",
)


def _check_group(g: Group) -> None:
    n = len(g.completions)
    if not g.prompt:
        raise ValueError(f"row {g.index} has an empty prompt; give it at least one token (for example BOS)")
    if g.scored is not None and [len(s) for s in g.scored] != [len(c) for c in g.completions]:
        raise ValueError(f"row {g.index}: 'scored' must have one value per completion token")
    if g.weights is not None and len(g.weights) != n:
        raise ValueError(f"row {g.index}: {len(g.weights)} weights for {n} completions")
    for name, values in g.rows.items():
        if len(values) != n:
            raise ValueError(f"row {g.index}: {len(values)} values of '{name}' for {n} completions")


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _flat(rows: Sequence[Sequence[int]]) -> Tensor:
    return _ints([t for r in rows for t in r])


def within(lengths: Tensor) -> Tensor:
    """lengths [K] -> [sum] positions 0..length-1 of each segment, concatenated."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum()), device=lengths.device) - (ends - lengths).repeat_interleave(lengths)


def _ranges(index: Tensor, lengths: Tensor) -> Tensor:
    """Flat positions of the segments named by `index`, where segment k covers lengths[k] positions."""
    starts = lengths.cumsum(0) - lengths
    taken = lengths[index]
    return starts[index].repeat_interleave(taken) + within(taken)
