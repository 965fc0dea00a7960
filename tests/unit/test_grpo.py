"""GRPO: golden values of ALGORITHMS sections 2 to 5 through the module, the cases C1 to C16, skipping, penalties."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.experience import ADVANTAGE, REF_LOGPS, table_of
from alignment.objective import OLD_LOGPS
from alignment.optim import OptimConfig
from alignment.penalties import KLConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.policy_losses import POLICY_LOSSES
from alignment.rollout import SAMPLER_LOGPS
from alignment.update import Counts
from modules.grpo import GRPO
from tests.rl_toys import SAMPLING, SaidBefore, fit, here, moved, odd_in_some, ones, online, prompts, scripted
from tests.toys import TINY, FixedData

NAN = float("nan")
LORA = PolicyConfig(name="tiny", lora=LoRAConfig(r=4))
SGD = OptimConfig(lr=1e-3, optimizer="sgd", schedule="constant", clip_norm=None)


def two_rewards(completions: list[str]) -> list[float]:
    raise AssertionError("the rewards of this module are given")


def credited(rewards: list[list[list[float]]], **settings: Any) -> GroupBatch:
    """GRPO's advantages for rewards[group][completion][reward]."""
    names = [f"r{k}" for k in range(len(rewards[0][0]))]
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 3]] * len(group)) for group in rewards])
    values = torch.tensor([row for group in rewards for row in group])
    batch = batch.with_rows(**{f"reward/{name}": values[:, k] for k, name in enumerate(names)})
    module = online(GRPO, rewards={name: here(two_rewards) for name in names}, **settings)
    out: GroupBatch = module.credit(batch, table_of(batch, module.suite.names, module.suite.weights))
    return out


def advantages(rewards: list[list[list[float]]], **settings: Any) -> list[float]:
    return credited(rewards, **settings).rows[ADVANTAGE].tolist()


# ---------------------------------------------------------------------- golden values

G_ADV = [
    [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]],
    [[2.5, 1.0], [-1.0, 1.0], [-3.0, 1.0], [0.5, 1.0]],
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.224595, 0, 0, -1.224595, 1.181539, -0.322238, -1.181539, 0.322238]),
        ({"advantage_args": {"eps": 1e-6}}, [1.224743, 0, 0, -1.224743, 1.181589, -0.322252, -1.181589, 0.322252]),
        ({"advantage": "none"}, [1, 0, 0, -1, 2.75, -0.75, -2.75, 0.75]),
        ({"advantage": "batch"}, [0.617175, 0, 0, -0.617175, 1.697232, -0.462881, -1.697232, 0.462881]),
        ({"advantage": "rloo"}, [1.333333, 0, 0, -1.333333, 3.666667, -1, -3.666667, 1]),
    ],
)
def test_golden_advantages(settings: dict[str, Any], expected: list[float]) -> None:
    """[G-ADV]."""
    assert advantages(G_ADV, **settings) == pytest.approx(expected, abs=1e-6)


OLD = torch.tensor([-1, -2, -0.5, -0.7, -1.5])
NEW = torch.tensor([-0.7, -2.3, -0.5, -1.1, -1.2])
REF = torch.tensor([-1.1, -1.9, -0.6, -0.9, -1.4])
K3 = {"coefficient": 0.04, "estimator": "k3"}


def golden_batch(old: Tensor = OLD, ref: Tensor = REF) -> GroupBatch:
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5] * n]) for n in (3, 2)])
    return batch.with_rows(**{ADVANTAGE: torch.tensor([1.0, -1.0])}).with_tokens(
        **{OLD_LOGPS: old, REF_LOGPS: ref, SAMPLER_LOGPS: old}
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reduction": "seq_mean_token_mean"}, 0.047328),
        ({}, -0.158192),
        ({"reduction": "const"}, -0.098870),
        ({"reduction": "seq_mean_token_sum"}, -0.395480),
        ({"loss": "clip_higher"}, -0.174192),
        ({"reduction": "seq_mean_token_mean", "kl": K3}, 0.048843),
        ({"kl": K3}, -0.156535),
        ({"reduction": "const", "kl": K3}, -0.097834),
        ({"kl": {"coefficient": 0.04, "estimator": "k3_is"}}, -0.156533),
        ({"loss": "gspo", "loss_args": {"low": 0.2, "high": 0.2}}, -0.024385),
        ({"loss": "gspo"}, -0.000150),
        ({"loss": "cispo", "loss_args": {"cap": 1.28}}, 0.165306),
        ({"loss": "cispo"}, 0.158320),
        ({"loss": "sapo"}, -0.057497),
        ({"entropy": {"coefficient": 0.1}}, -0.258192),  # every entropy is 1 here
    ],
)
def test_golden_losses(settings: dict[str, Any], expected: float) -> None:
    """[G-PG], max_tokens 4."""
    module = online(GRPO, sampling={"max_tokens": 4}, **settings)
    module.engine = SaidBefore(NEW)
    share, metrics = module.loss(golden_batch(), Counts(prompts=2, rows=2, tokens=5))
    assert float(share.detach()) == pytest.approx(expected, abs=1e-6)
    if settings == {"kl": K3}:
        means = {name: float(total / count) for name, (total, count) in metrics.items()}
        assert means["kl"] == pytest.approx(0.041423, abs=1e-6)
        assert means["loss/policy_avg"] == pytest.approx(-0.158192, abs=1e-6)
        assert [means[f"clip_ratio/{x}_mean"] for x in ("low", "high", "region")] == pytest.approx([0.2, 0.2, 0.4])


def test_micro_batches_of_the_golden_loss_add_up() -> None:
    """C1 on numbers: one completion at a time gives the shares of the whole."""
    module = online(GRPO, kl=K3)
    batch, counts = golden_batch(), Counts(prompts=2, rows=2, tokens=5)
    shares = []
    for row, logps in enumerate(torch.split(NEW, [3, 2])):
        module.engine = SaidBefore(logps)
        shares.append(float(module.loss(batch.select_rows([row]), counts)[0].detach()))
    assert sum(shares) == pytest.approx(-0.156535, abs=1e-6)


# ---------------------------------------------------------------------- advantages: the cases


def test_leave_one_out() -> None:
    """C11."""
    group = [[[1.0], [0.0], [0.0], [0.0]]]
    assert advantages(group, advantage="rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    large = [[[1.0], *[[0.0]] * 400]]
    for scale in ("group", "batch"):
        assert max(map(abs, advantages(large, advantage="rloo", advantage_args={"scale": scale}))) <= 10


def test_abstentions() -> None:
    """C12; a completion without any reward is not trained on."""
    batch = credited([[[1.0], [NAN], [0.0]]], advantage="none")
    assert batch.rows[ADVANTAGE].tolist() == [0.5, 0, -0.5]
    assert batch.scored.tolist() == [True, True, False, False, True, True]
    assert advantages([[[1.0], [NAN], [NAN]]]) == [0, 0, 0]
    assert advantages([[[1.0], [NAN], [0.0], [0.0]]], advantage="rloo") == pytest.approx([1, 0, -0.5, -0.5])


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("constant", [0.3, 1.0, -1e6, 1e-9])
def test_equal_rewards_give_nothing(constant: float, size: int, tmp_path: Path) -> None:
    """C16, also counted."""
    rewards = {"same": here(lambda completions: [constant] * len(completions))}
    watch, _ = fit(online(GRPO, rewards=rewards, completions=size), tmp_path, max_steps=1)
    assert watch.logged[0]["frac_reward_zero_std"] == 1
    assert watch.logged[0]["adv/active_groups"] == 0
    assert watch.updates[0]["loss"] == 0
    # The gradient is 0, not missing: moments and schedule go on as for any other step.
    assert len(watch.gradients[0]) > 200_000
    assert not watch.gradients[0].any()


def test_kl_in_the_reward() -> None:
    """It lowers the score by the coefficient times the sum of the estimator over the completion."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 6], [7]])])
    old, ref = torch.tensor([-1, -2, -0.5]), torch.tensor([-1.5, -1.8, -0.7])
    batch = batch.with_tokens(**{OLD_LOGPS: old, SAMPLER_LOGPS: old, REF_LOGPS: ref})
    batch = batch.with_rows(**{"reward/odd": torch.tensor([1.0, 0.0])})
    module = online(GRPO, advantage="none", kl={"coefficient": 0.5, "estimator": "k1", "place": "reward"})
    out = module.credit(batch, table_of(batch, ("odd",), torch.ones(1)))
    # k1 is 0.5 - 0.2 = 0.3 and 0.2 nats: scores 1 - 0.15 and 0 - 0.1, half their difference either way.
    assert out.rows[ADVANTAGE].tolist() == pytest.approx([0.475, -0.475])
    # Two completions alike in reward: the one further from the reference is held back.
    batch = batch.with_rows(**{"reward/odd": torch.zeros(2)})
    out = module.credit(batch, table_of(batch, ("odd",), torch.ones(1)))
    assert out.rows[ADVANTAGE].tolist() == pytest.approx([-0.025, 0.025])


def one_value(completions: list[str]) -> list[float]:
    return [1.0]


def test_wrong_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C15: named, never broadcast."""
    settings: dict[str, Any] = {"rewards": {"short": here(one_value)}, "completions": 3}
    data = FixedData(prompts(1), batch_size=1)
    with pytest.raises(Exception, match=r"'short' failed for 3 of 3.*returned 1 value, expected 3"):
        fit(online(GRPO, scoring={"on_fault": "stop"}, **settings), tmp_path, data)
    watch, _ = fit(online(GRPO, **settings), tmp_path, data)
    assert (watch.updates[0]["loss"], watch.logged[0]["rewards/short/faults"]) == (0, 1)
    assert "reward 'short' abstains on completion 0 of a batch, length: returned 1 value, expected 3" in caplog.text


# ---------------------------------------------------------------------- updates: the cases

VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {},
    "seq_mean_token_mean": {"reduction": "seq_mean_token_mean"},
    "const, two epochs": {"reduction": "const", "epochs": 2},
    "gspo, two minibatches, KL": {"loss": "gspo", "minibatches": 2, "kl": K3},
    "masks, entropy": {
        "mask_truncated": True,
        "entropy": {"coefficient": 0.01, "keep": 0.3},
        "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
        "epochs": 2,
    },
    "full KL": {"kl": {"coefficient": 0.1, "estimator": "full_jeffreys"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_change_nothing(name: str, tmp_path: Path) -> None:
    """C1: loss, gradient and every metric of every update, also where a prompt alone is over the bound."""
    runs = [
        fit(online(GRPO, micro_batch_tokens=bound, optim=SGD, **VARIANTS[name]), tmp_path)[0] for bound in (None, 30, 1)
    ]
    whole = runs[0]
    assert float(whole.gradients[0].norm()) > 1e-3
    for split in runs[1:]:
        for a, b in zip(split.gradients, whole.gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        for a, b in zip(split.updates + split.logged, whole.updates + whole.logged, strict=True):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-6, nan_ok=True)


def test_truncated_completions_are_masked(tmp_path: Path) -> None:
    """C2, through a user's loss of 1 per token."""
    settings: dict[str, Any] = {"loss": "tests.rl_toys.ones", "mask_truncated": True, "completions": 2}
    data = FixedData(prompts(1), batch_size=1)
    module = scripted(online(GRPO, **settings), [[5, 6], [7, 8]], [False, True])
    watch, _ = fit(module, tmp_path, data)
    assert watch.updates[0]["loss"] == 1.0
    assert (watch.logged[0]["completions/clipped_ratio"], watch.logged[0]["frac_masked_seq"]) == (0.5, 0.5)
    module = scripted(online(GRPO, kl={"measure": True}, **settings), [[5, 6], [7, 8]], [True, True])
    watch, run = fit(module, tmp_path, data)
    assert (watch.updates[0]["loss"], watch.updates[0]["grad_norm"]) == (0.0, 0.0)
    assert watch.logged[0]["kl"] == 0.0
    assert run.global_step == 1


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_nan_behind_the_mask(place: str) -> None:
    """C3: old and reference log-probs NaN at an unscored token; in the loss and in the reward."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 6]], scored=[[True, False]])])
    gone = torch.tensor([0.0, NAN])
    batch = batch.with_tokens(**{OLD_LOGPS: gone, REF_LOGPS: gone, SAMPLER_LOGPS: gone})
    batch = batch.with_rows(**{"reward/odd": torch.ones(1)})
    module = online(GRPO, kl={"coefficient": 0.1, "place": place, "estimator": "k3"})
    batch = module.credit(batch, table_of(batch, ("odd",), torch.ones(1)))
    module.engine = SaidBefore([0.0, NAN])
    share, metrics = module.loss(batch, Counts(prompts=1, rows=1, tokens=1))
    share.backward()
    assert torch.isfinite(module.engine.logps.grad[0])
    metrics |= module.follow(batch)
    assert (float(metrics["kl"][0]), float(metrics["objective/kl"][0])) == (0.0, 0.0)


def test_large_log_ratio() -> None:
    """C4: reference 100 nats above the policy on one token: AdamW closes the gap; near 0 the bound changes nothing."""
    module = online(GRPO, kl={"coefficient": 0.1})
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5]])])
    batch = batch.with_rows(**{ADVANTAGE: torch.zeros(1)})
    counts = Counts(prompts=1, rows=1, tokens=1)

    def kl(gap: float, engine: SaidBefore) -> Tensor:
        with_ref = batch.with_tokens(**{REF_LOGPS: torch.tensor([gap])})
        module.engine = engine
        share: Tensor = module.loss(with_ref, counts)[0]
        return share / 0.1

    assert float(kl(1.0, SaidBefore([0.0])).detach()) == pytest.approx(0.71828, abs=1e-5)
    assert float(kl(-1.0, SaidBefore([0.0])).detach()) == pytest.approx(0.36788, abs=1e-5)
    engine = SaidBefore([0.0])
    optimizer = torch.optim.AdamW([engine.logps], lr=0.1)
    (kl(100.0, engine) * 0.1).backward()
    optimizer.step()
    assert math.isfinite(float(engine.logps.detach()))
    assert float(engine.logps.detach()) > 0.05


DROPPING = PolicyConfig(
    arch={
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "attn_pdrop": 0.5,
        "resid_pdrop": 0.5,
        "embd_pdrop": 0.5,
    }
)


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coefficient=0.1)], ids=["", "kl"])
@pytest.mark.parametrize("policy", [DROPPING, TINY, PolicyConfig(dtype="bfloat16")], ids=["dropout", "fp32", "bf16"])
def test_first_pass_ratio_is_1(policy: PolicyConfig, kl: KLConfig, tmp_path: Path) -> None:
    """C8 at temperature 0.6: exactly for one update per rollout, to 1e-5 per token for several (bf16: the bound of the
    two paths), and no share of clips."""
    sampling = {"temperature": 0.6, "max_tokens": 6, "stop_ids": SAMPLING.stop_ids}
    once, _ = fit(online(GRPO, policy=policy, sampling=sampling, kl=kl), tmp_path)
    for update in once.updates:
        assert (update["ratio"], update["policy/approxkl_avg"], update["clip_ratio/region_mean"]) == (1.0, 0.0, 0.0)
    several, _ = fit(online(GRPO, policy=policy, sampling=sampling, kl=kl, epochs=2), tmp_path, max_steps=2)
    largest = 0.03 if policy.dtype == "bfloat16" else 1e-5
    assert several.updates[0]["policy/approxkl_avg"] <= largest**2 / 2
    assert several.updates[0]["clip_ratio/region_mean"] == 0
    # The second pass is another policy than the one that sampled.
    assert several.updates[1]["policy/approxkl_avg"] > 1e-6


def test_dropout_asked_for_leaves_the_first_ratio_at_1(tmp_path: Path) -> None:
    policy = PolicyConfig(name="tiny", lora=LoRAConfig(r=4, dropout=0.5))
    kl = {"coefficient": 0.1, "place": "reward", "estimator": "k1"}
    watch, _ = fit(online(GRPO, policy=policy, kl=kl, entropy={"keep": 0.5}), tmp_path)
    assert [(u["ratio"], u["policy/approxkl_avg"]) for u in watch.updates] == [(1.0, 0.0)] * 2


# ---------------------------------------------------------------------- skipping


def half_alive() -> FixedData:
    return FixedData(prompts(8, alive=[True, False] * 4), batch_size=4)


@pytest.mark.parametrize("settings", [{}, {"minibatches": 2, "loss": "sapo"}, {"epochs": 2, "loss": "dual_clip"}])
def test_skipping_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    runs, read = [], []
    for skips in (True, False):
        module = online(GRPO, rewards={"odd": here(odd_in_some)}, optim=SGD, **settings)
        assert module.skips
        module.skips = skips
        loss, seen = module.loss, []

        def counted(micro: GroupBatch, counts: Counts, loss: Any = loss, seen: list[int] = seen) -> Any:
            seen.append(micro.num_completions)
            return loss(micro, counts)

        module.loss = counted
        runs.append(fit(module, tmp_path, half_alive())[0])
        read.append(sum(seen))
    for a, b in zip(runs[0].updates, runs[1].updates, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-7)
    for a, b in zip(runs[0].gradients, runs[1].gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)
    assert read[0] <= read[1] / 2


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": {"coefficient": 0.1}},
        {"kl": {"measure": True}},
        {"entropy": {"coefficient": 0.1}},
        {"entropy": {"target": 1.0}},
        {"loss": "tests.rl_toys.ones"},
    ],
)
def test_skipping_is_off_where_a_completion_without_advantage_counts(settings: dict[str, Any]) -> None:
    assert not online(GRPO, **settings).skips


def test_skipping_stays_on_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    kl = {"coefficient": 0.1, "place": "reward", "estimator": "k1"}
    for loss in ("clip", "clip_higher", "dual_clip", "delta", "gspo", "cispo", "sapo"):
        assert online(GRPO, loss=loss, kl=kl, entropy={"keep": 0.2}).skips
    # A user's own may be registered beside ours.
    monkeypatch.setitem(POLICY_LOSSES._functions, "mine", ones)
    assert not online(GRPO, loss="mine").skips


# ---------------------------------------------------------------------- what is not trained on


def choosy(completion: str, completion_ids: list[int]) -> float | None:
    return None if completion_ids[0] == 5 else float(completion_ids[0])


def test_a_completion_without_reward_is_not_trained_on(tmp_path: Path) -> None:
    """Loss and gradient are those of the others alone, also with a KL in the loss."""
    data = FixedData(prompts(2), batch_size=2)
    runs = []
    for said in ([[5, 6, 9], [7, 8], [9]], [[7, 8], [9]]):
        module = online(GRPO, rewards={"choosy": here(choosy)}, completions=len(said), kl=K3, optim=SGD)
        runs.append(fit(scripted(moved(module), said), tmp_path, data)[0])
    assert runs[0].updates[0]["loss"] == pytest.approx(runs[1].updates[0]["loss"], abs=1e-7)
    torch.testing.assert_close(runs[0].gradients[0], runs[1].gradients[0], atol=1e-7, rtol=1e-5)
    assert runs[0].logged[0]["rewards/choosy/abstained"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("settings", [{}, {"kl": K3, "epochs": 2}, {"loss": "gspo", "entropy": {"keep": 0.5}}])
def test_empty_completion(settings: dict[str, Any], tmp_path: Path) -> None:
    """Nothing to train on in it, but its reward counts in the group: odd gives 0, 1 and 1/2."""
    module = scripted(online(GRPO, completions=3, advantage="none", **settings), [[], [5], [5, 6]])
    watch, _ = fit(module, tmp_path, FixedData(prompts(2), batch_size=2))
    assert watch.logged[0]["completions/min_length"] == 0
    assert watch.logged[0]["reward"] == pytest.approx(0.5)
    # Advantages -1/2, 1/2 and 0 over 3 tokens: the loss is -(1/2)/3; gspo: over 2 completions.
    expected = -1 / 4 if settings.get("loss") == "gspo" else -1 / 6
    if "entropy" not in settings:
        assert watch.updates[0]["loss"] == pytest.approx(expected, abs=1e-4)
    assert all(math.isfinite(u["loss"]) and math.isfinite(u["grad_norm"]) for u in watch.updates)


def test_high_entropy_tokens_alone(tmp_path: Path) -> None:
    """The share of tokens at or above the 0.7 quantile carries the policy term; denominators and KL stay."""
    settings: dict[str, Any] = {"loss": "tests.rl_toys.ones", "completions": 2, "entropy": {"keep": 0.3}}
    said, data = [list(range(5, 16)), [7] * 10], FixedData(prompts(1), batch_size=1)
    watch, _ = fit(scripted(online(GRPO, **settings), said), tmp_path, data)
    # The quantile of 21 values is the one at place 0.7 * 20 = 14: it and six more reach it.
    assert watch.updates[0]["loss"] == pytest.approx(7 / 21)
    module = moved(online(GRPO, kl={"coefficient": 1.0}, **settings))
    watch, _ = fit(scripted(module, said), tmp_path, data)
    assert watch.updates[0]["kl"] > 0.01
    assert watch.updates[0]["loss"] == pytest.approx(7 / 21 + watch.updates[0]["kl"], abs=1e-6)
