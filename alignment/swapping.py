"""Other weights for a model while it runs, a decoder layer at a time.

A parameter's `data` is exchanged and put back: the parameter stays the same object, so that tied weights, optimizers
and gradients that wait for a backward pass know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from alignment.compiled import uncompiled
from alignment.spread import is_spread, local, own_block

Exchange = tuple[Tensor, Callable[[], Tensor]]
"""A parameter or buffer, and what makes its other value: of the same shape, dtype and device."""


@contextmanager
def swapped(module: nn.Module, exchanges: Mapping[str, Exchange]) -> Iterator[None]:
    """Inside the block the module runs with other values of some of its tensors.

    Those of a decoder layer are made when the layer is called, and gone when it returns. Those outside of all layers,
    and those that a layer shares with something outside, are made at once and kept for the block: heads are read there
    without being called. Of a model without decoder layers of transformers that is all of it. Of a tensor that is
    spread over ranks (FSDP2) the part that this process holds is overwritten for the block, where layers gather it,
    and kept beside it meanwhile; the other value is whole, made and cut one at a time.

    Blocks may be nested: the inner one counts. Call it without gradients; compiled layers run as they are.
    """
    held = [e for e in exchanges.values() if not is_spread(e[0])]
    layers = decoder_layers(module)
    outside = _outside(module, layers)
    kept = _Part([e for e in held if id(e[0]) in outside])
    spread = _Spread([e for e in exchanges.values() if is_spread(e[0])])
    parts: list[_Part] = [kept, spread]
    handles: list[Any] = []
    try:
        kept.fill()
        spread.fill()
        for layer in layers:
            inside = {id(t) for t in (*layer.parameters(), *layer.buffers())} - outside
            part = _Part([e for e in held if id(e[0]) in inside])
            parts.append(part)
            # The last hook before and the first one after: nested blocks then open and close like brackets.
            handles.append(layer.register_forward_pre_hook(part.before))
            handles.append(layer.register_forward_hook(part.after, prepend=True, always_call=True))
        with uncompiled(module), _casting_anew():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for part in reversed(parts):
            part.empty()


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The outermost layers of transformers models in it, in order."""
    if isinstance(module, GradientCheckpointingLayer):
        return [module]
    return [layer for child in module.children() for layer in decoder_layers(child)]


def _outside(module: nn.Module, layers: list[nn.Module]) -> set[int]:
    """Ids of the tensors that a module outside of all layers has."""
    inside = {part for layer in layers for part in layer.modules()}
    return {
        id(tensor)
        for part in module.modules()
        if part not in inside
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    }


@contextmanager
def _casting_anew() -> Iterator[None]:
    """Autocast remembers a parameter's low-precision copy by the parameter alone: that of its other value must neither
    be taken nor left behind."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _Part:
    """Tensors that are exchanged together."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges
        self._own: list[Tensor] = []

    def fill(self) -> None:
        for tensor, make in self._exchanges:
            value = make()
            self._own.append(tensor.data)
            tensor.data = value

    def empty(self) -> None:
        """Put back what `fill` has taken, or as far as it got."""
        for (tensor, _), own in zip(self._exchanges, self._own, strict=False):
            tensor.data = own
        self._own = []

    def before(self, layer: nn.Module, args: Any) -> None:
        self.fill()

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.empty()


class _Spread(_Part):
    """Those that are spread over ranks: in place, since whoever gathers them knows their memory."""

    @torch.no_grad()
    def fill(self) -> None:
        for tensor, make in self._exchanges:
            value, part = make(), local(tensor)
            self._own.append(part.clone())
            part.copy_(own_block(value, tensor))

    @torch.no_grad()
    def empty(self) -> None:
        for (tensor, _), own in zip(self._exchanges, self._own, strict=False):
            local(tensor).copy_(own)
        self._own = []
