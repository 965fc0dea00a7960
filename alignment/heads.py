"""Sub-policy heads on a shared trunk, one per reward, and the attention that fuses them into one policy.

    u_k   = h + r^(-1/2) U_k gelu(D_k h)           sub-policy k:  log pi_k = log_softmax(W u_k)         U_k = 0 at first
    s_k   = (Q_k h) . (C_k u_k) / sqrt(width)      attention head k scores sub-policy k                 Q_k = 0 at first
    alpha = softmax_k(s_k / tau + log w_k)         w the preference; w_k = 0 leaves head k out

pool         policy                               vocabulary projections   what it likes
log_linear   log_softmax(sum_k alpha_k log pi_k)  1                        tokens that no head rules out
linear       log sum_k alpha_k pi_k               K                        tokens that some head likes

With the shared LM head W the log-linear pool is log_softmax(W sum_k alpha_k u_k), exactly: fusing is a layer between
trunk and LM head. `Heads.attach` puts it there, so log-probs, rollouts and `generate` all see the fused policy. Where
an architecture caps its logits, the pool is taken before the cap. Per token it is the policy that is best for the
weighted rewards under KL to one reference (MOD, Shi et al. 2024, arXiv 2406.18853). At first every u_k is h, bit for
bit: the policy is the model it is built on.

Legend: h [..., H] states of the trunk that predict a token, K heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.batches import GroupBatch
from alignment.causal_lm import decoder_of
from alignment.errors import UserError
from alignment.full_kl import Head
from alignment.head_config import BudgetConfig, FusionConfig, HeadsConfig, Pool
from alignment.lm_head import LogitForm
from alignment.policy import base_model
from alignment.randomness import generator
from alignment.reference import Reference

# --------------------------------------------------------------------------------------------------------------- parts


class SubPolicy(nn.Module):
    """What a head adds to a state: scale U gelu(D h). Parameters in fp32, products in the dtype of the state."""

    def __init__(self, hidden: int, rank: int, scale: float, draw: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, hidden, generator=draw) / math.sqrt(hidden))
        self.up = nn.Parameter(torch.zeros(hidden, rank))
        self.scale = scale

    def forward(self, h: Tensor, *, frozen: bool = False) -> Tensor:
        """[..., H] -> [..., H]. `frozen`: no gradient to the head."""
        down, up = (w.detach() if frozen else w for w in (self.down, self.up))
        inner = F.gelu(F.linear(h, down.to(h.dtype)))
        return F.linear(inner, up.to(inner.dtype)) * self.scale


class Fusion(nn.Module):
    """Attention whose heads are as many as the rewards: head k says how well sub-policy k fits the state."""

    def __init__(self, hidden: int, heads: int, width: int, draw: torch.Generator) -> None:
        super().__init__()
        self.num_heads = heads
        self.query = nn.Parameter(torch.zeros(heads, width, hidden))
        self.key = nn.Parameter(torch.randn(heads, width, hidden, generator=draw) / math.sqrt(hidden))

    def score(self, k: int, h: Tensor, u: Tensor, *, frozen: bool = False) -> Tensor:
        """[..., H], [..., H] -> [...] fp32. `frozen`: no gradient to the fusion."""
        query, key = (w[k].detach() if frozen else w[k] for w in (self.query, self.key))
        product = F.linear(h, query.to(h.dtype)).float() * F.linear(u, key.to(u.dtype)).float()
        return product.sum(-1) / math.sqrt(self.query.shape[1])


def mix(h: Tensor, deltas: Sequence[Tensor], alpha: Tensor) -> Tensor:
    """h + sum_k alpha_k delta_k: [..., H], K of [..., H], [..., K] -> [..., H] in the dtype of h."""
    out = h
    for k, delta in enumerate(deltas):
        out = out + alpha[..., k, None].to(delta.dtype) * delta
    return out.to(h.dtype)


def mixture(states: Sequence[Tensor], log_alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """log sum_k alpha_k pi_k: K of [..., H], [..., K] -> [..., V] log-probs in fp32. Holds K times as many."""
    logps = torch.stack([F.linear(u, weight, bias).float().log_softmax(-1) for u in states])
    return torch.logsumexp(logps + log_alpha.movedim(-1, 0)[..., None], dim=0)


# ------------------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True, kw_only=True)
class HeadsSpec:
    """Everything about heads that is not a tensor: what an export needs to build them again."""

    names: tuple[str, ...]
    hidden: int
    rank: int
    width: int
    scaled: bool
    pool: Pool
    temperature: float
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        policy: nn.Module,
        weights: Mapping[str, float],
        heads: HeadsConfig,
        fusion: FusionConfig,
        budget: BudgetConfig | None = None,
    ) -> HeadsSpec:
        """For a policy, with a head for each name in `weights`. Raises UserError for what cannot be fused."""
        head = lm_head_of(policy, fusion.pool)
        hidden, count = head.weight.shape[1], len(weights)
        rank, width = heads.rank or max(8, hidden // 4), fusion.width or max(8, hidden // count)
        if budget is not None:
            trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
            rank, width = budget.fit(trained, hidden, count)
        return cls(
            names=tuple(weights),
            hidden=hidden,
            rank=rank,
            width=width,
            scaled=heads.scaled,
            pool=fusion.pool,
            temperature=fusion.temperature,
            weights=preference(weights, {}),
        )


def lm_head_of(policy: nn.Module, pool: Pool) -> Head:
    """The policy's LM head. Raises UserError where sub-policies cannot share it."""
    try:
        head = Head.of(policy)
    except ValueError as error:
        raise UserError(f"sub-policies share the LM head: {error}") from error
    if pool == "linear" and head.form != LogitForm():
        raise UserError("fusion.pool=linear needs plain logits, and this model scales or caps them; use log_linear")
    return head


def preference(weights: Mapping[str, float], given: Mapping[str, float]) -> tuple[float, ...]:
    """`weights` with those in `given` in their place, as shares of 1. Raises UserError unless they are one."""
    if unknown := sorted(set(given) - set(weights)):
        raise UserError(f"a preference names {', '.join(unknown)}, no reward; there are {', '.join(weights)}")
    values = [float({**weights, **given}[name]) for name in weights]
    if not all(0 <= value < math.inf for value in values) or sum(values) == 0:
        told = ", ".join(f"{name} {value:g}" for name, value in zip(weights, values, strict=True))
        raise UserError(
            f"a preference is a weight of at least 0 for each reward, one of them above 0; got {told} (turn a reward "
            "round inside it, not by a negative weight)"
        )
    return tuple(value / sum(values) for value in values)


class Heads(nn.Module):
    """K sub-policies and their fusion.

    Args:
        spec: see HeadsSpec.
        seed: of the random half of the weights.

    Attributes:
        preference: K shares of 1, the w in force.
    """

    prior: Tensor

    def __init__(self, spec: HeadsSpec, seed: int = 0) -> None:
        super().__init__()
        count = len(spec.names)
        scale = spec.rank**-0.5 if spec.scaled else 1.0
        self.spec = spec
        self.subs = nn.ModuleList(
            SubPolicy(spec.hidden, spec.rank, scale, generator(seed, "head", name)) for name in spec.names
        )
        self.fusion = Fusion(spec.hidden, count, spec.width, generator(seed, "fusion"))
        assert self.fusion.num_heads == len(self.subs), "one attention head per reward"
        self.register_buffer("prior", torch.zeros(count), persistent=False)
        self._attached = True
        self.prefer(spec.weights)

    def prefer(self, weights: Sequence[float] | Mapping[str, float]) -> None:
        """Other weights w from now on: K shares of 1, or by name, where a reward that is not named keeps the share in
        `spec`. Raises UserError as `preference` does."""
        if isinstance(weights, Mapping):
            weights = preference(dict(zip(self.spec.names, self.spec.weights, strict=True)), weights)
        if len(weights) != len(self.subs):
            raise UserError(f"{len(weights)} weights for {len(self.subs)} heads; give one for each, or by name")
        self.preference = tuple(weights)
        self.prior.copy_(torch.tensor(self.preference).log())

    @contextmanager
    def preferring(self, weights: Sequence[float] | Mapping[str, float]) -> Iterator[None]:
        """Other weights w in this block, as in `prefer`; a single one above 0 makes the policy that head's own."""
        before = self.preference
        self.prefer(weights)
        try:
            yield
        finally:
            self.prefer(before)

    def alone(self, k: int) -> tuple[float, ...]:
        """The preference under which the policy is head k."""
        return tuple(float(j == k) for j in range(len(self.subs)))

    @property
    def active(self) -> list[int]:
        """Heads with a weight above 0."""
        return [k for k, weight in enumerate(self.preference) if weight > 0]

    def log_alpha(self, scores: Tensor) -> Tensor:
        """Scores [..., A] of the A active heads -> log fusion weights [..., A], fp32."""
        return (scores / self.spec.temperature + self.prior[self.active]).log_softmax(-1)

    def deltas(self, h: Tensor, *, frozen: bool = False) -> list[Tensor]:
        """What each active head adds to h."""
        return [self.subs[k](h, frozen=frozen) for k in self.active]

    def scores(self, h: Tensor, deltas: Sequence[Tensor], *, frozen: bool = False) -> Tensor:
        """[..., A] of the active heads."""
        found = [self.fusion.score(k, h, h + d, frozen=frozen) for k, d in zip(self.active, deltas, strict=True)]
        return torch.stack(found, dim=-1)

    def forward(self, h: Tensor) -> Tensor:
        """[..., H] -> the state that the LM head makes the log-linear pool of."""
        deltas = self.deltas(h)
        return mix(h, deltas, self.log_alpha(self.scores(h, deltas)).exp())

    # ------------------------------------------------------------------ in the model

    def attach(self, policy: nn.Module) -> None:
        """Put the fusion between trunk and LM head of a causal language model, wrapped by peft or not."""
        inner = base_model(policy)
        decoder_of(inner).register_forward_hook(self._fuse)
        if self.spec.pool == "linear":
            inner.get_output_embeddings().register_forward_hook(self._pool)  # type: ignore[no-untyped-call]

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The model without heads in this block: states of the trunk, and the logits it makes of them."""
        before, self._attached = self._attached, False
        try:
            yield
        finally:
            self._attached = before

    @property
    def _in_states(self) -> bool:
        """Whether fusing changes the trunk's states; a single head always can."""
        return self.spec.pool == "log_linear" or len(self.active) == 1

    def _fuse(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not (self._attached and self._in_states):
            return None
        if isinstance(output, tuple):
            return (self(output[0]), *output[1:])
        output[next(iter(output))] = self(output[0])  # a ModelOutput: its first entry under its own name
        return output

    def _pool(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self._attached or self._in_states:
            return None
        assert isinstance(module, nn.Linear)
        h = args[0]
        deltas = self.deltas(h)
        log_alpha = self.log_alpha(self.scores(h, deltas))
        return mixture([h + d for d in deltas], log_alpha, module.weight, module.bias)


class Headless(Reference):
    """The reference of a policy with heads: what it is without them."""

    kind = "headless"

    def __init__(self, inner: Reference, heads: Heads) -> None:
        self._inner, self._heads = inner, heads

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        with self._heads.detached():
            return self._inner.token_logps(batch, temperature)

    def states(self, batch: GroupBatch) -> tuple[Tensor, Head]:
        with self._heads.detached():
            return self._inner.states(batch)
