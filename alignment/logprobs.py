"""Token log-probs, entropies and hidden states of a GroupBatch under a causal language model.

Two paths give the same numbers:

shared  each prompt is computed once, with all its completions behind it in one row (`alignment.layout`); the LM head is
        applied to scored positions only, in tiles (`alignment.lm_head`).
plain   one right-padded row per completion through the model's own forward and its own logits. It serves any causal
        model, and it is the oracle of the shared path.

`verify()` runs both once on the loaded model and keeps `shared` only where it reproduces `plain`. Bounds, tested in
tests/unit/test_logprobs.py on small random models: fp32 1e-5 on token log-probs and 0.999999 on the cosine of all
gradients; bf16 BF16_BOUND on token log-probs. On the shared path a completion's values do not change by one bit when
the content of another completion changes (dense models; 1e-6 for mixtures of experts, whose matrix products depend on
routing); a change of another's length moves the row and may change the last bits (1e-5).

Legend: P, N, C, H, V as in `alignment.batches`; R rows of W tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from alignment.batches import GroupBatch
from alignment.block_mask import block_mask
from alignment.causal_lm import decoder_of, evaluating, is_low_precision, logit_form
from alignment.compiled import uncompiled
from alignment.errors import UserError
from alignment.grouped_attention import configs_of
from alignment.layout import Layout, additive, attention_mask, layer_masks, pack
from alignment.lm_head import log_collision, score_tokens, whole_stats
from alignment.prefix_attention import prefix_attention
from alignment.probe import Probe, check_causal, difference, obstacle
from alignment.sharding import inside, is_sharded, one_token
from alignment.tied_rows import TiedRows

log = logging.getLogger(__name__)

# Nats between the two paths in bf16. Measured on the models of tests/architectures.py with three seeds: at most 0.013,
# while either path is up to 0.07 from the same model in fp32.
BF16_BOUND = 0.03

Path = Literal["auto", "shared", "plain"]
Hidden = Literal["before", "at"] | None
Mask = Tensor | BlockMask

_Found = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """What a model says about a batch's completion tokens; None for what was not asked.

    Args:
        logps: [C] fp32, log-prob of each token given everything before it; exactly 0 where a token is not scored.
        entropy: [C] fp32 nats, of the distribution each token was drawn from; exactly 0 where it is not scored.
        hidden: [C, H] in the model's dtype, final hidden state of every token, scored or not.
        collision: [C] fp32 log sum_v p_v^2 of the distribution each token was drawn from, without gradient; exactly 0
            where it is not scored.
    """

    logps: Tensor | None
    entropy: Tensor | None
    hidden: Tensor | None
    collision: Tensor | None = None


class LogProbEngine:
    """Computes `TokenStats` of a model, wrapped by peft or not, on the fastest path that reproduces it.

    Args:
        model: a causal language model of transformers, or a wrapper around one that leaves its inputs as they are.
        path: "auto" takes shared where `verify()` allows it; "shared" makes it an error when it does not.
        tile_bytes: bound in bytes of one tile of logits on the shared path.
        pad_id: any token id; it fills, it never masks.

    Attributes:
        path: the path in force, "shared" or "plain". reason: why plain, "" on the shared path.

    Raises ValueError for an encoder-decoder, for a model in which a token sees later ones, and for path="shared" on a
    model that the shared path does not reproduce.
    """

    def __init__(self, model: nn.Module, *, path: Path = "auto", tile_bytes: int = 8 << 20, pad_id: int = 0) -> None:
        if path not in ("auto", "shared", "plain"):
            raise ValueError(f"path must be 'auto', 'shared' or 'plain', not {path!r}")
        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        if inner is None:
            raise ValueError(f"{type(model).__name__} holds no transformers model")
        if inner.config.is_encoder_decoder:
            raise ValueError(f"{type(inner).__name__} is an encoder-decoder; give a decoder-only causal language model")
        self._model, self._inner, self._asked = model, inner, path
        self._config = inner.config.get_text_config(decoder=True)
        self._head: nn.Module | None = inner.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._trunk = decoder_of(inner) if self._head is not None else inner
        self._tied_rows = TiedRows(inner.get_input_embeddings(), self._head)
        self._tile_bytes, self._pad_id = tile_bytes, pad_id
        self._attending = configs_of(inner)
        self._splits = True  # attention within groups where it can be, a mask over whole rows elsewhere
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
        self._verified = False
        self.path: Literal["shared", "plain"] = "plain"
        self.reason = "not verified yet"

    @property
    def has_head(self) -> bool:
        """Whether there are logits to take log-probs of."""
        return self._head is not None

    def __call__(
        self,
        batch: GroupBatch,
        *,
        logps: bool = True,
        entropy: bool = False,
        hidden: Hidden = None,
        temperature: float = 1.0,
        collision: bool = False,
    ) -> TokenStats:
        """Run the model once over the batch.

        Args:
            logps, entropy: whether to return them; both need the LM head.
            hidden: "before" returns the state that predicts each token (values in PPO), "at" the one after reading it.
            temperature: logits are divided by it; sampled tokens are scored at the temperature they were drawn with.
            collision: whether to return it, with the log-probs that must be asked for too.

        The model runs in whatever mode it is in (train or eval, adapters on or off, autocast). Without anything to
        compute (no completion token, or none scored and no states asked) the model does not run and the values are
        zeros without a graph; but a sharded one runs, and the values have its graph, since other ranks wait for it.
        """
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if (logps or entropy) and self._head is None:
            raise ValueError(f"{type(self._inner).__name__} has no LM head; ask for hidden states only")
        if not self._verified:
            self.verify()
        return self._run(self.path, batch, logps, entropy, hidden, temperature, collision)

    def _run(
        self,
        path: str,
        batch: GroupBatch,
        logps: bool,
        entropy: bool,
        hidden: Hidden,
        temperature: float,
        collision: bool = False,
    ) -> TokenStats:
        scored = batch.scored.nonzero()[:, 0]
        head = (logps or entropy) and scored.numel() > 0
        idle = len(batch.completion_ids) == 0 or not (head or hidden)
        run = self._shared if path == "shared" else self._plain
        if self.sharded:
            given = one_token(self._pad_id, batch.device) if idle else batch
            places = scored if logps or entropy else None
            lp, ent, states, col = inside(
                self._inner, lambda: run(given, places, entropy, hidden, temperature, collision)
            )
            states = states[scored[:0]] if idle and states is not None else states
        elif idle:
            size = (len(batch.completion_ids), self._config.hidden_size)
            states = torch.zeros(size, dtype=self._inner.dtype, device=batch.device) if hidden else None
            lp, ent, col = None, None, None
        else:
            lp, ent, states, col = run(batch, scored if head else None, entropy, hidden, temperature, collision)
        return TokenStats(
            logps=_spread(lp, scored, batch) if logps else None,
            entropy=_spread(ent, scored, batch) if entropy else None,
            hidden=states,
            collision=_spread(col, scored, batch) if collision else None,
        )

    @property
    def sharded(self) -> bool:
        """Whether each forward of the model is a collective (`alignment.sharding`)."""
        return is_sharded(self._inner)

    def score(
        self, batch: GroupBatch, states: Tensor, *, entropy: bool = False, collision: bool = False
    ) -> TokenStats:
        """`TokenStats` from states [C, H] that were asked for as hidden="before"; differentiable with respect to them.

        Raises UserError where the LM head is not a plain linear layer, and where `verify` has not found that this is
        how the model makes its logits.
        """
        if not self._verified:
            self.verify()
        if type(self._head) is not nn.Linear:
            raise UserError(
                f"gradients at hidden states need a plain linear LM head; {type(self._model).__name__} has another, or "
                "an adapter on it: use those at the parameters"
            )
        if self.path != "shared":
            raise UserError(
                f"gradients at hidden states need the shared path; {type(self._model).__name__} takes the plain one "
                f"({self.reason}): use those at the parameters"
            )
        scored = batch.scored.nonzero()[:, 0]
        asked = states[scored], batch.completion_ids[scored], entropy, 1.0, collision
        lp, ent, col = inside(self._inner, lambda: self._scores(*asked))
        return TokenStats(
            logps=_spread(lp, scored, batch),
            entropy=_spread(ent, scored, batch) if entropy else None,
            hidden=states,
            collision=_spread(col, scored, batch) if collision else None,
        )

    # ------------------------------------------------------------------ shared path

    def _shared(
        self,
        batch: GroupBatch,
        scored: Tensor | None,
        entropy: bool,
        hidden: Hidden,
        temperature: float,
        collision: bool = False,
    ) -> _Found:
        """Log-probs and entropies [scored] (None without `scored`), states [C, H] (None unless asked), collisions."""
        layout = pack(batch, self._pad_id)
        split = self._split(layout)
        attention = prefix_attention(self._attending, layout.sections) if split else nullcontext()
        # compilers know no gradient in rows, and sharding keeps gradients in its own way
        dense = self._trunk._compiled_call_impl is not None or self.sharded
        with attention, nullcontext() if dense else self._tied_rows.apart():
            output = self._trunk(
                input_ids=layout.input_ids,
                attention_mask=None if split else self._masks(layout),
                position_ids=layout.position_ids,
                use_cache=False,
            )
        states = output[0].flatten(0, 1)
        lp, ent, col = None, None, None
        if scored is not None:
            targets = batch.completion_ids[scored]
            lp, ent, col = self._scores(states[layout.predictor[scored]], targets, entropy, temperature, collision)
        index = {"before": layout.predictor, "at": layout.place}
        return lp, ent, states[index[hidden]] if hidden else None, col

    def _scores(
        self, states: Tensor, targets: Tensor, entropy: bool, temperature: float, collision: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs of targets [n], entropies and collisions [n] or None, from the states [n, H] that predict them."""
        head = self._head
        assert isinstance(head, nn.Linear)  # the shared path is only chosen for a plain linear head
        form, weight, bias, size = logit_form(self._config), head.weight, head.bias, self._tile_bytes
        lp, ent = score_tokens(
            states, weight, bias, targets, form=form, temperature=temperature, entropy=entropy, tile_bytes=size
        )
        if not collision:
            return lp, ent, None
        return lp, ent, log_collision(states, weight, bias, form=form, temperature=temperature, tile_bytes=size)

    def _split(self, layout: Layout) -> bool:
        """Whether attention can be computed within groups: on a CPU, where no layer sees less than a whole group, and
        no forward runs again in the backward."""
        if not self._splits or layout.input_ids.device.type != "cpu" or self._config._attn_implementation != "sdpa":
            return False
        if self._inner.training and self._inner.is_gradient_checkpointing:
            return False
        longest = max(s.prompt + max(s.completions, default=0) for s in layout.sections)
        limits = (limit for mask in layer_masks(self._config).values() for limit in (mask.window, mask.chunk))
        return all(limit is None or limit >= longest for limit in limits)

    def _masks(self, layout: Layout) -> Mask | dict[str, Mask]:
        """One mask, or one per kind of layer where a model has several kinds (it then takes them by name)."""
        layers, attention = layer_masks(self._config), self._config._attn_implementation
        masks: dict[str, Mask] = {}
        for kind, layer in layers.items():
            if attention == "flex_attention":
                masks[kind] = block_mask(layout, layer)
            else:
                mask = attention_mask(layout, layer)
                masks[kind] = additive(mask, self._inner.dtype) if attention == "eager" else mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    # ------------------------------------------------------------------ plain path

    def _plain(
        self,
        batch: GroupBatch,
        scored: Tensor | None,
        entropy: bool,
        hidden: Hidden,
        temperature: float,
        collision: bool = False,
    ) -> _Found:
        """As `_shared`. Holds logits of [N, columns, V], where columns are the positions some row scores."""
        rows = batch.padded(self._pad_id)
        row, column = (rows.position >= 0).nonzero(as_tuple=True)  # [C], in the order of the flat tensors
        inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "use_cache": False}
        lp, ent, col = None, None, None
        if scored is None:
            states = self._trunk(**inputs)[0]
        else:
            columns, at = torch.unique(column[scored] - 1, return_inverse=True)
            if self._keeps_logits:
                inputs["logits_to_keep"] = columns
            with _captured(self._trunk) as captured:
                logits = self._model(**inputs).logits
            states = captured[0]
            picked = logits[row[scored], at if self._keeps_logits else columns[at]]
            lp, ent, col = whole_stats(picked, temperature, batch.completion_ids[scored], entropy, collision)
        if states.shape[1] != rows.input_ids.shape[1]:
            raise ValueError(
                f"{type(self._model).__name__} adds tokens to its input (prompt or prefix tuning); use LoRA instead"
            )
        if hidden is None:
            return lp, ent, None, col
        return lp, ent, states[row, column - 1 if hidden == "before" else column], col

    # ------------------------------------------------------------------ choosing

    def verify(self, like: LogProbEngine | None = None) -> None:
        """Decide `path` and `reason` on the loaded model; logs the outcome. Runs once, later calls return at once.

        The verdict of an engine `like` this one is taken over when its model is of the same make: what the two paths
        compute is then the same whatever the weights.
        """
        if self._verified:
            return
        if like is not None and like._verified and like._make() == self._make():
            self.path, self.reason, self._splits, self._verified = like.path, like.reason, like._splits, True
            return
        name = type(self._inner).__name__
        low = is_low_precision(self._inner)
        probe = Probe(config=self._config, device=next(self._inner.parameters()).device)
        exact = torch.autocast(probe.device.type, enabled=False)
        with evaluating(self._model), uncompiled(self._model), torch.no_grad(), exact:
            check_causal(name, probe, self._probe_path, low_precision=low)
            if self._asked == "plain":
                reason = "it was asked for"
            else:
                reason = obstacle(self._trunk, self._head, self._config)
                reason = reason or self._difference(probe, low)
        if reason and self._asked == "shared":
            raise ValueError(f"the shared path does not fit {name}: {reason}; use path='auto'")
        self.path, self.reason = ("plain", reason) if reason else ("shared", "")
        self._verified = True
        if self._asked == "auto" and reason:
            log.warning("log-probs of %s take the plain path: %s", name, reason)
        else:
            log.info("log-probs of %s take the %s path", name, self.path)

    def _make(self) -> tuple[object, ...]:
        """What the verdict depends on, weights apart."""
        inner, attention = self._inner, self._config._attn_implementation
        kinds = [(type(m), bool(m._forward_hooks or m._forward_pre_hooks)) for m in self._model.modules()]
        settings = (self._asked, attention, inner.config.to_dict())
        return settings, kinds, inner.dtype, inner.device.type, is_low_precision(inner)

    def _difference(self, probe: Probe, low_precision: bool) -> str:
        """`probe.difference`; a model that attends in its own way gets masks."""
        reason = difference(probe, self._probe_path, low_precision=low_precision)
        if reason and self._splits:
            self._splits = False
            reason = difference(probe, self._probe_path, low_precision=low_precision)
        return reason

    def _probe_path(self, path: str, batch: GroupBatch) -> TokenStats:
        scores = self._head is not None
        return self._run(path, batch, scores, scores, "at", 1.0)


def _spread(values: Tensor | None, scored: Tensor, batch: GroupBatch) -> Tensor:
    """[scored] -> [C] fp32, 0 elsewhere."""
    out = torch.zeros(len(batch.completion_ids), dtype=torch.float32, device=batch.device)
    return out if values is None else out.index_put((scored,), values.float())


@contextmanager
def _captured(module: nn.Module) -> Iterator[list[Tensor]]:
    """The first output of every call of `module` inside the block."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output[0]))
    try:
        yield seen
    finally:
        handle.remove()
