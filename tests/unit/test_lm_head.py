"""The tiled LM head against a full softmax, hand-derived values, and a record of every tensor it allocates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alignment.lm_head import LogitForm, score_tokens
from tests.allocations import Allocations

N, H, V = 7, 5, 300
FORMS = {
    "plain": LogitForm(),
    "scaled": LogitForm(scale=0.25),
    "capped": LogitForm(softcap=2.0),
    "both": LogitForm(scale=1.5, softcap=2.0),
}
TILES = [1 << 20, 4 * 300 * 2, 64]  # everything at once; a few tokens at a time; one token at a time


def tensors(dtype=torch.float64, bias=True):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, generator=g, dtype=dtype, requires_grad=True)
    offset = torch.randn(V, generator=g, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, V, (N,), generator=g)


def full_softmax(hidden, weight, bias, targets, form, temperature):
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = z * form.scale
    if form.softcap is not None:
        z = form.softcap * torch.tanh(z / form.softcap)
    log_p = (z / temperature).log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_equal_a_full_softmax(form, bias, tile_bytes):
    inputs = tensors(bias=bias)
    leaves = [t for t in inputs[:3] if t is not None]
    options = {"form": form, "temperature": 0.7}
    expected = full_softmax(*inputs, form, 0.7)
    got = score_tokens(*inputs, **options, entropy=True, tile_bytes=tile_bytes)
    mix = torch.linspace(-1, 2, N, dtype=torch.float64)
    grads = [torch.autograd.grad((lp * mix).sum() + (ent * mix.flip(0)).sum(), leaves) for lp, ent in (expected, got)]
    for a, b in zip((*expected, *grads[0]), (*got, *grads[1]), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradcheck(form):
    hidden, weight, bias, targets = tensors()
    small = (hidden[:3], weight[:40], bias[:40], targets[:3] % 40)

    def both(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None]:
        return score_tokens(h, w, b, small[3], form=form, temperature=1.3, entropy=True, tile_bytes=64)

    assert torch.autograd.gradcheck(both, tuple(t.detach().requires_grad_() for t in small[:3]))


# ---- ALGORITHMS section 2, [G-KL]: an identity weight makes the hidden state the logits
Z = [2.0, 1.0, 0.5, -1.0]
LOG_P = [-0.495182, -1.495182, -1.995182, -3.495182]
ENTROPY, ENTROPY_GRADIENT = 1.014403, [-0.316444, 0.107794, 0.133375, 0.075275]


def test_golden_log_probs_entropy_and_gradients():
    hidden = torch.tensor([Z] * 4, dtype=torch.float64, requires_grad=True)
    logps, entropy = score_tokens(hidden, torch.eye(4, dtype=torch.float64), None, torch.arange(4), entropy=True)
    torch.testing.assert_close(logps, torch.tensor(LOG_P, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, torch.full((4,), ENTROPY, dtype=torch.float64), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden, retain_graph=True)
    expected = torch.tensor([ENTROPY_GRADIENT] * 4, dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)
    # d log p_y / dz = onehot(y) - p, with p = exp(log p)
    (gradient,) = torch.autograd.grad(logps[1], hidden)
    expected = torch.tensor([-0.609460, 1 - 0.224208, -0.135989, -0.030343], dtype=torch.float64)
    torch.testing.assert_close(gradient[1], expected, atol=1e-6, rtol=0)


def test_golden_token_log_probs_and_normalised_entropies():
    """[G-ENT], chosen then rejected; the entropy is given as a share of log V."""
    z = torch.tensor([[2, 1, 0.5, -1], [0, 0, 3, 0], [1, 1, 1, 1], [0.5, -0.5, 0, 0], [2, 2, 0, -2]])
    logps, entropy = score_tokens(z, torch.eye(4), None, torch.tensor([1, 2, 0, 0, 1]), entropy=True)
    expected = torch.tensor([-1.495182, -0.139206, -1.386294, -0.948154, -0.767165])
    torch.testing.assert_close(logps, expected, atol=2e-6, rtol=0)
    expected = torch.tensor([0.731737, 0.381637, 1.0, 0.956287, 0.668590])
    torch.testing.assert_close(entropy / torch.log(torch.tensor(4.0)), expected, atol=2e-6, rtol=0)


def test_large_logits_stay_finite():
    """A token certain to fp32: log-prob 0, entropy 0, whichever tile the maximum is in."""
    weight = torch.zeros(600, 1)
    weight[[3, 590], 0] = torch.tensor([1e4, 2e4])
    for tile_bytes in (1 << 20, 4 * 256):
        logps, entropy = score_tokens(
            torch.ones(2, 1), weight, None, torch.tensor([590, 3]), entropy=True, tile_bytes=tile_bytes
        )
        assert logps.tolist() == [0.0, -1e4]
        assert entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("trained", [True, False], ids=["weight trained", "weight frozen"])
def test_nothing_as_large_as_tokens_times_vocabulary_is_ever_held(trained):
    n, width, vocab, tile_bytes = 128, 8, 8192, 1 << 16
    hidden = torch.randn(n, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=trained)
    targets = torch.zeros(n, dtype=torch.int64)
    with Allocations() as tiled:
        logps, entropy = score_tokens(hidden, weight, None, targets, entropy=True, tile_bytes=tile_bytes)
        (logps.sum() + entropy.sum()).backward()
    with Allocations() as full:
        sum(t.sum() for t in full_softmax(hidden, weight, None, targets, LogitForm(), 1.0)).backward()
    assert full.largest == n * vocab
    # what is as large as the weight is its gradient; a frozen weight leaves one tile
    assert tiled.largest == (vocab * width if trained else tile_bytes // 4)


def test_bf16_products_fp32_statistics():
    """bf16 inputs: bf16 products, fp32 results, gradients back in bf16."""
    hidden, weight, bias, targets = (t.detach() for t in tensors(torch.float32))
    hidden, weight, bias = (t.bfloat16().requires_grad_() for t in (hidden, weight, bias))
    logps, entropy = score_tokens(hidden, weight, bias, targets, entropy=True, tile_bytes=64)
    expected, expected_entropy = full_softmax(hidden.float(), weight.float(), bias.float(), targets, LogitForm(), 1.0)
    assert logps.dtype == entropy.dtype == torch.float32
    # |logit| < 16, so each bf16 logit is off by at most 2^-5 and so is their log-sum-exp
    torch.testing.assert_close(logps, expected, atol=2 * 2**-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=0.2, rtol=0)
    logps.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_autocast_decides_the_products_and_fp32_weights_get_fp32_gradients():
    hidden, weight, bias, targets = (t.detach() for t in tensors(torch.float32))
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = score_tokens(hidden, weight, bias, targets)
    half, _ = score_tokens(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16(), targets)
    assert torch.equal(logps, half)
    logps.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_no_tokens():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logps, entropy = score_tokens(hidden, weight, None, torch.zeros(0, dtype=torch.int64), entropy=True)
    assert logps.shape == entropy.shape == (0,)
    logps.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6, 4))


# ---- logits kept for the backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kept_logits_change_no_bit(form, tile_bytes, dtype):
    """Also of a second backward through the same forward: the first must leave what was kept as it is."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in tensors(torch.float32)[:3]]
    mix, seen = torch.linspace(-1, 2, N), []
    for kept_bytes in (0, 1 << 30):
        options = {"form": form, "temperature": 0.7, "tile_bytes": tile_bytes, "kept_bytes": kept_bytes}
        logps, entropy = score_tokens(*inputs, tensors()[3], entropy=True, **options)
        loss = (logps * mix).sum() + (entropy * mix.flip(0)).sum()
        both = [torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2)]
        seen.append((logps, entropy, *both[0], *both[1]))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[0][2:5], seen[0][5:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_kept_where_all_of_them_fit_and_somebody_needs_them(dtype):
    hidden, weight, bias, targets = (t.detach() for t in tensors(torch.float32))
    hidden, weight, bias = (t.to(dtype) for t in (hidden, weight, bias))

    def saved_values(kept_bytes: int) -> int:
        """Values saved for the backward, those of the inputs and those per token left out."""
        seen: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
            score_tokens(hidden, weight, bias, targets, entropy=True, tile_bytes=4 * 300 * 2, kept_bytes=kept_bytes)
        return sum(n for n in seen if n not in (N * H, V * H, V, N))

    logits = N * V * dtype.itemsize
    assert saved_values(logits) == 0
    weight.requires_grad_()
    assert saved_values(logits) == N * V
    assert saved_values(logits - 1) == 0
    with torch.no_grad():
        assert saved_values(logits) == 0
