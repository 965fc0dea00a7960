"""KL estimators and exact divergences against [G-KL], the gradient facts of ALGORITHMS section 2, and case C4."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from alignment.full_kl import FullKL, Head, full_kl
from alignment.kl import KL_ESTIMATORS, bounded_exp, kl_metric, token_kl
from alignment.lm_head import LogitForm
from alignment.metrics import MetricWindow
from alignment.tiny import tiny_model
from tests.allocations import Allocations

Z, Z_REF = [2.0, 1.0, 0.5, -1.0], [1.5, 1.2, 0.3, -0.5]
REVERSE, FORWARD, JEFFREYS, JS = 0.054840, 0.058897, 0.056869, 0.014096
GRAD_REVERSE = [0.139009, -0.105807, -0.009780, -0.023422]
GRAD_FORWARD = [0.150186, -0.116031, -0.002342, -0.031813]
ALL = torch.ones(4, dtype=torch.bool)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, want: Tensor | float | list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=atol, rtol=0)


# ---------------------------------------------------------------------- estimators

GOLDEN = [
    ("k1", [0.282926, -0.417074, -0.017074, -0.717074], REVERSE, [0.0, 0.0, 0.0, 0.0]),
    ("k2", [0.040023, 0.086976, 0.000146, 0.257098], 0.051714, GRAD_REVERSE),
    ("k3", [0.036501, 0.100441, 0.000147, 0.331357], REVERSE, GRAD_FORWARD),
    ("k3_is", [0.036501, 0.100441, 0.000147, 0.331357], REVERSE, GRAD_REVERSE),
    ("sym", [0.034860, 0.107921, 0.000147, 0.375902], JEFFREYS, None),
]


@pytest.mark.parametrize(("name", "values", "mean", "gradient"), GOLDEN, ids=[g[0] for g in GOLDEN])
def test_golden_values_expectations_and_expected_gradients(
    name: str, values: list[float], mean: float, gradient: list[float] | None
) -> None:
    """Each of the four tokens weighted by the probability with which the policy samples it."""
    z = double(*Z).requires_grad_()
    logps, reference = z.log_softmax(0), double(*Z_REF).log_softmax(0)
    got = token_kl(KL_ESTIMATORS.get(name), logps, reference, ALL)
    close(got, values)
    expectation = (logps.exp().detach() * got).sum()
    close(expectation, mean)
    if gradient is not None:
        close(torch.autograd.grad(expectation, z)[0], gradient)


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_gradients_by_finite_differences(name: str) -> None:
    """Also where exp goes on as a straight line, and with a policy that has moved since it sampled."""
    reference, old = double(-1.0, -2.0, 29.0, -0.5), double(-1.2, -1.8, -1.0, -30.0)
    if name == "k3_is":  # beyond the bound its gradient stays that of the true exponentials
        reference[2], old[3] = 9.0, -2.0

    def kl(logps: Tensor) -> Tensor:
        return token_kl(KL_ESTIMATORS.get(name), logps, reference, ALL, old)

    assert torch.autograd.gradcheck(kl, double(-1.1, -2.5, -1.0, -0.7).requires_grad_(), rtol=1e-3)


def test_a_user_can_add_an_estimator() -> None:
    def absolute(d: Tensor, ratio: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * d.abs()

    close(token_kl(absolute, double(-1.0, -2.0), double(-2.0, -1.5), ALL[:2]), [1.0, 0.5])


# ---------------------------------------------------------------------- cases


def test_c3_a_masked_nan_reaches_neither_value_nor_gradient() -> None:
    nan = float("nan")
    scored = torch.tensor([True, False])
    logps = torch.tensor([0.0, 0.0], requires_grad=True)
    for name in KL_ESTIMATORS:
        kl = token_kl(KL_ESTIMATORS.get(name), logps, torch.tensor([0.0, nan]), scored, torch.tensor([0.0, nan]))
        total, count = kl_metric(kl, scored.float())
        assert (float(total), float(count)) == (0.0, 1.0)
        (gradient,) = torch.autograd.grad(kl.sum(), logps)
        assert gradient.isfinite().all()
        assert gradient[1] == 0


def test_c2_the_metric_of_a_batch_without_any_token_is_finite() -> None:
    window = MetricWindow()
    nothing = torch.zeros(3, dtype=torch.bool)
    logps = torch.zeros(3)
    kl = token_kl(KL_ESTIMATORS.get("k3"), logps, logps, nothing)
    window.update({"kl": kl_metric(kl, nothing.float())})
    assert window.flush()["kl"] == 0.0
    window.update({"kl": kl_metric(kl, nothing.float())})
    window.update({"kl": kl_metric(torch.full((2,), 0.5), torch.ones(2))})
    assert window.flush()["kl"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n != "k1"])
def test_c4_a_large_gap_still_has_a_slope(name: str) -> None:
    """The reference gives 100 nats more to the only token. AdamW on beta KL closes the gap, in float32."""
    logits = nn.Parameter(torch.tensor([-120.0, 0.0]))
    reference = torch.tensor([-20.0])
    optimizer = torch.optim.AdamW([logits], lr=1.0)
    gaps = []
    for _ in range(5):
        logps = logits.log_softmax(0)[:1]
        loss = 0.1 * token_kl(KL_ESTIMATORS.get(name), logps, reference, torch.ones(1, dtype=torch.bool)).sum()
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        gaps.append(float(reference - logps.detach()))
        optimizer.step()
        assert logits.isfinite().all()
    assert gaps[0] == pytest.approx(100.0)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 97


def test_c4_values_within_the_bound_are_exact() -> None:
    k3 = KL_ESTIMATORS.get("k3")
    got = k3(double(1.0, -1.0, 19.0, -40.0, 21.0), torch.ones(5))
    close(got[:2], [0.71828, 0.36788], atol=1e-5)
    # 21 is beyond: there the tangent at 20 gives e^20 (1 + 21 - 20)
    assert got[2:].tolist() == pytest.approx([math.exp(19) - 20, 39.0, 2 * math.exp(20) - 22], rel=1e-12)


def test_the_bounded_exponential_is_continuous_with_its_slope() -> None:
    x = double(20 - 1e-9, 20 + 1e-9, 1e4, -1e4, math.inf).requires_grad_()
    y = bounded_exp(x)
    (slope,) = torch.autograd.grad(y[:4].sum(), x)
    assert float(y[1].detach() / y[0].detach()) == pytest.approx(1, abs=1e-8)
    assert slope[:3].tolist() == pytest.approx([math.exp(20)] * 3)
    assert float(slope[3]) == 0.0


# ---------------------------------------------------------------------- exact divergences

DENSE: dict[FullKL, Callable[[Tensor, Tensor], Tensor]] = {
    "full_reverse": lambda p, q: (p.exp() * (p - q)).sum(-1),
    "full_jeffreys": lambda p, q: ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2,
    "full_js": lambda p, q: sum((x.exp() * (x - ((p.exp() + q.exp()) / 2).log())).sum(-1) / 2 for x in (p, q)),  # type: ignore[dict-item,return-value]
}
EXACT: list[tuple[FullKL, float, list[float] | None]] = [
    ("full_reverse", REVERSE, GRAD_REVERSE),
    ("full_jeffreys", JEFFREYS, [(a + b) / 2 for a, b in zip(GRAD_REVERSE, GRAD_FORWARD, strict=True)]),
    ("full_js", JS, None),
]
FORMS = {"plain": LogitForm(), "both": LogitForm(scale=1.5, softcap=2.0)}


@pytest.mark.parametrize(("kind", "value", "gradient"), EXACT)
def test_golden_divergences(kind: FullKL, value: float, gradient: list[float] | None) -> None:
    """An identity weight makes the hidden state the logits."""
    eye = Head(weight=torch.eye(4, dtype=torch.float64))
    hidden = double(*Z)[None].requires_grad_()
    got = full_kl(kind, hidden, eye, double(*Z_REF)[None], eye)
    close(got, [value])
    if gradient is not None:
        close(torch.autograd.grad(got.sum(), hidden)[0][0], gradient)


def heads(form: LogitForm, vocab: int = 300, tokens: int = 7) -> tuple[Tensor, Head, Tensor, Head]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_(grad)

    head = Head(weight=random(vocab, 5, grad=True), bias=random(vocab, grad=True), form=form)
    reference = Head(weight=random(vocab, 3), form=LogitForm(scale=0.5))  # of another width and form
    return random(tokens, 5, grad=True), head, random(tokens, 3), reference


@pytest.mark.parametrize("tile_bytes", [1 << 20, 4 * 300 * 2, 64])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", list(DENSE))
def test_tiles_give_what_the_whole_vocabulary_gives(kind: FullKL, form: LogitForm, tile_bytes: int) -> None:
    hidden, head, ref_hidden, reference = heads(form)
    assert head.bias is not None
    z = form.scale * (hidden @ head.weight.T + head.bias)
    z = z if form.softcap is None else form.softcap * torch.tanh(z / form.softcap)
    z_ref = 0.5 * ref_hidden @ reference.weight.T
    expected = DENSE[kind]((z / 0.7).log_softmax(-1), (z_ref / 0.7).log_softmax(-1))
    got = full_kl(kind, hidden, head, ref_hidden, reference, temperature=0.7, tile_bytes=tile_bytes)
    mix = torch.linspace(-1, 2, len(hidden), dtype=torch.float64)
    leaves = [hidden, head.weight, head.bias]
    grads = [torch.autograd.grad((values * mix).sum(), leaves) for values in (expected, got)]
    for a, b in zip((expected, *grads[0]), (got, *grads[1]), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", list(DENSE))
def test_exact_gradients_by_finite_differences(kind: FullKL) -> None:
    hidden, head, ref_hidden, reference = heads(FORMS["both"], vocab=20, tokens=3)

    def divergence(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return full_kl(kind, h, Head(weight=w, bias=b, form=head.form), ref_hidden, reference, tile_bytes=64)

    assert torch.autograd.gradcheck(divergence, (hidden, head.weight, head.bias))


def test_jensen_shannon_is_finite_where_supports_differ() -> None:
    weight = torch.eye(2)
    hidden = torch.tensor([[0.0, -1e4]], requires_grad=True)
    got = full_kl("full_js", hidden, Head(weight=weight), torch.tensor([[-1e4, 0.0]]), Head(weight=weight))
    assert got.item() == pytest.approx(math.log(2))
    got.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("kind", list(DENSE))
def test_nothing_as_large_as_tokens_times_vocabulary_is_ever_held(kind: FullKL) -> None:
    tokens, width, vocab, tile_bytes = 128, 8, 8192, 1 << 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    head, reference = (Head(weight=torch.randn(vocab, width)) for _ in range(2))
    with Allocations() as seen:
        full_kl(kind, hidden, head, torch.randn(tokens, width), reference, tile_bytes=tile_bytes).sum().backward()
    assert seen.largest == tile_bytes // 4


def test_sizes_and_names_that_do_not_fit() -> None:
    hidden, head = torch.zeros(2, 3), Head(weight=torch.zeros(5, 3))
    with pytest.raises(ValueError, match="'full' is not known; use full_reverse, full_jeffreys, full_js"):
        full_kl("full", hidden, head, hidden, head)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 tokens over 5 entries, the reference 2 over 6"):
        full_kl("full_js", hidden, head, hidden, Head(weight=torch.zeros(6, 3)))


def test_the_head_of_a_model() -> None:
    model = tiny_model(0)
    head = Head.of(model)
    assert head.weight is model.get_output_embeddings().weight
    with pytest.raises(ValueError, match="needs a plain linear LM head; Linear has another"):
        Head.of(nn.Linear(2, 2))
