"""PPO: golden advantages and values by hand through the module, the cases C1 to C17, critics beside penalties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.experience import REF_LOGPS, TRUNCATED, table_of
from alignment.objective import OLD_LOGPS
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.rollout import SAMPLER_LOGPS
from alignment.update import Counts
from modules.ppo import ADVANTAGES, PPO, RETURNS, VALUES
from tests.rl_toys import SaidBefore, fit, here, moved, online, prompts, scripted
from tests.toys import FixedData

NAN = float("nan")
K1 = {"coefficient": 0.05, "estimator": "k1", "place": "reward"}
OLD = torch.tensor([-1, -2, -0.5, -0.7, -1.5])
REF = torch.tensor([-1.1, -1.9, -0.6, -0.9, -1.4])
V = torch.tensor([0.2, 0.1, 0.3, 0, -0.1])


def golden_batch(scores: list[float], cut: list[float] | None = None) -> GroupBatch:
    """Completions of 3 and 2 tokens: [G-GAE]."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5] * n]) for n in (3, 2)])
    tokens = {OLD_LOGPS: OLD, REF_LOGPS: REF, SAMPLER_LOGPS: OLD, VALUES: V}
    rows = {"reward/odd": torch.tensor(scores), TRUNCATED: torch.tensor(cut or [0.0, 0.0])}
    return batch.with_tokens(**tokens).with_rows(**rows)


def credited(batch: GroupBatch, **settings: Any) -> tuple[GroupBatch, PPO]:
    module = online(PPO, **settings)
    out: GroupBatch = module.credit(batch, table_of(batch, ("odd",), torch.ones(1)))
    return out, module


class Values:
    """A critic whose values are given."""

    shares_trunk = False

    def __init__(self, values: Tensor) -> None:
        self.values = values.clone().requires_grad_()

    def __call__(self, batch: GroupBatch, states: Tensor | None) -> Tensor:
        return self.values


# ---------------------------------------------------------------------- golden values


def test_golden_gae() -> None:
    """[G-GAE]: rewards minus the KL, returns, whitened advantages."""
    out, module = credited(golden_batch([1.0, -0.5]), kl=K1)
    whitened = [0.662155, 0.886503, 0.628884, -1.157053, -1.020488]
    assert out.tokens[ADVANTAGES].tolist() == pytest.approx(whitened, abs=1e-6)
    assert out.tokens[RETURNS].tolist() == pytest.approx([0.916988, 0.965250, 0.995, -0.485250, -0.495], abs=1e-6)
    plain, _ = credited(golden_batch([1.0, -0.5]), kl=K1, whiten_advantages=False)
    raw = [0.716987, 0.865250, 0.695, -0.485250, -0.395]
    assert plain.tokens[ADVANTAGES].tolist() == pytest.approx(raw, abs=1e-6)
    means = {name: float(total / count) for name, (total, count, _) in module._train_window._cells.items()}
    # Token rewards are -.005 .005 .995 and -.01 -.495: KL costs of .005 and .005 beside the scores.
    assert means["objective/scores"] == pytest.approx(0.25)
    assert means["objective/rlhf_reward"] == pytest.approx((0.995 - 0.505) / 2, abs=1e-6)
    assert means["objective/non_score_reward"] == pytest.approx(-0.005, abs=1e-6)
    assert means["objective/entropy"] == pytest.approx((3.5 + 2.2) / 2, abs=1e-6)
    errors = torch.tensor([0.716988, 0.865250, 0.695, -0.485250, -0.395])
    returns = torch.tensor([0.916988, 0.965250, 0.995, -0.485250, -0.495])
    assert means["explained_variance"] == pytest.approx(float(1 - errors.var() / returns.var()), abs=1e-5)


def test_score_stands_on_the_last_token() -> None:
    """C17: with an end of text, and at the full length; the penalty for a missing end is taken from the score."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 6, 3], [5, 6, 7, 8, 9]])])
    nothing = torch.zeros(8)
    batch = batch.with_tokens(**{SAMPLER_LOGPS: nothing, OLD_LOGPS: nothing, VALUES: nothing})
    rows = {"reward/odd": torch.ones(2), TRUNCATED: torch.tensor([0.0, 1.0])}
    settings: dict[str, Any] = {"kl": {"coefficient": 0}, "whiten_advantages": False, "gamma": 0.5, "lam": 1.0}
    out, _ = credited(batch.with_rows(**rows), missing_eos_penalty=0.25, **settings)
    # Without values the return is the discounted score: at distance 0 from where it stands it is whole.
    expected = [0.25, 0.5, 1.0, *(0.75 * 0.5**k for k in (4, 3, 2, 1, 0))]
    assert out.tokens[RETURNS].tolist() == pytest.approx(expected)


def test_value_loss_by_hand() -> None:
    """values .5 and .2 from old ones of 0 and R = 1: clipped to .2, the larger error counts; weight c_v."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 6]])])
    flat = torch.tensor([-1.0, -1.0])
    batch = batch.with_tokens(
        **{OLD_LOGPS: flat, VALUES: torch.zeros(2), RETURNS: torch.ones(2), ADVANTAGES: torch.tensor([0.5, -0.5])}
    )
    module = online(PPO, kl={"coefficient": 0}, value_coefficient=0.3)
    module.engine, module.critic = SaidBefore(flat), Values(torch.tensor([0.5, 0.2]))
    share, metrics = module.loss(batch, Counts(prompts=1, rows=1, tokens=2))
    share.backward()
    # (.2 - 1)^2 / 2 = .32 for both; the first one has no gradient beyond its clip.
    assert float(share.detach()) == pytest.approx(0.3 * 0.32)
    assert float(module.critic.values.grad[0]) == 0
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert means["loss/value_avg"] == pytest.approx(0.32)
    assert (means["val/clipfrac_avg"], means["value_mean"]) == pytest.approx((0.5, 0.35))
    free = online(PPO, kl={"coefficient": 0}, value_clip=None)
    free.engine, free.critic = SaidBefore(flat), Values(torch.tensor([0.5, 0.2]))
    share, metrics = free.loss(batch, Counts(prompts=1, rows=1, tokens=2))
    assert float(share.detach()) == pytest.approx(0.1 * (0.125 + 0.32) / 2)
    assert "val/clipfrac_avg" not in metrics


def test_policy_loss_and_kl_in_the_loss() -> None:
    """[G-PG] with token advantages 1 and -1 and +.04 k3; the critic is exact."""
    new = torch.tensor([-0.7, -2.3, -0.5, -1.1, -1.2])
    batch = golden_batch([0.0, 0.0]).with_tokens(**{ADVANTAGES: torch.tensor([1.0, 1, 1, -1, -1]), RETURNS: V})
    module = online(PPO, kl={"coefficient": 0.04, "estimator": "k3", "place": "loss"})
    module.engine, module.critic = SaidBefore(new), Values(V)
    share, metrics = module.loss(batch, Counts(prompts=2, rows=2, tokens=5))
    assert float(share.detach()) == pytest.approx(-0.156535, abs=1e-6)
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert means["loss/policy_avg"] == pytest.approx(-0.158192, abs=1e-6)
    assert means["policy/clipfrac_avg"] == pytest.approx(0.4)


# ---------------------------------------------------------------------- what is not trained on


def test_a_completion_without_score_is_not_trained_on() -> None:
    """It is in no statistic: whitening and metrics are those of the others."""
    out, module = credited(golden_batch([NAN, -0.5], [0.0, 1.0]), kl=K1, missing_eos_penalty=0.1)
    assert out.scored.tolist() == [False] * 3 + [True] * 2
    # A_2 = -.495 - .1 + .1 = -.495 and A_1 = -.01 + (-.1 - 0) + .95 A_2, whitened: plus and minus 1 / sqrt 2.
    assert out.tokens[ADVANTAGES].tolist() == pytest.approx([0, 0, 0, -0.707107, 0.707107], abs=1e-5)
    total, count, _ = module._train_window._cells["objective/scores"].tolist()
    assert total / count == pytest.approx(-0.6)


@pytest.mark.parametrize("kind", ["head", "copy"])
def test_empty_completion(kind: str, tmp_path: Path) -> None:
    """Handled, not forbidden: the same gradient as without it."""
    data = FixedData(prompts(2), batch_size=2)
    runs = []
    for said in ([[], [5], [5, 6]], [[5], [5, 6]]):
        module = online(PPO, completions=len(said), critic={"kind": kind}, epochs=2)
        runs.append(fit(scripted(module, said), tmp_path, data)[0])
    assert runs[0].updates == [pytest.approx(u, abs=1e-6) for u in runs[1].updates]
    torch.testing.assert_close(runs[0].gradients[0], runs[1].gradients[0], atol=1e-7, rtol=1e-5)
    assert runs[0].logged[0]["completions/min_length"] == 0


def test_nothing_but_empty_or_masked_completions(tmp_path: Path) -> None:
    for said, cut in (([[], []], [False, False]), ([[5, 6], [7]], [True, True])):
        module = scripted(online(PPO, completions=2, mask_truncated=True), said, cut)
        watch, run = fit(module, tmp_path, max_steps=4)
        assert [(u["loss"], u["grad_norm"]) for u in watch.updates] == [(0.0, 0.0)] * 4
        assert run.global_step == 4
        assert watch.logged[0]["kl"] == 0


def test_nan_behind_the_mask() -> None:
    """C3: old, reference and value NaN at an unscored token."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 6]], scored=[[True, False]])])
    gone = torch.tensor([0.0, NAN])
    batch = batch.with_tokens(**dict.fromkeys((OLD_LOGPS, REF_LOGPS, SAMPLER_LOGPS, VALUES), gone))
    batch = batch.with_rows(**{"reward/odd": torch.ones(1), TRUNCATED: torch.zeros(1)})
    out, module = credited(batch, kl=K1, whiten_advantages=False)
    assert out.tokens[ADVANTAGES].tolist() == [1.0, 0.0]
    module.engine, module.critic = SaidBefore([0.0, 0.0]), Values(torch.zeros(2))
    share, _ = module.loss(out, Counts(prompts=1, rows=1, tokens=1))
    share.backward()
    assert float(share.detach()) == pytest.approx(-1 + 0.1 * 0.5)
    assert torch.isfinite(module.engine.logps.grad).all()
    assert torch.isfinite(module.critic.values.grad).all()
    assert float(module.follow(out)["kl"][0]) == 0


# ---------------------------------------------------------------------- updates

SGD = OptimConfig(lr=1e-3, optimizer="sgd", schedule="constant", clip_norm=None)
VARIANTS: dict[str, dict[str, Any]] = {
    "head": {"epochs": 2, "minibatches": 2},
    "copy, full KL": {"critic": {"kind": "copy"}, "epochs": 1, "kl": {"coefficient": 0.1, "estimator": "full_js"}},
    "masks": {"mask_truncated": True, "entropy": {"coefficient": 0.01, "keep": 0.5}, "epochs": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_change_nothing(name: str, tmp_path: Path) -> None:
    """C1: loss, gradient and every metric of every update."""
    runs = [
        fit(moved(online(PPO, micro_batch_tokens=bound, optim=SGD, **VARIANTS[name])), tmp_path, max_steps=4)[0]
        for bound in (None, 1)
    ]
    whole, split = runs
    assert float(whole.gradients[0].norm()) > 1e-2
    for a, b in zip(split.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    for a, b in zip(split.updates + split.logged, whole.updates + whole.logged, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=2e-6, nan_ok=True)


@pytest.mark.parametrize("policy", [PolicyConfig(), PolicyConfig(lora=LoRAConfig(r=4)), PolicyConfig(dtype="bfloat16")])
def test_first_pass_ratio_is_1(policy: PolicyConfig, tmp_path: Path) -> None:
    """C8 at temperature 0.6: on the first pass of both rollouts, and no value is clipped."""
    sampling = {"temperature": 0.6, "max_tokens": 6}
    watch, _ = fit(online(PPO, policy=policy, sampling=sampling, epochs=2), tmp_path)
    largest = 0.03 if policy.dtype == "bfloat16" else 1e-5
    for update in watch.updates[::2]:
        assert update["policy/approxkl_avg"] <= largest**2 / 2
        assert (update["clip_ratio/region_mean"], update["val/clipfrac_avg"]) == (0, 0)
    for update in watch.updates[1::2]:
        assert update["policy/approxkl_avg"] > 1e-8


def test_values_learn_what_returns_are(tmp_path: Path) -> None:
    """A score that is always 1: the critic comes to say so, and the policy is left alone but for the shared trunk."""
    rewards = {"same": here(lambda completions: [1.0] * len(completions))}
    optim = OptimConfig(lr=3e-3, schedule="constant")
    module = online(PPO, rewards=rewards, kl={"coefficient": 0}, lam=1.0, optim=optim, value_coefficient=1.0)
    watch, _ = fit(module, tmp_path, FixedData(prompts(32), batch_size=4))
    assert watch.updates[0]["value_mean"] == 0
    assert watch.updates[-1]["value_mean"] == pytest.approx(1, abs=0.2)
    assert watch.updates[-1]["loss/value_avg"] < 0.05 < watch.updates[0]["loss/value_avg"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -1}, "lam -1"),
        ({"value_clip": 0}, "value_clip 0; the first is"),
        ({"value_coefficient": -1}, "value_coefficient"),
        ({"missing_eos_penalty": -1}, "missing_eos_penalty"),
        ({"critic": {"kind": "heads"}}, "critic.kind is one of head, copy, reward_model"),
        ({"kl": {"coefficient": 0, "target": 6}}, "an adaptive KL needs coefficient"),
        ({"epochs": 0}, "epochs is 0"),
        ({"missing_eos_penalty": NAN}, "missing_eos_penalty is nan"),
        ({"value_coefficient": NAN}, "value_coefficient is nan"),
        ({"value_clip": NAN}, "value_clip nan"),
    ],
)
def test_mistakes_are_told_in_one_line(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError) as caught:
        online(PPO, **settings)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
