"""The gradient of a weight that embeds and scores: rows beside the head's dense gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.batches import GroupBatch
from alignment.components import GradientStore
from alignment.logprobs import LogProbEngine
from alignment.tied_rows import gathering_gradients
from tests.architectures import DENSE, build, ragged_batch


class Operations(TorchDispatchMode):
    """Counts the operations inside the block by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def model_of(name: str = "llama-tied") -> nn.Module:
    return build(DENSE[name]())


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


def engine_of(model: nn.Module, path: str) -> LogProbEngine:
    engine = LogProbEngine(model, path=path)
    engine.verify()
    return engine


def gradient(model: nn.Module) -> Tensor:
    found = model.get_input_embeddings().weight.grad
    assert found is not None
    assert not found.is_sparse
    model.zero_grad(set_to_none=True)
    return found


def squares(engine: LogProbEngine, batch: GroupBatch, **asked: object) -> Tensor:
    out = engine(batch, **asked)
    return sum(t.square().sum() for t in (out.logps, out.entropy, out.hidden) if t is not None)


def states_alone(engine: LogProbEngine, batch: GroupBatch) -> Tensor:
    """The head is applied, and nothing asks for its gradient."""
    return engine(batch, hidden="before").hidden.square().sum()


LOSSES: dict[str, Callable[[LogProbEngine, GroupBatch], Tensor]] = {
    "log-probs": squares,
    "log-probs, entropies and states": lambda engine, batch: squares(engine, batch, entropy=True, hidden="before"),
    "states alone": states_alone,
    "states without a head": lambda engine, batch: squares(engine, batch, logps=False, hidden="at"),
}


@pytest.mark.parametrize("name", ["llama-tied", "llama", "gemma3"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_gradient_is_dense_and_that_of_the_models_own_forward(name, loss):
    """The plain path is the model's own forward and torch's own backward; a second micro-batch adds to the first."""
    model, batch = model_of(name), ragged_batch()
    embedding = model.get_input_embeddings()
    weight, found = embedding.weight, []
    for path in ("plain", "shared"):
        engine = engine_of(model, path)
        for _ in range(2):
            with gathering_gradients() if path == "shared" else nullcontext():
                loss(engine, batch).backward()
            weight.data.mul_(1.01)
        weight.data.div_(1.01**2)
        found.append(gradient(model))
    check(found[1], found[0])
    assert embedding.weight is weight
    assert not embedding.sparse


@pytest.mark.parametrize(
    ("name", "gathers", "spread"), [("llama-tied", True, 0), ("llama-tied", False, 1), ("llama", True, 1)]
)
def test_rows_are_spread_over_a_dense_tensor_where_the_weight_is_not_shared_or_where_it_may_be_asked_for(
    name, gathers, spread
):
    model, batch = model_of(name), ragged_batch()
    engine = engine_of(model, "shared")
    with gathering_gradients() if gathers else nullcontext():
        loss = engine(batch).logps.sum()
    with Operations() as operations:
        loss.backward()
    assert operations.seen["embedding_dense_backward"] == spread


def test_outside_an_update_autograd_gives_the_whole_gradient():
    model, batch = model_of(), ragged_batch()
    weight = model.get_input_embeddings().weight
    one, two = (torch.autograd.grad(engine_of(model, p)(batch).logps.sum(), weight)[0] for p in ("plain", "shared"))
    check(two, one)


def test_a_weight_that_moves_to_other_memory_is_followed():
    """As `Module.to` moves it: the parameter stays the same object."""
    model, batch = model_of(), ragged_batch()
    weight, engine, found = model.get_input_embeddings().weight, engine_of(model, "shared"), []
    for move in (False, True):
        if move:
            weight.data = weight.data.clone().mul_(1.5)
        for context, path in ((gathering_gradients(), engine), (nullcontext(), engine_of(model, "plain"))):
            with context:
                path(batch).logps.sum().backward()
            found.append(gradient(model))
    check(found[0], found[1])
    check(found[2], found[3])
    assert not torch.allclose(found[2], found[0])


def test_a_frozen_weight_gets_nothing():
    model, batch = model_of(), ragged_batch()
    model.get_input_embeddings().weight.requires_grad_(False)
    with gathering_gradients():
        engine_of(model, "shared")(batch).logps.sum().backward()
    assert model.get_input_embeddings().weight.grad is None


def test_gradients_of_two_objectives_gather_apart():
    """As `alignment.components` keeps them: two backward passes through one forward, `.grad` swapped between them."""
    model, batch = model_of(), ragged_batch()
    weight = model.get_input_embeddings().weight
    expected = []
    for part in (lambda s: s.logps.sum(), lambda s: s.hidden.square().sum()):
        part(engine_of(model, "plain")(batch, hidden="before")).backward()
        expected.append(gradient(model))
    stores = [GradientStore([weight]), GradientStore([weight])]
    engine = engine_of(model, "shared")
    for _ in range(2):
        with gathering_gradients():
            out = engine(batch, hidden="before")
        for store, part in zip(stores, (out.logps.sum(), out.hidden.square().sum()), strict=True):
            with store.open():
                part.backward(retain_graph=True)
    for store, one in zip(stores, expected, strict=True):
        assert store.gradients[0].layout == torch.strided
        check(store.gradients[0], 2 * one)
