"""The gradient of an embedding whose weight is also the LM head's, without a second [V, H] tensor.

The head's gradient of the weight is dense. The embedding's has one row for each token read, yet torch spreads them over
a tensor of the weight's size and adds that to the head's. In an update the embedding reads a leaf of its own instead,
which shares the weight's memory; what arrives there, rows alone (`nn.Embedding.sparse`), is added to `weight.grad` in
place at once. The result is that of torch but for the order of its sums.

Only in an update, since `torch.autograd.grad` with respect to the weight would not see the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_GATHERING: ContextVar[bool] = ContextVar("gathering gradients in .grad", default=False)


@contextmanager
def gathering_gradients() -> Iterator[None]:
    """For a block whose backward passes all go to `.grad`."""
    token = _GATHERING.set(True)
    try:
        yield
    finally:
        _GATHERING.reset(token)


class TiedRows:
    """Args:
    embedding, head: the input embedding and the LM head of a model. Unless both are there and share their weight,
        nothing is done.
    """

    def __init__(self, embedding: nn.Module | None, head: nn.Module | None) -> None:
        tied = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and embedding.weight is head.weight
        self._embedding = embedding if tied else None
        self._weight: nn.Parameter | None = None  # the one that `_leaf` stands for
        self._leaf: nn.Parameter | None = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For the forward pass of the trunk.

        On a CPU only: on a GPU the rows of one token are added in no fixed order, and a run would not repeat itself.
        """
        embedding = self._embedding
        if not (isinstance(embedding, nn.Embedding) and _GATHERING.get() and torch.is_grad_enabled()):
            yield
            return
        weight, sparse = embedding.weight, embedding.sparse
        if not (isinstance(weight, nn.Parameter) and weight.requires_grad and weight.device.type == "cpu"):
            yield
            return
        if self._leaf is None or self._weight is not weight or self._leaf.data_ptr() != weight.data_ptr():
            self._weight, self._leaf = weight, _leaf(weight)
        embedding.weight, embedding.sparse = self._leaf, True
        try:
            yield
        finally:
            embedding.weight, embedding.sparse = weight, sparse


def _leaf(weight: nn.Parameter) -> nn.Parameter:
    """A leaf in the weight's memory; each gradient it gets goes on to `weight.grad`."""
    leaf = nn.Parameter(weight.detach())

    def pass_on(leaf: Tensor) -> None:
        rows, leaf.grad = leaf.grad, None
        assert rows is not None
        if weight.grad is None:  # the head's was not asked for
            weight.grad = rows.to_dense()
        else:
            weight.grad.add_(rows)

    leaf.register_post_accumulate_grad_hook(pass_on)  # type: ignore[no-untyped-call]
    return leaf
