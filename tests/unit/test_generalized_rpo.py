"""GeneralizedRPO: [G-ENT] of ALGORITHMS through terms and module, against dense oracles, and as training runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.component_clip import ComponentClipConfig
from alignment.domains import DomainConfig
from alignment.entropy_deficit import REF_ENTROPY, entropy_deficit, floor_of, token_scope
from alignment.errors import UserError
from alignment.full_kl import Head
from alignment.logprobs import TokenStats
from alignment.losses import weighted
from alignment.metrics import Metrics
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.reference import FrozenCopy
from alignment.regularisers import UNIT_TERMS, normalised_entropy
from alignment.smoothness import neighbours, smooth_values, smooth_weights
from modules import DPO, GeneralizedRPO
from tests.rl_toys import fit, moved
from tests.toys import TINY, FixedData, groups, trainer

V = 4
Z = torch.tensor([[2, 1, 0.5, -1], [0, 0, 3, 0], [1, 1, 1, 1], [0.5, -0.5, 0, 0], [2, 2, 0, -2], [9, 0, 0, 0]])
Z_REF = torch.tensor(
    [[1.5, 1.2, 0.3, -0.5], [0.5, 0, 2, 0], [1, 0.5, 1, 0], [0.5, 0, 0, 0], [1, 1, 0, -1], [0, 0, 0, 0]]
)
IDS = [[1, 2, 0], [0, 1, 3]]  # the last token of the rejected completion is not scored
SGD = OptimConfig(lr=1e-3, optimizer="sgd", schedule="constant", clip_norm=None)
Values = dict[str, float]


def golden_batch(**columns: Any) -> GroupBatch:
    scored = [[True] * 3, [True, True, False]]
    return GroupBatch.from_groups([Group(prompt=[3], completions=IDS, scored=scored, columns=columns, index=0)])


def stats_of(logits: Tensor, batch: GroupBatch) -> TokenStats:
    log_p = logits.log_softmax(-1)
    logps = log_p.gather(1, batch.completion_ids[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    zero = torch.zeros_like(logps)
    return TokenStats(
        logps=torch.where(batch.scored, logps, zero), entropy=torch.where(batch.scored, entropy, zero), hidden=logits
    )


def golden_module(**settings: Any) -> Any:
    """Both models replaced by the golden logits, which the identity makes of hidden states."""
    module: Any = GeneralizedRPO(policy=TINY, reference="copy", **settings)
    module.vocabulary = V
    module.engine = lambda micro, **asked: stats_of(Z.clone().requires_grad_(), micro)

    def reference(micro: GroupBatch) -> tuple[Tensor, Tensor]:
        stats = stats_of(Z_REF, micro)
        assert stats.logps is not None
        assert stats.entropy is not None
        return stats.logps, stats.entropy

    module.reference = SimpleNamespace(token_stats=reference, token_logps=lambda micro: reference(micro)[0])
    if module.regularisers.smoothness == "js":
        module._head = lambda: Head(weight=torch.eye(V))
    return module


def means(metrics: Metrics) -> Values:
    return {name: float(total / count) for name, (total, count) in metrics.items()}


def golden(**settings: Any) -> tuple[float, Values]:
    module, batch = golden_module(**settings), golden_batch()
    share, metrics = module.loss(batch, module.regularisers.counts(batch, {}))
    return float(share.detach()), means(metrics)


# ---------------------------------------------------------------------- [G-ENT]


def test_golden_tokens() -> None:
    """What the terms are made of: log-probs, probabilities, normalised entropies, their mean over the chosen."""
    batch = golden_batch()
    policy, reference = stats_of(Z, batch), stats_of(Z_REF, batch)
    assert policy.logps is not None
    logps = [-1.495182, -0.139206, -1.386294, -0.948154, -0.767165]
    assert policy.logps[:5].tolist() == pytest.approx(logps, abs=1e-6)
    assert policy.logps[:5].exp().tolist() == pytest.approx([0.224208, 0.870049, 0.25, 0.387456, 0.464328], abs=1e-6)
    entropies = (
        (policy, [0.731737, 0.381637, 1, 0.956287, 0.668590]),
        (reference, [0.844329, 0.712527, 0.949066, 0.980500, 0.845901]),
    )
    for stats, expected in entropies:
        assert stats.entropy is not None
        assert normalised_entropy(stats.entropy, V)[:5].tolist() == pytest.approx(expected, abs=1e-6)
    assert policy.entropy is not None
    for scope, expected in (("both", 1.036463), ("chosen", 0.976586)):
        total, count = weighted(policy.entropy, token_scope(batch, scope))
        assert float(total / count) == pytest.approx(expected, abs=1e-6)
    jumps = smooth_values("probability", batch, policy.logps, policy.logps)
    assert float(jumps[1:3].sqrt().mean()) == pytest.approx(0.632945, abs=1e-6)  # |dp| over the chosen
    squares = (policy.logps[1:3] - policy.logps[:2]) ** 2
    assert float(squares.mean()) == pytest.approx(1.696949, abs=1e-6)  # of which huber takes less: .801532 below


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"entropy_floor": "uniform"}, 0.252350),
        ({"entropy_floor": "uniform", "entropy_scope": "chosen"}, 0.295542),
        ({}, 0.129001),
        ({"entropy_scope": "chosen"}, 0.147827),
        ({"entropy_level": 0.9}, 0.076103),
        ({"entropy_floor": "constant", "entropy_level": 0.6}, 0.043673),
        # By hand from h of the rejected tokens: ((1 - .956287) + (1 - .668590)) / 2.
        ({"entropy_floor": "uniform", "entropy_scope": "rejected"}, 0.1875615),
    ],
    ids=str,
)
def test_golden_deficits(settings: dict[str, Any], value: float) -> None:
    share, found = golden(lambda_smooth=0.0, lambda_entropy=2.0, **settings)
    assert found["loss/entropy"] == pytest.approx(value, abs=1e-6)
    assert found["penalty/entropy"] == pytest.approx(2 * value, abs=2e-6)
    assert share == pytest.approx(0.728245 + 2 * value, abs=3e-6)
    assert found["entropy"] == pytest.approx(1.036463, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({}, 0.400785),
        ({"smooth_scope": "both"}, 0.269160),
        ({"smoothness": "logprob"}, 0.801532),
        ({"smoothness": "js"}, 0.270822),
        ({"smoothness": "entropy"}, 0.252472),
        ({"smoothness": "variance"}, 0.378417),
        # Two rows count alike: the rejected one's log-probs are .090495 from their mean.
        ({"smoothness": "variance", "smooth_scope": "both"}, (0.378417 + 0.0904945**2) / 2),
        ({"smooth_scope": "rejected"}, (0.464328 - 0.387456) ** 2),
    ],
    ids=str,
)
def test_golden_smoothness(settings: dict[str, Any], value: float) -> None:
    share, found = golden(lambda_smooth=3.0, lambda_entropy=0.0, **settings)
    assert found["loss/smooth"] == pytest.approx(value, abs=1e-6)
    assert share == pytest.approx(0.728245 + 3 * value, abs=5e-6)


def test_golden_total() -> None:
    """L_DPO .728245 and lambdas of .01: .734776."""
    share, found = golden(entropy_floor="uniform")
    assert share == pytest.approx(0.734776, abs=1e-6)
    assert found["loss/dpo"] == pytest.approx(0.728245, abs=1e-6)
    assert found["delta"] == pytest.approx(-0.690055, abs=1e-6)
    assert found["p_mean"] == pytest.approx((0.224208 + 0.870049 + 0.25) / 3, abs=1e-6)
    total = found["loss/dpo"] + found["penalty/entropy"] + found["penalty/smooth"]
    assert share == pytest.approx(total, abs=1e-6)


def test_the_sft_term_of_dpo_joins() -> None:
    """The chosen's mean log-prob is -3.020683 / 3."""
    share, found = golden(entropy_floor="uniform", sft_weight=0.5)
    assert found["loss/sft"] == pytest.approx(3.020683 / 3, abs=1e-6)
    assert share == pytest.approx(0.734776 + 0.5 * 3.020683 / 3, abs=2e-6)


def test_any_loss_of_dpo_underneath() -> None:
    """Hinge: max(0, 1 + .0690055)."""
    share, _ = golden(loss="hinge", beta=0.1, lambda_entropy=0.0, lambda_smooth=0.0)
    assert share == pytest.approx(1.0690055, abs=1e-6)


# ---------------------------------------------------------------------- what a term is made of


def test_neighbours_stay_within_a_completion() -> None:
    """Of rows 111 and 110: t = 1, 2 of the first, 1 of the second; and none where a row has one scored token."""
    assert neighbours(golden_batch()).tolist() == [False, True, True, False, True, False]
    holes = Group(prompt=[3], completions=[[1, 2, 0, 1], [1]], scored=[[True, False, True, True], [True]], index=0)
    batch = GroupBatch.from_groups([holes])
    assert neighbours(batch).tolist() == [False, False, False, True, False]
    assert smooth_weights("variance", batch, "both").tolist() == [1, 0]
    assert smooth_weights("probability", batch, "chosen").tolist() == [0, 0, 0, 1, 0]
    assert neighbours(batch.select_groups([])).tolist() == []


def test_a_pair_weighs_its_tokens_and_an_incomplete_pair_none() -> None:
    whole = Group(prompt=[3], completions=[[1, 2], [1]], weights=[2.0, 3.0])
    half = Group(prompt=[3], completions=[[1, 2], [1]], scored=[[True, True], [False]])
    batch = GroupBatch.from_groups([whole, half])
    assert token_scope(batch, "both").tolist() == [2, 2, 2, 0, 0, 0]
    assert token_scope(batch, "rejected").tolist() == [0, 0, 2, 0, 0, 0]


def test_a_huber_jump_is_square_near_zero_and_straight_beyond() -> None:
    batch = GroupBatch.from_groups([Group(prompt=[3], completions=[[1, 1, 1], [1, 1, 1]])])
    logps = torch.tensor([-1.0, -1.5, -4.5, -1.0, -1.0, -2.0])
    found = smooth_values("logprob", batch, logps, logps)
    assert found.tolist() == pytest.approx([0, 0.125, 2.5, 0, 0, 0.5])


def test_a_deficit_within_rounding_is_none() -> None:
    """Neither a value nor a slope where policy and reference agree but for the last bits."""
    h = torch.tensor([0.5, 0.5 - 3e-7, 0.4], requires_grad=True)
    found = entropy_deficit(h, torch.tensor([0.5, 0.5, 0.5]))
    assert found.tolist() == pytest.approx([0, 0, 0.1])
    found.sum().backward()
    assert h.grad is not None
    assert h.grad.tolist() == [0, 0, -1]


def test_the_floor_of_the_reference_is_a_share_of_its_entropy() -> None:
    batch = golden_batch().with_tokens(**{REF_ENTROPY: torch.full((6,), math.log(V) / 2)})
    assert floor_of("reference", None, batch, V).tolist() == pytest.approx([0.5] * 6)
    assert floor_of("reference", 0.8, batch, V).tolist() == pytest.approx([0.4] * 6)


def dense_js(logits: Tensor, pairs: Tensor) -> Tensor:
    """[n] from whole distributions."""
    at = pairs.nonzero()[:, 0]
    log_p, log_q = logits[at].log_softmax(-1), logits[at - 1].log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2


def test_gradients_of_js_reach_both_neighbours_and_the_head() -> None:
    draw = torch.Generator().manual_seed(0)
    batch = golden_batch()
    hidden, weight = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in ((6, 3), (V, 3))
    )
    logps = torch.zeros(6, dtype=torch.float64)
    ours = smooth_values("js", batch, logps, logps, hidden, Head(weight=weight))
    dense = dense_js(hidden @ weight.T, neighbours(batch))
    torch.testing.assert_close(ours[neighbours(batch)], dense)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), (hidden, weight)),
        torch.autograd.grad(dense.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------- against a dense oracle on a real model


def dense_loss(module: Any, batch: GroupBatch, reference: Any, settings: dict[str, Any]) -> Tensor:
    """L from the policy's own logits, row by row, one token at a time; token sets and means in plain Python."""
    log_v = math.log(module.vocabulary)
    rows, chosen_rows = [], batch.num_completions
    prompts = torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())
    completions = torch.split(batch.completion_ids, batch.completion_lengths.tolist())
    scored = torch.split(batch.scored, batch.completion_lengths.tolist())
    for i in range(chosen_rows):
        prompt, ids = prompts[i // 2], completions[i]
        out = []
        for model in (module.policy, reference):
            logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
            log_p = logits.log_softmax(-1)
            out.append((log_p[range(len(ids)), ids], -(log_p.exp() * log_p).sum(-1) / log_v, log_p))
        rows.append((out, scored[i]))
    deltas, deficits, jumps = [], [], []
    for i, (((lp, h, log_p), (ref_lp, ref_h, _)), mask) in enumerate(rows):
        ratio = ((lp - ref_lp.detach()) * mask).sum()
        deltas.append(ratio)
        floor = ref_h.detach() if settings["entropy_floor"] == "reference" else torch.ones_like(h)
        deficits += [torch.relu(floor[t] - h[t]) for t in range(len(mask)) if mask[t]]
        if i % 2:
            continue
        for t in range(1, len(mask)):
            if not (mask[t] and mask[t - 1]):
                continue
            kind = settings["smoothness"]
            if kind == "probability":
                jumps.append((lp[t].exp() - lp[t - 1].exp()) ** 2)
            elif kind == "logprob":
                jumps.append(F.huber_loss(lp[t], lp[t - 1]))
            elif kind == "entropy":
                jumps.append((h[t] - h[t - 1]) ** 2)
            else:
                m = torch.logaddexp(log_p[t], log_p[t - 1]) - math.log(2)
                parts = [(log_p[s].exp() * (log_p[s] - m)).sum() for s in (t, t - 1)]
                jumps.append(sum(parts) / 2)
    pref = [F.softplus(-0.1 * (c - r)) for c, r in zip(deltas[::2], deltas[1::2], strict=True)]
    parts = [torch.stack(values).mean() for values in (pref, deficits, jumps)]
    return parts[0] + 0.7 * parts[1] + 0.9 * parts[2]


@pytest.mark.parametrize(
    ("floor", "kind"),
    [("reference", "probability"), ("uniform", "logprob"), ("reference", "js"), ("uniform", "entropy")],
)
def test_loss_and_gradient_are_those_of_whole_logits(floor: Any, kind: Any) -> None:
    settings = {"entropy_floor": floor, "smoothness": kind}
    module: Any = GeneralizedRPO(
        policy=TINY, reference="copy", beta=0.1, lambda_entropy=0.7, lambda_smooth=0.9, **settings
    )
    module = moved(module)
    start: Any = GeneralizedRPO(policy=TINY, reference="copy")
    start.configure_model()
    batch = GroupBatch.from_groups(groups(3, 2))
    counts = module.regularisers.counts(batch, {})
    ours = module.loss(batch, counts)[0]
    oracle = dense_loss(module, batch, start.policy, settings)
    assert float(ours.detach()) == pytest.approx(float(oracle.detach()), abs=1e-5)
    parameters = [p for p in module.policy.parameters() if p.requires_grad]
    found, expected = (
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]) for loss in (ours, oracle)
    )
    assert float(expected.norm()) > 1e-2
    assert float((found - expected).norm() / expected.norm()) < 1e-4


# ---------------------------------------------------------------------- as training runs it


def pairs(count: int = 8) -> list[Group]:
    """Two domains; every third pair is of the second."""
    return [replace(g, columns={"domain": "ab"[g.index % 3 == 2]}) for g in groups(count, 2)]


def run(folder: Path, build: Callable[..., Any] = GeneralizedRPO, batch_size: int = 8, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"policy": TINY, "reference": "copy", "optim": SGD, "micro_batch_tokens": None}
    module = build(**(defaults | settings))
    watch, t = fit(module, folder, FixedData(pairs(), batch_size=batch_size))
    return watch, t, module


@pytest.mark.parametrize("at", ["parameters", "states"])
def test_without_terms_it_is_dpo(at: Any, tmp_path: Path) -> None:
    """With any DPO settings; clipping of a single component within its bound changes nothing."""
    own = {"loss": "sigmoid_norm", "beta": 2.0, "label_smoothing": 0.1}
    clip = ComponentClipConfig(ratio=1e9, at=at)
    plain, _, _ = run(tmp_path, DPO, **own)
    for more in ({}, {"component_clip": clip}):
        ours, _, _ = run(tmp_path, lambda_entropy=0.0, lambda_smooth=0.0, **own, **more)
        torch.testing.assert_close(ours.gradients[0], plain.gradients[0], rtol=1e-5, atol=1e-8)
        assert ours.updates[0]["loss"] == pytest.approx(plain.updates[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("kind", ["copy", "cached", "adapter_off", "frozen_adapter"])
def test_at_the_start_no_entropy_is_lost(kind: Any, tmp_path: Path) -> None:
    """Whatever the reference: R_entropy is exactly 0, and so is its gradient. The other kinds of loss differ."""
    lora = LoRAConfig(r=4) if "adapter" in kind else None
    policy = PolicyConfig(lora=lora)
    settings = {"policy": policy, "reference": kind, "lambda_smooth": 0.0, "micro_batch_tokens": 40}
    gradients = {}
    for weight in (0.0, 10.0):
        watch, _, _ = run(tmp_path, lambda_entropy=weight, **settings)
        assert watch.updates[0]["loss/entropy"] == 0.0
        assert watch.updates[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert watch.updates[0]["entropy"] == pytest.approx(watch.updates[0]["entropy/reference"], abs=1e-5)
        gradients[weight] = watch.gradients[0]
    torch.testing.assert_close(gradients[10.0], gradients[0.0], rtol=1e-5, atol=1e-9)
    uniform, _, _ = run(tmp_path, lambda_entropy=10.0, entropy_floor="uniform", **settings)
    assert float((uniform.gradients[0] - gradients[0.0]).norm()) > 1e-4


CLIPS = {
    "none": None,
    "parameters": ComponentClipConfig(ratio=0.05),
    "states": ComponentClipConfig(ratio=0.05, at="states"),
}


@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize("kind", ["probability", "variance", "js"])
def test_micro_batches_change_nothing(kind: Any, clip: str, tmp_path: Path) -> None:
    """C1, with domain weights that are not even and values of their own, and coefficients that clip."""
    domains = DomainConfig(
        beta={"b": 0.5}, lambda_entropy={"a": 0.9}, lambda_smooth={"b": 0.1}, adaptive=True, step_size=0.5
    )
    settings = {"entropy_floor": "uniform", "lambda_entropy": 0.4, "lambda_smooth": 0.8, "smoothness": kind}
    found = []
    for tokens in (None, 40, 1):
        watch, _, module = run(
            tmp_path, batch_size=4, domains=domains, component_clip=CLIPS[clip], micro_batch_tokens=tokens, **settings
        )
        found.append((watch, module.domains.weights))
    for watch, weights in found[1:]:
        assert weights == pytest.approx(found[0][1], rel=1e-5)
        for a, b in zip(watch.gradients, found[0][0].gradients, strict=True):
            assert float((a - b).norm()) <= 2e-5 * float(b.norm())
        for a, b in zip(watch.updates, found[0][0].updates, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    coefficients = [found[0][0].logged[0].get(f"grad/clip_coef/{name}") for name in ("dpo", "entropy", "smooth")]
    if clip != "none":
        assert any(c is not None and c < 0.99 for c in coefficients), "something is clipped"


def test_clipping_by_hand_from_gradients_of_single_components(tmp_path: Path) -> None:
    """g_dpo, g_entropy and g_smooth from runs that have only one of them on top of DPO; then c_i of each."""
    own = {"entropy_floor": "uniform", "smoothness": "logprob"}
    whole = {"lambda_entropy": 0.4, "lambda_smooth": 0.8}
    base, _, _ = run(tmp_path, lambda_entropy=0.0, lambda_smooth=0.0, **own)
    g = {"dpo": base.gradients[0]}
    losses = {"dpo": base.updates[0]["loss/dpo"]}
    for term in ("entropy", "smooth"):
        only = {name: value if name.endswith(term) else 0.0 for name, value in whole.items()}
        watch, _, _ = run(tmp_path, **only, **own)
        g[term] = watch.gradients[0] - g["dpo"]
        losses[term] = watch.updates[0][f"loss/{term}"]
    clip = ComponentClipConfig(ratio=0.05)
    expected = torch.zeros_like(g["dpo"])
    watch, _, _ = run(tmp_path, component_clip=clip, **whole, **own)
    for name, gradient in g.items():
        c = min(1.0, max(0.05 * losses[name], 1e-3) / (float(gradient.norm()) + 1e-6))
        assert watch.logged[0][f"grad/clip_coef/{name}"] == pytest.approx(c, rel=1e-3)
        assert watch.logged[0][f"grad_norm/{name}"] == pytest.approx(float(gradient.norm()), rel=1e-3)
        expected += c * gradient
    assert float((watch.gradients[0] - expected).norm()) <= 1e-3 * float(expected.norm())


def test_the_terms_do_what_they_are_for(tmp_path: Path) -> None:
    """Forty steps on the same pairs: with each term its measure ends lower than without."""
    adam = OptimConfig(lr=1e-3, schedule="constant")
    ends = {}
    for name, settings in {
        "dpo": {"lambda_entropy": 0.0, "lambda_smooth": 0.0},
        "entropy": {"lambda_entropy": 5.0, "lambda_smooth": 0.0},
        "smooth": {"lambda_entropy": 0.0, "lambda_smooth": 50.0},
    }.items():
        module = GeneralizedRPO(policy=TINY, reference="copy", optim=adam, sft_weight=0.5, **settings)
        watch, _ = fit(module, tmp_path, FixedData(pairs(), batch_size=8), max_epochs=40)
        ends[name] = watch.updates[-1]
    assert ends["entropy"]["loss/entropy"] < 0.7 * ends["dpo"]["loss/entropy"]
    assert ends["entropy"]["entropy"] > ends["dpo"]["entropy"]
    assert ends["smooth"]["loss/smooth"] < 0.7 * ends["dpo"]["loss/smooth"]


# ---------------------------------------------------------------------- domains


def golden_pairs(*domains: str) -> GroupBatch:
    """The golden pair once for each domain."""
    pair = golden_batch()
    rows = [
        Group(prompt=[3], completions=IDS, scored=[[True] * 3, [True, True, False]], columns={"domain": d}, index=i)
        for i, d in enumerate(domains)
    ]
    assert pair.num_prompts == 1
    return GroupBatch.from_groups(rows)


def golden_domains(*names: str, **settings: Any) -> tuple[Any, GroupBatch]:
    module: Any = golden_module(**settings)
    batch = golden_pairs(*names)
    module.engine = lambda micro, **asked: stats_of(Z.repeat(len(names), 1).requires_grad_(), micro)
    reference = stats_of(Z_REF.repeat(len(names), 1), batch)
    module.reference = SimpleNamespace(token_stats=lambda micro: (reference.logps, reference.entropy))
    return module, batch


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_beta_and_lambdas_of_a_domain() -> None:
    """delta is -.690055, R_entropy .129001, R_smooth .400785 in every pair; b has beta .5, lambdas 2 and 3."""
    domains = DomainConfig(beta={"b": 0.5}, lambda_entropy={"b": 2.0}, lambda_smooth={"b": 3.0})
    module, batch = golden_domains("a", "b", "a", domains=domains)
    share, metrics = module.loss(batch, module.regularisers.counts(batch, {}))
    found = means(metrics)
    losses = {"a": softplus(0.1 * 0.690055), "b": softplus(0.5 * 0.690055)}
    expected = (2 * losses["a"] + losses["b"]) / 3
    expected += 0.129001 * (2 * 0.01 + 2) / 3 + 0.400785 * (2 * 0.01 + 3) / 3
    assert float(share.detach()) == pytest.approx(expected, abs=1e-5)
    for name, loss in losses.items():
        assert found[f"domain/{name}/loss"] == pytest.approx(loss, abs=1e-6)
        assert found[f"domain/{name}/accuracies"] == 0
    assert found["domain/b/margins"] == pytest.approx(-0.5 * 0.690055, abs=1e-6)
    assert found["beta"] == pytest.approx((0.1 + 0.5 + 0.1) / 3)
    assert found["lambda_smooth"] == pytest.approx((0.01 + 3 + 0.01) / 3)
    module.beta = 0.2  # a callback doubles it: .2 and 1
    losses = {"a": softplus(0.2 * 0.690055), "b": softplus(0.690055)}
    share, metrics = module.loss(batch, UNIT_TERMS)
    for name, loss in losses.items():
        assert means(metrics)[f"domain/{name}/loss"] == pytest.approx(loss, abs=1e-6)


def test_adaptive_weights_in_the_loss() -> None:
    """q = (.25, .75), two pairs of a and one of b: q_a L_a + q_b L_b, not the mean over pairs."""
    domains = DomainConfig(beta={"b": 0.5}, adaptive=True)
    module, batch = golden_domains("a", "b", "a", domains=domains, lambda_entropy=0.0, lambda_smooth=0.0)
    module.domains.know(["a", "b"])
    module.domains.weights = {"a": 0.25, "b": 0.75}
    counts = module.regularisers.counts(batch, module.domains.counts(batch, torch.ones(3)))
    share, metrics = module.loss(batch, counts)
    losses = softplus(0.1 * 0.690055), softplus(0.5 * 0.690055)
    assert float(share.detach()) == pytest.approx(0.25 * losses[0] + 0.75 * losses[1], abs=1e-6)
    # The metric stays the mean over pairs, comparable with validation.
    assert means(metrics)["loss/dpo"] == pytest.approx((2 * losses[0] + losses[1]) / 3, abs=1e-6)


def test_weights_follow_the_losses_of_each_batch(tmp_path: Path) -> None:
    """Two batches; q after each from the logged losses, by the formula. A skipped step moves nothing."""
    domains = DomainConfig(beta={"b": 2.0}, adaptive=True, step_size=0.7)
    watch, _, module = run(tmp_path, domains=domains, batch_size=4, optim=replace(SGD, lr=0.5))
    q = {"a": 0.5, "b": 0.5}
    for logged, update in zip(watch.logged, watch.updates, strict=True):
        for name in q:
            assert logged[f"domain/{name}/weight"] == pytest.approx(q[name], rel=1e-6)
        grown = {n: w * math.exp(0.7 * update[f"domain/{n}/loss"]) for n, w in q.items()}
        q = {n: w / sum(grown.values()) for n, w in grown.items()}
    assert module.domains.weights == pytest.approx(q, rel=1e-6)
    assert abs(q["a"] - q["b"]) > 1e-3
    before = dict(module.domains.weights)
    module.note_update(loss=math.nan, grad_norm=1.0, lr=0.1, metrics={})
    assert module.domains.weights == before


def test_validation_tells_the_worst_domain(tmp_path: Path) -> None:
    module = GeneralizedRPO(policy=TINY, reference="copy", domains=DomainConfig())
    module = moved(module)
    t = trainer(tmp_path)
    (found,) = t.validate(module, datamodule=FixedData(pairs(9)), verbose=False)
    each = [found[f"val/domain/{name}/accuracies"] for name in "ab"]
    assert found["val/worst_domain/accuracies"] == min(each)
    assert found["val/rewards/accuracies"] == pytest.approx((6 * each[0] + 3 * each[1]) / 9)
    whole = found["val/loss/dpo"] + found["val/penalty/entropy"] + found["val/penalty/smooth"]
    assert found["val/loss"] == pytest.approx(whole)


# ---------------------------------------------------------------------- state


def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """C21: weights, moments, domain weights; beta and lambdas as a callback left them."""

    class Ramp(L.Callback):
        """Moves what may move, from where it stands."""

        def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            module.beta *= 1.1
            module.lambda_entropy += 0.1
            module.lambda_smooth *= 0.9

    def build() -> Any:
        domains = DomainConfig(beta={"b": 0.5}, adaptive=True, step_size=0.5)
        optim = OptimConfig(lr=1e-3, warmup_steps=2, schedule="constant")  # of a length that max_steps does not set
        clip = ComponentClipConfig(ratio=0.5, at="states")
        return GeneralizedRPO(policy=TINY, reference="copy", domains=domains, optim=optim, component_clip=clip)

    def go(module: Any, steps: int, **settings: Any) -> Any:
        ckpt = settings.pop("ckpt_path", None)
        own = {"max_epochs": -1, "limit_val_batches": 0, "plugins": [SafeCheckpointIO()], "callbacks": [Ramp()]}
        t = trainer(tmp_path, max_steps=steps, **own)
        t.fit(module, datamodule=FixedData(pairs(16), batch_size=4), ckpt_path=ckpt)
        return t

    whole, first, second = build(), build(), build()
    go(whole, 8)
    go(first, 4).save_checkpoint(tmp_path / "c")
    go(second, 8, ckpt_path=str(tmp_path / "c"))
    assert (second.beta, second.lambda_entropy, second.lambda_smooth) == (
        whole.beta,
        whole.lambda_entropy,
        whole.lambda_smooth,
    )
    assert second.domains.weights == whole.domains.weights
    assert len(second.domains.weights) == 2
    for a, b in zip(second.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_stage_values_reach_the_loss() -> None:
    """[G-STAGE]: beta at steps 0, 99, 100, 150, 200, 300, 400 of warm 100 and ramp 200, whoever moves it: the loss is
    that of DPO at this beta."""
    module, batch = golden_domains("a", lambda_entropy=0.0, lambda_smooth=0.0)
    counts = module.regularisers.counts(batch, {})
    for beta in (0.05, 0.05, 0.05, 0.0875, 0.125, 0.2, 0.2):
        module.beta = beta
        share, metrics = module.loss(batch, counts)
        assert float(share.detach()) == pytest.approx(softplus(beta * 0.690055), abs=1e-6)
        assert means(metrics)["beta"] == pytest.approx(beta)
    for weight in (0.05, 0.01):  # the entropy's emphasis, five times lambda, and its end
        module.lambda_entropy = weight
        expected = softplus(0.2 * 0.690055) + weight * 0.129001
        assert float(module.loss(batch, counts)[0].detach()) == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambda_entropy": -0.1}, "lambda_entropy is -0.1; it must not be negative"),
        ({"lambda_smooth": math.nan}, "lambda_smooth is nan"),
        ({"entropy_floor": "ref"}, "entropy_floor is 'ref'; it is one of uniform, reference, constant"),
        ({"entropy_floor": "uniform", "entropy_level": 0.5}, "uniform is 1 and takes no entropy_level"),
        ({"entropy_floor": "constant"}, "constant needs entropy_level"),
        ({"entropy_level": 1.5}, "entropy_level is 1.5; it lies above 0 and at most at 1"),
        ({"entropy_scope": "all"}, "entropy_scope is 'all'; it is one of both, chosen, rejected"),
        ({"smooth_scope": "x"}, "smooth_scope is 'x'"),
        ({"smoothness": "prob"}, "smoothness is 'prob'; it is one of probability, logprob, variance, js, entropy"),
        ({"loss": "sigmod"}, "preference loss 'sigmod' is not known"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GeneralizedRPO(policy=TINY, **settings)


def test_an_adapter_on_the_head_and_what_needs_a_plain_one(tmp_path: Path) -> None:
    policy = PolicyConfig(lora=LoRAConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(UserError, match=r"smoothness js needs a plain linear LM head; .* use another smoothness"):
        GeneralizedRPO(policy=policy, smoothness="js").configure_model()
    with pytest.raises(UserError, match="gradients at hidden states need a plain linear LM head"):
        run(tmp_path, policy=policy, reference="adapter_off", component_clip=ComponentClipConfig(at="states"))
    plain = PolicyConfig(logprob_path="plain")
    with pytest.raises(UserError, match=r"need the shared path; .* takes the plain one \(it was asked for\)"):
        run(tmp_path, policy=plain, component_clip=ComponentClipConfig(at="states"))


def test_a_training_row_without_a_domain_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    module = GeneralizedRPO(policy=TINY, reference="copy", domains=DomainConfig(column="field"))
    with pytest.raises(UserError, match="row 0 has None in column 'field'"):
        fit(module, tmp_path, FixedData(pairs(), batch_size=4))
    module = GeneralizedRPO(policy=TINY, reference="copy", domains=DomainConfig())
    held_out = [*pairs(2), replace(groups(3, 2)[2], columns={})]
    with pytest.raises(UserError, match="validation row 2 has None in column 'domain'"):
        fit(module, tmp_path, FixedData(pairs(), held_out, batch_size=4), limit_val_batches=1.0)


def test_predictions_use_the_beta_of_the_domain(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"policy": TINY, "reference": "copy"}
    rows = []
    for domains in (None, DomainConfig(beta={"b": 0.3})):
        module = moved(GeneralizedRPO(domains=domains, **settings))
        rows.append(module.predict_step(GroupBatch.from_groups(pairs(3)), 0))
    plain, own = ([row["reward_chosen"] for row in found] for found in rows)
    assert own == pytest.approx([plain[0], plain[1], 3 * plain[2]], rel=1e-5)


# ---------------------------------------------------------------------- with the rest of the preference family


@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize(
    "settings",
    [{"loss": "aot"}, {"loss": "bco"}, {"loss": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}}, {"weighting": "wpo"}],
    ids=str,
)
def test_losses_that_look_at_the_whole_batch_mixes_and_weightings(
    settings: dict[str, Any], clip: str, tmp_path: Path
) -> None:
    """The preference part is that of DPO with the same settings, whatever the micro-batches; betas of domains too, but
    with aot, which has none."""
    own: dict[str, Any] = {"entropy_floor": "uniform", "component_clip": CLIPS[clip]}
    plain, _, _ = run(tmp_path, DPO, **settings)
    kinds = (DomainConfig(adaptive=True), DomainConfig(beta={"b": 0.5}))
    for domains in (DomainConfig(), DomainConfig(lambda_smooth={"b": 0.5})) if settings == {"loss": "aot"} else kinds:
        found = []
        for tokens in (None, 40):
            watch, _, module = run(tmp_path, micro_batch_tokens=tokens, domains=domains, **own, **settings)
            if not domains.beta:
                assert watch.updates[0]["loss/dpo"] == pytest.approx(plain.updates[0]["loss"], rel=1e-5)
            found.append((watch, module))
        (a, one), (b, other) = found
        assert float((a.gradients[0] - b.gradients[0]).norm()) <= 2e-5 * float(a.gradients[0].norm())
        assert a.updates[0] == pytest.approx(b.updates[0], rel=1e-4, abs=1e-5)
        assert one.loss_memory == pytest.approx(other.loss_memory)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired", {"sigmoid": 1.0, "aot": 0.5}], ids=str)
@pytest.mark.parametrize("own", [{"adaptive": True}, {"beta": {"a": 0.2}}], ids=str)
def test_sorted_pairs_have_no_domain(own: dict[str, Any], loss: Any) -> None:
    message = rf"domains.{next(iter(own))} does not go with aot\w*: sorted values of different pairs have no domain"
    with pytest.raises(UserError, match=message) as error:
        GeneralizedRPO(policy=TINY, loss=loss, domains=DomainConfig(**own))
    assert "\n" not in str(error.value)
    GeneralizedRPO(policy=TINY, loss="sigmoid", domains=DomainConfig(**own))


@pytest.mark.parametrize(
    ("clip", "loss"), [("states", "sigmoid"), ("states", "aot"), ("none", "aot"), ("parameters", "bco")]
)
def test_the_reference_is_asked_once(clip: str, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a batch of several micro-batches is read twice: each token in one pass, with its entropy."""
    asked: list[int] = []
    stats = FrozenCopy.token_stats

    def counted(self: FrozenCopy, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        asked.append(len(batch.completion_ids))
        return stats(self, batch)

    monkeypatch.setattr(FrozenCopy, "token_stats", counted)
    monkeypatch.setattr(FrozenCopy, "token_logps", None)
    run(tmp_path, component_clip=CLIPS[clip], loss=loss, micro_batch_tokens=40)
    assert len(asked) > 1
    assert sum(asked) == len(GroupBatch.from_groups(pairs()).completion_ids)
