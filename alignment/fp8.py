"""FP8 codes of a policy's weights: a quarter of fp32's bytes, for policies that are kept and not trained.

    scale = amax / 448 (1 where amax is 0),    code = e4m3fn(x / scale),    x' = scale * code

with amax over the tensor, or over each of its rows (what the first index counts). e4m3fn (Micikevicius et al. 2022,
arXiv 2209.05433) has three bits of mantissa, 448 as its largest value and no infinities: rounding moves x / scale by at
most 1/17 of itself, or below 2^-6 by at most 2^-10, so that

    |x' - x| <= max(|x| / 17, 2^-10 scale)        for every weight, but for the rounding of fp32

What that does to log-probs depends on the model; no useful bound follows from the one above. `LOGP_BOUND` is a ceiling
over what was measured on the small random models of tests/architectures.py, one of each architecture. Deeper, trained
models can be further off (SmolLM2-135M: 0.28 nats on average): `logp_error` measures a model at hand.

Vectors (norms, biases) and whatever is not of floating point stay as they are: they are less than a thousandth of a
model, and a norm's weight scales whole layers.

Such a policy serves for evaluation, as a reference, in a soup, to go back to. Never for the log-probs an importance
ratio is taken with: they would differ from the policy's at the first step, where the ratio has to be 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from alignment.adapters import is_adapted
from alignment.causal_lm import evaluating as in_eval_mode
from alignment.checkpoint import checkpoint_of, load_checkpoint_folder
from alignment.compiled import uncompiled
from alignment.errors import UserError
from alignment.logprobs import LogProbEngine
from alignment.mixture import mixture
from alignment.policy import base_model
from alignment.probe import Probe
from alignment.spread import cut_like, is_spread, whole
from alignment.swapping import swapped

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3fn; larger numbers have no code, nor have infinities."""

LOGP_BOUND = {"mean": 0.15, "largest": 0.8}
"""Nats by which log-probs of an archived policy may differ from its own, on the models of tests/architectures.py.
Measured with three seeds: 0.122 and 0.642 for Qwen3-Next, at most 0.072 and 0.371 for all others."""

Per = Literal["tensor", "row"]
Place = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    """Args:
    codes: float8_e4m3fn, of the tensor's shape.
    scale: fp32 [], or [rows, 1, ...].
    dtype: of the tensor, which `dequantise` gives back.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantise(self, device: torch.device | None = None) -> Tensor:
        """The tensor that the codes stand for, there or where the codes are; a new one in any case."""
        values = self.codes.to(device).to(torch.float32)
        return values.mul_(self.scale.to(device)).to(self.dtype)


def quantise(tensor: Tensor, per: Per = "tensor", what: str = "the tensor") -> Fp8Tensor:
    """The codes of a tensor of floating point, of any shape; `what` names it in an error.

    Args:
        per: one scale for the `tensor`, or one for each `row` of a matrix (a vector has a single one in any case).

    Raises UserError for values that are not finite in fp32.
    """
    values = tensor.detach().to(torch.float32)
    if values.numel() == 0:
        amax = values.new_zeros(())
    elif per == "row" and values.dim() > 1:
        amax = torch.linalg.vector_norm(values, float("inf"), dim=tuple(range(1, values.dim())), keepdim=True)
    else:
        amax = torch.linalg.vector_norm(values, float("inf"))
    if not bool(amax.isfinite().all()):
        raise UserError(f"{what} has values that are not finite, for which there is no FP8 code; keep a policy that is")
    # A scale below the smallest normal number would be rounded, or 0.
    scale = torch.where(amax > 0, (amax / LARGEST).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    return Fp8Tensor(codes=(values / scale).clamp_(-LARGEST, LARGEST).to(E4M3), scale=scale, dtype=tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Policy:
    """One archived policy: the name of each tensor in the module -> its codes, or the tensor where it stays exact."""

    tensors: dict[str, Fp8Tensor | Tensor]
    pinned: bool

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class Fp8Archive:
    """Policies under names, as FP8 codes.

    What is kept of a module is what its `state_dict` names among its parameters and buffers, each tensor once: with
    LoRA that is what is trained. Every rank keeps the same; of weights sharded by FSDP2 each keeps the whole, and all
    ranks must call together.

    Args:
        keep: how many are kept; the oldest goes first. Pinned ones stay and do not count.
        per: one scale for each `tensor`, or for each `row`: 4 bytes a row more, and closer where rows differ in size.
        place: codes in `host` memory, or on the `device` of the module, from where they are faster to use.
    """

    def __init__(self, keep: int = 4, per: Per = "tensor", place: Place = "host") -> None:
        if keep < 1 or per not in get_args(Per) or place not in get_args(Place):
            raise UserError(
                f"an FP8 archive: keep is {keep}, per '{per}' and place '{place}'; keep is at least 1, per is "
                f"{' or '.join(get_args(Per))}, place {' or '.join(get_args(Place))}"
            )
        self.keep, self.per, self.place = keep, per, place
        self._policies: dict[str, _Policy] = {}

    # ------------------------------------------------------------------ keeping

    @property
    def names(self) -> tuple[str, ...]:
        """Of the archived policies, the oldest first."""
        return tuple(self._policies)

    def nbytes(self, name: str | None = None) -> int:
        """Bytes of one policy, or of all."""
        return sum(p.nbytes for p in self._policies.values()) if name is None else self._find(name).nbytes

    @torch.no_grad()
    def store(self, name: str, module: nn.Module, *, pinned: bool = False) -> None:
        """Archive the weights of a module as they are; a policy of that name is replaced. In addition to the codes it
        takes one tensor in fp32 at a time.

        Args:
            pinned: it stays until it is dropped.

        Raises UserError where a weight is not finite; the archive is then as before.
        """
        tensors = {key: self._stored(key, tensor) for key, tensor in _own(module).items()}
        self._policies.pop(name, None)
        self._policies[name] = _Policy(tensors, pinned)
        passing = [n for n, policy in self._policies.items() if not policy.pinned]
        for old in passing[: -self.keep]:
            del self._policies[old]

    def drop(self, name: str) -> None:
        """Forget a policy."""
        self._find(name)
        del self._policies[name]

    def _stored(self, key: str, tensor: Tensor) -> Fp8Tensor | Tensor:
        tensor = whole(tensor.detach())
        where = torch.device("cpu") if self.place == "host" else tensor.device
        if not tensor.is_floating_point() or tensor.dim() < 2:
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise UserError(f"{key} has values that are not finite; keep a policy whose weights are")
            return tensor.to(where, copy=True)
        found = quantise(tensor, self.per, key)
        return Fp8Tensor(codes=found.codes.to(where), scale=found.scale.to(where), dtype=found.dtype)

    # ------------------------------------------------------------------ using

    @torch.no_grad()
    def tensor(self, name: str, key: str, device: torch.device | None = None) -> Tensor:
        """One tensor of an archived policy, de-quantised: a new one."""
        found = self._find(name).tensors[key]
        return found.dequantise(device) if isinstance(found, Fp8Tensor) else found.to(device, copy=True)

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of all of them, one at a time."""
        for key in self._find(name).tensors:
            yield key, self.tensor(name, key)

    def restore(self, module: nn.Module, name: str) -> None:
        """Make an archived policy the weights of the module, in place: its parameters and what an optimizer knows of
        them stay. They are what the codes say, near what was archived and not equal to it.

        Raises UserError when there is no such policy or it is of another model.
        """
        for key, own in self._fitting(module, name).items():
            _write(own, self.tensor(name, key, own.device))

    def soup(self, module: nn.Module, weights: Mapping[str, float]) -> None:
        """Make the module sum_k weights_k policy_k, summed in fp32 (Rewarded Soups, see `alignment.soup`).

        Raises UserError for weights that are no mixture, policies that are not there or of another model, and for
        adapters, whose factors cannot be mixed one by one.
        """
        if any(is_adapted(part) for part in module.modules()):
            raise UserError(
                "a mixture of the two factors of adapters is not the mixture of the adapters: export the archived "
                "policies merged and mix those (alignment soup)"
            )
        shares = dict(zip(weights, mixture(list(weights.values()), len(weights)), strict=True))
        for name in shares:
            own = self._fitting(module, name)
        for key, target in own.items():
            if not target.is_floating_point():
                continue  # positions and the like are the same in all of them
            total = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
            for name, share in shares.items():
                total.add_(self.tensor(name, key, target.device).float(), alpha=share)
            _write(target, total.to(target.dtype))

    @contextmanager
    def evaluating(self, module: nn.Module, name: str) -> Iterator[None]:
        """Inside the block the module computes with an archived policy, without gradients and in eval mode; afterwards
        it is what it was, bit for bit.

        A decoder layer is de-quantised when it is entered and let go when it is left; embeddings, LM head and what else
        is in no layer are de-quantised for the whole block. At no time is there more, so no second copy of the model.
        Of weights sharded by FSDP2 each rank puts the archived share in place of its own, which it keeps for the block.
        Everything that calls the model works: `LogProbEngine`, whose heads read weights directly, `generate`, rollouts
        (which de-quantise every layer once a token: for long ones `restore` is faster).

        Raises UserError as `restore` does.
        """
        own = self._fitting(module, name)
        exchanges = {key: (tensor, partial(self._value, name, key, tensor)) for key, tensor in own.items()}
        with torch.no_grad(), in_eval_mode(module), swapped(module, exchanges):
            yield

    def _value(self, name: str, key: str, place: Tensor) -> Tensor:
        return self.tensor(name, key, place.device).to(place.dtype)

    def _find(self, name: str) -> _Policy:
        if name not in self._policies:
            known = ", ".join(self._policies) or "none"
            raise UserError(f"no archived policy '{name}'; there are: {known}")
        return self._policies[name]

    def _fitting(self, module: nn.Module, name: str) -> dict[str, Tensor]:
        """The module's tensors. Raises UserError unless the policy has exactly these."""
        own, stored = _own(module), self._find(name).tensors
        if odd := sorted(own.keys() ^ stored.keys()):
            where = "module" if odd[0] in own else "archive"
            raise UserError(f"the archived policy '{name}' is of another model: only the {where} has {odd[0]}")
        for key, tensor in own.items():
            kept = stored[key]
            shape = kept.codes.shape if isinstance(kept, Fp8Tensor) else kept.shape
            if shape != tensor.shape:
                raise UserError(
                    f"the archived policy '{name}' is of another model: {key} is {tuple(shape)} there and "
                    f"{tuple(tensor.shape)} here"
                )
        return own

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The codes themselves, not copies."""
        return {
            "policies": [
                {"name": name, "pinned": policy.pinned, "tensors": {k: _plain(t) for k, t in policy.tensors.items()}}
                for name, policy in self._policies.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policies = {
            policy["name"]: _Policy({k: _of_plain(t) for k, t in policy["tensors"].items()}, policy["pinned"])
            for policy in state["policies"]
        }

    def to(self, device: torch.device) -> None:
        """Move the codes, unless their place is the host."""
        if self.place == "host":
            return
        for policy in self._policies.values():
            for key, kept in policy.tensors.items():
                if isinstance(kept, Fp8Tensor):
                    policy.tensors[key] = Fp8Tensor(kept.codes.to(device), kept.scale.to(device), kept.dtype)
                else:
                    policy.tensors[key] = kept.to(device)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Self:
        """The archive that `callbacks.Fp8PolicyArchive` left in a checkpoint, or in the last one of a run's folder.
        Raises UserError for a checkpoint without."""
        return cls.of_state(load_checkpoint_folder(checkpoint_of(path)))

    @classmethod
    def of_state(cls, checkpoint: Mapping[str, Any]) -> Self:
        """`from_checkpoint` of one that has been read."""
        for key, state in checkpoint.get("callbacks", {}).items():
            if key.startswith("Fp8PolicyArchive"):
                archive = cls()
                archive.load_state_dict(state["archive"])
                return archive
        raise UserError("the checkpoint holds no archived policies; train with callbacks.Fp8PolicyArchive")

    def over(self, state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """A module's state dict with an archived policy in place of its own weights; both names of tied ones get it.
        Raises UserError when there is no such policy or it is of another model."""
        keys = self._find(name).tensors
        if odd := sorted(set(keys) - set(state)):
            raise UserError(f"the archived policy '{name}' is of another model: only the archive has {odd[0]}")
        values = {id(state[key]): self.tensor(name, key) for key in keys}
        return {key: values.get(id(tensor), tensor) for key, tensor in state.items()}


@torch.no_grad()
def logp_error(archive: Fp8Archive, name: str, module: nn.Module, engine: LogProbEngine) -> dict[str, float]:
    """How far the log-probs of an archived policy are from the module's, on the batch of `alignment.probe`.

    Args:
        module: what was archived; as it was then, for the error of the codes alone. engine: of the policy in it.

    Returns nats over the tokens of the batch: `mean`, the mean of |difference|, and `largest`.
    """
    config = base_model(module).config.get_text_config(decoder=True)
    batch = Probe(config=config, device=next(module.parameters()).device).batch()
    with in_eval_mode(module), uncompiled(module):
        own = engine(batch).logps
    with archive.evaluating(module, name):
        archived = engine(batch).logps
    assert own is not None
    assert archived is not None
    gaps = (own - archived).abs()[batch.scored]
    return {"mean": float(gaps.mean()), "largest": float(gaps.max())}


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor, of what `state_dict` names and the module itself has; tied weights under their first name."""
    named = chain(module.named_parameters(), module.named_buffers())
    kept = module.state_dict().keys()
    return {name: tensor for name, tensor in named if name in kept}


@torch.no_grad()
def _write(target: Tensor, values: Tensor) -> None:
    target.copy_(cut_like(values, target) if is_spread(target) else values)


def _plain(kept: Fp8Tensor | Tensor) -> dict[str, Any] | Tensor:
    if isinstance(kept, Tensor):
        return kept
    return {"codes": kept.codes, "scale": kept.scale, "dtype": kept.dtype}


def _of_plain(kept: Mapping[str, Any] | Tensor) -> Fp8Tensor | Tensor:
    return kept if isinstance(kept, Tensor) else Fp8Tensor(kept["codes"], kept["scale"], kept["dtype"])
