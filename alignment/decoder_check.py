"""Does a decoder reproduce a model? A few forced tokens, step by step, against the model's own forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alignment.batches import Group
from alignment.decoding import Decoder
from alignment.probe import FP32_TOLERANCE, LOW_PRECISION_TOLERANCE, Probe


def decoder_difference(decoder: Decoder, inner: PreTrainedModel, probe: Probe, *, low_precision: bool) -> str:
    """How the decoder differs from the model, to complete the sentence "takes the plain path: ..."; "" if it does not.

    The probe's completions have unequal lengths and its longest prompt crosses a short attention window.
    """
    groups = _lists(probe)
    expected = [[_forward(inner, [*g.prompt, *c[:-1]], len(c)) for c in g.completions] for g in groups]
    together = [[i] for i in range(len(groups))] if decoder.same_length else [list(range(len(groups)))]
    try:
        gaps = [
            gap
            for part in together
            for gap in _gaps(decoder, [groups[i] for i in part], [row for i in part for row in expected[i]])
        ]
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
        # model code that does not know such a cache or mask fails in its own way: finding that out is what this is for
        return f"it does not take the cache ({type(error).__name__}: {error})"
    gap = sum(gaps) / len(gaps)
    allowed = (LOW_PRECISION_TOLERANCE if low_precision else FP32_TOLERANCE)["log-probs"]
    # "not <=" so that a NaN counts as a difference
    return "" if gap <= allowed else f"its log-probs differ by {gap:.2g} (allowed {allowed:g})"


def _lists(probe: Probe) -> list[Group]:
    """The probe's prompts with their completions, without the empty ones."""
    batch = probe.batch()
    prompts = [p.tolist() for p in torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())]
    rows = [c.tolist() for c in torch.split(batch.completion_ids, batch.completion_lengths.tolist())]
    completions: list[list[list[int]]] = [[] for _ in prompts]
    for group, row in zip(batch.group_of.tolist(), rows, strict=True):
        if row:
            completions[group].append(row)
    return [Group(prompt=p, completions=c) for p, c in zip(prompts, completions, strict=True)]


def _gaps(decoder: Decoder, groups: Sequence[Group], expected: Sequence[Tensor]) -> list[float]:
    """For every completion token, the mean distance over the vocabulary of the log-probs that predict it."""
    rows = [list(c) for g in groups for c in g.completions]
    longest = max(len(row) for row in rows)
    decode = decoder.start([g.prompt for g in groups], [len(g.completions) for g in groups], longest)
    x, live, gaps = decode.first, list(range(len(rows))), []
    for t in range(longest):
        logps = decoder.logits(x).log_softmax(-1)
        gaps += [float((logps[i] - expected[row][t]).abs().mean()) for i, row in enumerate(live)]
        alive = [len(rows[row]) > t + 1 for row in live]
        live = [row for row, stays in zip(live, alive, strict=True) if stays]
        if not live:
            break
        if not all(alive):
            decode.keep(torch.tensor(alive, device=x.device))
        x = decode.step(torch.tensor([rows[row][t] for row in live], device=x.device))
    return gaps


def _forward(inner: PreTrainedModel, ids: list[int], last: int) -> Tensor:
    """[last, V] log-probs after each of the last tokens, by a forward pass without a cache."""
    options = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(type(inner).forward).parameters else {}
    logits: Tensor = inner(input_ids=torch.tensor([ids], device=inner.device), use_cache=False, **options).logits
    return logits[0, -last:].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
