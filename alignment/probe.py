"""Does the shared-prefix path reproduce a model? What its config and modules say, then a small batch on both paths.

Used by `alignment.logprobs.LogProbEngine.verify`; every function speaks about "the model" in the third person, so that
its answer completes the sentence "takes the plain path: ...".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from alignment.batches import Group, GroupBatch
from alignment.layout import layer_masks

if TYPE_CHECKING:
    from alignment.logprobs import TokenStats

# Runs one path ("shared" or "plain") over a batch; log-probs, entropies (without an LM head: neither) and final states.
RunPath = Callable[[str, GroupBatch], "TokenStats"]

# Allowed between the paths: of a hidden state relative to its size, and of log-probs and entropies on average in nats.
# SmolLM2-135M measured 1e-6 and 3e-6 in fp32, 0.013 and 0.027 in bf16; with a wrong mask 0.66 and 0.60 in either.
FP32_TOLERANCE = {"hidden states": 1e-4, "log-probs": 1e-4, "entropies": 1e-4}
LOW_PRECISION_TOLERANCE = {"hidden states": 0.1, "log-probs": 0.15, "entropies": 0.15}

# Windows up to this many tokens are crossed by the probe; a longer one is taken from the config unseen.
_LONGEST_WINDOW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A fixed small batch for a model: three groups of unequal lengths, the longest wider than a short window."""

    config: PreTrainedConfig
    device: torch.device

    def batch(self, last: int = 0) -> GroupBatch:
        """The batch; `last` is added to the id of every completion's final token."""
        completions = ((6, 9), (3, 4), (2, 0))
        prompts = (self._long_prompt(room=9), 5, 1)
        groups = []
        start = 11
        for prompt, lengths in zip(prompts, completions, strict=True):
            ids = [self._ids(start + 101 * k, n) for k, n in enumerate((prompt, *lengths))]
            start += 307
            for row in ids[1:]:
                row[-1:] = [(token + last) % self.config.vocab_size for token in row[-1:]]
            groups.append(Group(prompt=ids[0], completions=ids[1:]))
        return GroupBatch.from_groups(groups).to(self.device)

    def _ids(self, start: int, n: int) -> list[int]:
        return [(start + 7 * i * i + 13 * i) % self.config.vocab_size for i in range(n)]

    def _long_prompt(self, room: int) -> int:
        spans = [getattr(self.config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
        longest = getattr(self.config, "max_position_embeddings", None) or _LONGEST_WINDOW * 2
        return max(1, min(longest - room, max(12, *(s + 3 for s in spans if s <= _LONGEST_WINDOW))))


def check_causal(name: str, probe: Probe, run: RunPath, *, low_precision: bool) -> None:
    """Raises ValueError if changing a completion's last token changes the state of an earlier one."""
    batch, changed = probe.batch(), probe.batch(last=1)
    same = batch.completion_ids == changed.completion_ids
    allowed = LOW_PRECISION_TOLERANCE if low_precision else FP32_TOLERANCE
    if _state_gap(run("plain", batch), run("plain", changed), same) > allowed["hidden states"]:
        raise ValueError(f"{name} lets a token see later ones; give a causal language model")


def obstacle(trunk: nn.Module, head: nn.Module | None, config: PreTrainedConfig) -> str:
    """Why the shared path cannot work, as far as it shows without running the model; "" if nothing does."""
    if "position_ids" not in inspect.signature(type(trunk).forward).parameters:
        return "it takes no position ids, so completions cannot share a prompt"
    if (attention := config._attn_implementation) not in ("sdpa", "eager", "flex_attention"):
        return f"its attention '{attention}' takes no mask of its own; sdpa, eager and flex_attention do"
    try:
        layer_masks(config)
    except ValueError as error:
        return str(error)
    if head is None:
        return ""
    # a quantised or adapted head has its own forward; a sharded one keeps that of nn.Linear
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its LM head is a {type(head).__name__}, not a plain linear layer"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its LM head has forward hooks, which reading its weight would pass by"
    return ""


def difference(probe: Probe, run: RunPath, *, low_precision: bool) -> str:
    """How the shared path differs from the plain one on the probe; "" if it does not."""
    batch = probe.batch()
    plain = run("plain", batch)
    try:
        shared = run("shared", batch)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        # model code that does not know such masks fails in its own way: finding that out is what the probe is for
        return f"it does not take the masks ({type(error).__name__}: {error})"
    allowed = LOW_PRECISION_TOLERANCE if low_precision else FP32_TOLERANCE
    everywhere = torch.ones_like(batch.scored)
    gaps = {
        "hidden states": _state_gap(plain, shared, everywhere),
        "log-probs": _mean_gap(plain.logps, shared.logps),
        "entropies": _mean_gap(plain.entropy, shared.entropy),
    }
    # "not <=" so that a NaN counts as a difference
    wrong = {name: gap for name, gap in gaps.items() if not gap <= allowed[name]}
    return ", ".join(f"its {name} differ by {gap:.2g} (allowed {allowed[name]:g})" for name, gap in wrong.items())


def _state_gap(a: TokenStats, b: TokenStats, where: Tensor) -> float:
    """Largest distance between two states of a token, relative to the size of the first."""
    assert a.hidden is not None
    assert b.hidden is not None
    x, y = a.hidden[where].float(), b.hidden[where].float()
    return float(((x - y).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-6)).max())


def _mean_gap(a: Tensor | None, b: Tensor | None) -> float:
    return 0.0 if a is None or b is None else float((a - b).abs().mean())
