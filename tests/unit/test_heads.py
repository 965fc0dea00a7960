"""Heads and fusion by hand, in the model, and along the routes of gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.full_kl import Head
from alignment.head_config import BudgetConfig, FusionConfig, HeadsConfig
from alignment.heads import Heads, HeadsSpec, mixture, preference
from alignment.lm_head import score_tokens
from alignment.local_rollout import LocalRollout
from alignment.logprobs import LogProbEngine
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.rollout import SamplingConfig
from alignment.routes import route, score_routes, together
from tests.toys import TINY, groups

WEIGHTS = {"tone": 1.0, "facts": 1.0, "length": 1.0}
SPEC = HeadsSpec(
    names=("a", "b"), hidden=3, rank=2, width=8, scaled=True, pool="log_linear", temperature=1.0, weights=(0.5, 0.5)
)


def heads_of(policy: nn.Module, moved: float = 0.0, **fusion: Any) -> Heads:
    """Heads on a policy, with what is 0 at first moved away from it."""
    heads = Heads(HeadsSpec.of(policy, WEIGHTS, HeadsConfig(), FusionConfig(**fusion)))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(torch.randn(p.shape, generator=draw) * moved)
    return heads


# ---------------------------------------------------------------------- by hand


class Given(nn.Module):
    """A sub-policy whose logits under W = 1 are given."""

    def __init__(self, z: list[float]) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.tensor(z, dtype=torch.float64))

    def forward(self, h: Tensor, *, frozen: bool = False) -> Tensor:
        return (self.z.detach() if frozen else self.z).expand_as(h)


class GivenScores(nn.Module):
    """A fusion whose scores are given."""

    def __init__(self, s: list[float]) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(s, dtype=torch.float64))

    def score(self, k: int, h: Tensor, u: Tensor, *, frozen: bool = False) -> Tensor:
        return (self.s.detach() if frozen else self.s)[k].expand(h.shape[:-1])


def given(pool: Any) -> Heads:
    """The example G-FUSE of ALGORITHMS section 8."""
    heads = Heads(replace(SPEC, pool=pool))
    heads.subs = nn.ModuleList([Given([2.0, 0.0, -1.0]), Given([0.0, 1.0, 0.5])])
    heads.fusion = GivenScores([0.5, -0.5])  # type: ignore[assignment]
    return heads.double()


FUSED = {
    "log_linear": (
        [-0.358287, -1.551462, -2.416992],
        ([-0.510917, 0.576120, -0.065203], [-0.187956, 0.211943, -0.023987]),
        [-0.403452, 0.403452],
    ),
    "linear": (
        [-0.405005, -1.515506, -2.177456],
        ([-0.320636, 0.336600, -0.015964], [-0.115522, 0.305985, -0.190463]),
        [-0.351065, 0.351065],
    ),
}
"""Pool -> log pi, the derivatives of log pi(1) by the logits of both heads, and by the scores."""


@pytest.mark.parametrize("pool", FUSED)
def test_fusion_by_hand(pool: str) -> None:
    logps, by_logits, by_scores = FUSED[pool]
    heads = given(pool)
    h = torch.zeros(3, 3, dtype=torch.float64)
    eye = Head(weight=torch.eye(3, dtype=torch.float64))
    found = route(heads, h, eye, torch.arange(3))
    for values in found.logps.tolist():
        assert values == pytest.approx(logps, abs=1e-6)
    assert found.alpha[0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)
    assert found.evenness[0].item() == pytest.approx(0.582203, abs=1e-6)
    assert found.entropy[0].item() == pytest.approx(-sum(math.exp(x) * x for x in logps), abs=1e-5)

    found.logps[1, 1].backward(retain_graph=True)
    assert heads.fusion.s.grad.tolist() == pytest.approx(by_scores, abs=1e-6)
    assert heads.subs[0].z.grad is None or not heads.subs[0].z.grad.any()
    for k in range(2):
        heads.zero_grad()
        found.logps[2 + k, 1].backward(retain_graph=True)
        assert heads.subs[k].z.grad.tolist() == pytest.approx(by_logits[k], abs=1e-6)
        other = heads.subs[1 - k].z.grad
        assert other is None or not other.any()
        assert heads.fusion.s.grad is None or not heads.fusion.s.grad.any()


def test_mixture_by_hand() -> None:
    states = [torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 1.0, 0.5])]
    found = mixture(states, torch.tensor([0.731059, 0.268941]).log(), torch.eye(3), None)
    assert found.tolist() == pytest.approx(FUSED["linear"][0], abs=1e-5)


def test_a_preference_moves_the_fusion_weights() -> None:
    """alpha = softmax(s + log w): with s = (.5, -.5) and w = (.2, .8) it is (.2 e, .8) / (.2 e + .8)."""
    heads = given("log_linear")
    h, eye = torch.zeros(1, 3, dtype=torch.float64), Head(weight=torch.eye(3, dtype=torch.float64))
    with heads.preferring((0.2, 0.8)):
        alpha = route(heads, h, eye, torch.tensor([0])).alpha[0].tolist()
    share = math.e * 0.2 / (math.e * 0.2 + 0.8)
    assert alpha == pytest.approx([share, 1 - share])
    assert heads.preference == (0.5, 0.5)
    with heads.preferring(heads.alone(1)):
        assert heads.active == [1]
        assert heads(h).tolist() == [[0.0, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"x": 1.0}, "names x, no reward"), ({"a": -1.0}, "at least 0"), ({"a": 0.0, "b": 0.0}, "one of them above 0")],
)
def test_preferences_that_are_none(given: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        preference({"a": 1.0, "b": 2.0}, given)
    assert preference({"a": 1.0, "b": 3.0}, {}) == (0.25, 0.75)
    assert preference({"a": 1.0, "b": 3.0}, {"b": 0.0}) == (1.0, 0.0)


def test_budget_by_hand() -> None:
    """84,000 trained parameters of the trunk are 70 shares of 1,200; two heads on a width of 10 cost 40 a unit of rank,
    so 30 shares are rank 900; 10 shares are width 300."""
    assert BudgetConfig().fit(84_000, hidden=10, count=2) == (900, 300)
    assert BudgetConfig(trunk=98, heads=1, fusion=1).fit(98, hidden=10, count=2) == (1, 1)


def test_budget_sizes_the_parts() -> None:
    policy = load_policy(TINY)
    heads = Heads(HeadsSpec.of(policy, WEIGHTS, HeadsConfig(), FusionConfig(), BudgetConfig()))
    trunk = sum(p.numel() for p in policy.parameters())
    parts = [sum(p.numel() for p in part.parameters()) for part in (heads.subs, heads.fusion)]
    assert [n / trunk for n in parts] == pytest.approx([3 / 7, 1 / 7], rel=0.01)


# ---------------------------------------------------------------------- one walk of the vocabulary


@pytest.mark.parametrize("bias", [False, True])
def test_routes_through_the_lm_head_are_score_tokens(bias: bool) -> None:
    """Values and every gradient, entropies included, as three separate calls would give them."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    weight = torch.randn(600, 4, generator=draw, dtype=torch.float64).requires_grad_()
    offset = torch.randn(600, generator=draw, dtype=torch.float64).requires_grad_() if bias else None
    targets = torch.randint(600, (5,), generator=draw)
    slopes = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    steep = torch.randn(5, generator=draw, dtype=torch.float64)
    states = base.expand(3, -1, -1).clone().requires_grad_()
    logps, entropy = score_routes(states, weight, offset, targets, temperature=0.7, tile_bytes=4096)
    ((logps * slopes).sum() + (entropy * steep).sum()).backward()
    found = [states.grad, weight.grad, offset.grad if offset is not None else None]
    weight.grad = None
    if offset is not None:
        offset.grad = None

    apart = [base.clone().requires_grad_() for _ in range(3)]
    for i, state in enumerate(apart):
        held = (weight, offset) if i == 0 else (weight.detach(), None if offset is None else offset.detach())
        own, ent = score_tokens(state, *held, targets, temperature=0.7, entropy=True)
        assert torch.allclose(logps[i], own)
        ((own * slopes[i]).sum() + (ent * steep).sum()).backward()
    assert torch.allclose(found[0], torch.stack([s.grad for s in apart]))
    assert torch.allclose(found[1], weight.grad)
    if offset is not None:
        assert torch.allclose(found[2], offset.grad)


def test_together_has_the_value_of_one_and_the_gradients_of_all() -> None:
    routes = torch.tensor([[2.0], [2.0], [2.0]], requires_grad=True)
    whole = together(routes)
    (whole * 3).sum().backward()
    assert whole.tolist() == [2.0]
    assert routes.grad.tolist() == [[3.0]] * 3


@pytest.mark.parametrize("pool", ["log_linear", "linear"])
def test_each_gradient_reaches_its_part_alone(pool: str) -> None:
    policy = load_policy(TINY)
    heads = heads_of(policy, 0.05, pool=pool)
    head = Head.of(policy)
    h = torch.randn(7, head.weight.shape[1], generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = route(heads, h, head, torch.arange(7))
    parts = {0: [h, head.weight], 1: list(heads.fusion.parameters())}
    parts |= {2 + k: list(heads.subs[k].parameters()) for k in range(3)}
    for i in parts:
        for part in parts.values():
            for p in part:
                p.grad = None
        found.logps[i].sum().backward(retain_graph=True)
        for j, part in parts.items():
            reached = [p.grad is not None and bool(p.grad.any()) for p in part]
            assert all(reached) if i == j else not any(reached), f"route {i}, part {j}"


# ---------------------------------------------------------------------- in the model


ARCHITECTURES = {
    "tiny": TINY,
    "adapters": PolicyConfig(name="tiny", lora=LoRAConfig(r=4)),
    "gemma2": PolicyConfig(
        arch={"model_type": "gemma2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        attention="eager",
    ),
    "recurrent": PolicyConfig(
        arch={"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, attention="eager"
    ),
}


def batch_of(policy: nn.Module) -> GroupBatch:
    return GroupBatch.from_groups(groups(3, 2))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_policy_is_its_base_at_first(name: str) -> None:
    policy = load_policy(ARCHITECTURES[name])
    engine = LogProbEngine(policy)
    batch = batch_of(policy)
    before = engine(batch, entropy=True)
    heads = heads_of(policy)
    heads.attach(policy)
    after = engine(batch, entropy=True)
    assert torch.allclose(before.logps, after.logps, atol=1e-6)
    assert torch.allclose(before.entropy, after.entropy, atol=1e-6)


@pytest.mark.parametrize("pool", ["log_linear", "linear"])
@pytest.mark.parametrize("name", ["tiny", "adapters"])
def test_routes_score_what_the_model_says(name: str, pool: str) -> None:
    """Log-probs along routes are those of the model with its heads in it, and those of rollouts."""
    policy = load_policy(ARCHITECTURES[name])
    engine = LogProbEngine(policy)
    engine.verify()
    heads = heads_of(policy, 0.05, pool=pool)
    heads.attach(policy)
    rollout = LocalRollout(policy, pad_id=0, stop_ids=[3])
    made = rollout.generate(groups(3, 2), 2, SamplingConfig(max_tokens=8), seed=0, step=0)
    assert rollout.path == "shared"
    batch = made.batch
    with heads.detached():
        h = engine(batch, logps=False, hidden="before").hidden
    found = route(heads, h, Head.of(policy), batch.completion_ids)
    assert torch.allclose(found.logps[0], made.sampler_logps, atol=1e-5)
    plain = LogProbEngine(policy, path="plain")(batch, entropy=True)
    assert torch.allclose(found.logps[0], plain.logps, atol=1e-5)
    assert torch.allclose(found.entropy, plain.entropy, atol=1e-5)
    with heads.detached():
        assert not torch.allclose(engine(batch).logps, plain.logps, atol=1e-3)


def test_generate_of_transformers_says_what_rollouts_say() -> None:
    policy = load_policy(TINY).eval()
    heads = heads_of(policy, 2.0)
    heads.attach(policy)
    greedy = SamplingConfig(max_tokens=8, temperature=0.0, stop_ids=[])
    prompt = groups(1, 1)[0]
    made = LocalRollout(policy, pad_id=0, stop_ids=[]).generate([prompt], 1, greedy, seed=0, step=0)
    ids = torch.tensor([list(prompt.prompt)])
    said = policy.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert said[0, ids.shape[1] :].tolist() == made.batch.completion_ids.tolist()
    with heads.detached():
        base = policy.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert base.tolist() != said.tolist()


def test_models_whose_head_cannot_be_shared() -> None:
    with pytest.raises(UserError, match="scales or caps"):
        heads_of(load_policy(ARCHITECTURES["gemma2"]), pool="linear")
    adapted = PolicyConfig(name="tiny", lora=LoRAConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(UserError, match="share the LM head"):
        heads_of(load_policy(adapted))
