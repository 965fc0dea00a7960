"""A fingerprint of weights: every bit counts, in every number format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alignment.rank_agreement import disagreement, fingerprint


def weights(*tensors: torch.Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(tensor, requires_grad=False) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_one_bit(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4).to(dtype)
    other = values.clone()
    bits = other.view(torch.uint8)
    bits[0, 0] ^= 1
    assert fingerprint(weights(values)) == fingerprint(weights(values.clone()))
    assert fingerprint(weights(values)) != fingerprint(weights(other))


def test_order_counts_and_layout_does_not() -> None:
    a, b = torch.ones(2, 3), torch.zeros(4)
    assert fingerprint(weights(a, b)) != fingerprint(weights(b, a))
    turned = torch.arange(6.0).reshape(2, 3)
    assert fingerprint(weights(turned.T.contiguous().T)) == fingerprint(weights(turned))
    assert fingerprint([]) == 0
    assert fingerprint(weights(torch.tensor(1.5))) != fingerprint(weights(torch.tensor(-1.5)))


def test_a_process_alone_compares_nothing() -> None:
    assert disagreement(weights(torch.ones(2)), 1.0) == {}


def test_three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hold the same, the third does not; gradients of norm 2, 2 and 1."""
    monkeypatch.setattr("alignment.distributed.processes", lambda: 3)
    monkeypatch.setattr("alignment.distributed.gather_from_processes", lambda mine: [(7, 2.0), (7, 2.0), (8, 1.0)])
    found = disagreement([], 2.0)
    assert found == pytest.approx({"ranks/parameters_differ": 1 / 3, "ranks/grad_norm_spread": 0.5})
    monkeypatch.setattr("alignment.distributed.gather_from_processes", lambda mine: [(7, 2.0), (7, None)])
    assert disagreement([], 2.0) == {"ranks/parameters_differ": 0.0}
