"""DecoupledPO: where gradients go, when heads step, whose batch it is, and what is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from alignment.advantages import RewardTable
from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.update import Counts
from benchmarks.multi_reward.routing import OneRoute
from modules import GRPO, DecoupledPO
from tests.rl_toys import Watch, fit, here, moved, odd, online, prompts
from tests.toys import FixedData, trainer

LORA = PolicyConfig(name="tiny", lora=LoRAConfig(r=4))
SGD = OptimConfig(lr=0.05, optimizer="sgd", schedule="constant", clip_norm=None)
NAMES = ("odd", "low", "length")


def low(completion: str, completion_ids: list[int]) -> float:
    """Share of ids below 130."""
    return sum(i < 130 for i in completion_ids) / max(1, len(completion_ids))


def length(completion: str, completion_ids: list[int]) -> float:
    return float(len(completion_ids))


def even(completion: str, completion_ids: list[int]) -> float:
    return 1 - odd(completion, completion_ids)


REWARDS: dict[str, Any] = {"odd": here(), "low": here(low), "length": here(length)}


def decoupled(**settings: Any) -> Any:
    return online(DecoupledPO, **({"rewards": REWARDS} | settings))


def weights_of(module: Any) -> dict[str, list[float]]:
    parts = {"trunk": module.policy, "fusion": module.heads.fusion}
    parts |= {name: sub for name, sub in zip(module.heads.spec.names, module.heads.subs, strict=True)}
    return {name: [x for p in part.parameters() for x in p.flatten().tolist()] for name, part in parts.items()}


class Weights(L.Callback):
    """The parts of the model before training and after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[float]]] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.append(weights_of(module))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.seen.append(weights_of(module))

    def moved(self) -> list[set[str]]:
        """What each batch changed."""
        steps = zip(self.seen, self.seen[1:], strict=False)
        return [{name for name in a if a[name] != b[name]} for a, b in steps]


class Parts(Watch):
    """The gradient of every part at each update, before heads gather theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[dict[str, Tensor]] = []

    def on_gradients(self, trainer: L.Trainer, module: Any, norms: Any) -> None:
        found = {}
        for name, part in module._parts().items():
            grads = [p.grad.flatten() for p in part if p.grad is not None]
            found[name] = torch.cat(grads).clone() if grads else torch.zeros(0)
        self.parts.append(found)


def gradients(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """Of the first update of a policy whose heads have moved."""
    module = with_heads(decoupled(**({"optim": SGD} | settings)))
    parts = Parts()
    fit(module, folder, callbacks=[parts], max_steps=1)
    return parts.parts[0]


def with_heads(module: Any, size: float = 0.02) -> Any:
    """The module, built, with heads and fusion that are not 0."""
    module.configure_model()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in module.heads.parameters():
            p.add_(torch.randn(p.shape, generator=draw) * size)
    return module


# ---------------------------------------------------------------------- the start


@pytest.mark.parametrize("settings", [{}, {"policy": LORA}, {"fusion": {"pool": "linear"}}])
def test_the_first_rollout_is_that_of_the_base(settings: dict[str, Any], tmp_path: Path) -> None:
    """Same completions as GRPO's, ratio 1 and no divergence: neither the policy's nor any head's."""
    said: list[list[int]] = []
    for kind in (GRPO, DecoupledPO):
        more = {"kl": {"measure": True}} if kind is GRPO else {"heads": {"kl_every": 1}}
        own = {"policy": settings["policy"]} if kind is GRPO and "policy" in settings else {}
        module = online(kind, rewards=REWARDS, **(own if kind is GRPO else settings), **more)
        collect = module.collect

        def watched(batch: GroupBatch, collect: Callable[[GroupBatch], GroupBatch] = collect) -> GroupBatch:
            found = collect(batch)
            said.append(found.completion_ids.tolist())
            return found

        module.collect = watched
        watch, _ = fit(module, tmp_path, max_steps=1)
    assert said[0] == said[1]
    first = watch.updates[0]
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    for name in NAMES:
        assert first[f"kl/{name}"] == pytest.approx(0.0, abs=1e-6)
        assert first[f"fusion/alpha/{name}"] == pytest.approx(1 / 3, abs=1e-6)


def test_several_updates_start_at_ratio_1(tmp_path: Path) -> None:
    watch, _ = fit(with_heads(decoupled(epochs=2, kl={"coefficient": 0.1})), tmp_path, max_steps=2)
    first, second = (update["ratio"] for update in watch.updates)
    assert first == pytest.approx(1.0, abs=1e-5)
    assert abs(second - 1) > 1e-5


# ---------------------------------------------------------------------- advantages


def credited(weights: tuple[float, ...] = (1.0, 1.0), group: int = 4) -> dict[str, list[float]]:
    """The example G-ADV of ALGORITHMS section 3, two groups of four, through `credit`."""
    rewards = {f"r{k}": here(odd, weight=w) for k, w in enumerate(weights, start=1)}
    module = decoupled(rewards=rewards)
    module.configure_model()
    values = [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [2.5, 1.0], [-1.0, 1.0], [-3.0, 1.0], [0.5, 1.0]]
    batch = GroupBatch.from_groups([replace(p, completions=[[5]] * group) for p in prompts(2)])
    table = RewardTable(rewards=torch.tensor(values), weights=torch.tensor(weights), group_of=batch.group_of, groups=2)
    return {name: rows.tolist() for name, rows in module.credit(batch, table).rows.items() if "advantage" in name}


def test_advantages_by_hand() -> None:
    """A_k over the deviation 1.133746 of S, and S over it: G-ADV continued."""
    found = credited()
    z, s = 0.865875, 1.133746
    assert found["advantage/r1"] == pytest.approx(
        [z / s, z / s, -z / s, -z / s, 1.181539 / s, -0.322238 / s, -1.181539 / s, 0.322238 / s], abs=1e-3
    )
    assert found["advantage/r2"] == pytest.approx([z / s, -z / s, z / s, -z / s, 0, 0, 0, 0], abs=1e-3)
    expected = [1.527324, 0, 0, -1.527324, 1.042063, -0.284199, -1.042063, 0.284199]
    assert found["advantage"] == pytest.approx(expected, abs=1e-5)


def test_only_the_proportions_of_the_weights_count() -> None:
    one, ten = credited((1.0, 0.5)), credited((10.0, 5.0))
    for name in one:
        assert one[name] == pytest.approx(ten[name], abs=1e-6)
    # no head sees its weight: the second reward's advantages are as large as the first's where both are +-z
    assert one["advantage/r1"][0] == pytest.approx(one["advantage/r2"][0])


# ---------------------------------------------------------------------- routes


def test_a_head_sees_its_own_reward_only(tmp_path: Path) -> None:
    """Another third reward: the gradients of the first two heads keep their directions, in fact are the same numbers
    but for the common factor std S."""
    mine = gradients(tmp_path, kl={"coefficient": 0.0}, heads={"kl": 0.0})
    other = gradients(tmp_path, kl={"coefficient": 0.0}, heads={"kl": 0.0}, rewards=REWARDS | {"length": here(even)})
    factors = []
    for name in ("odd", "low"):
        a, b = mine[f"head/{name}"], other[f"head/{name}"]
        factors.append(float(b.norm() / a.norm()))
        assert float(torch.cosine_similarity(a, b, dim=0)) == pytest.approx(1.0, abs=1e-5)
    assert factors[0] == pytest.approx(factors[1], rel=1e-4)
    assert float(torch.cosine_similarity(mine["head/length"], other["head/length"], dim=0)) < 0.99
    assert float(torch.cosine_similarity(mine["trunk"], other["trunk"], dim=0)) < 0.99


def test_the_losses_of_rewards_sum_to_the_combined_one(tmp_path: Path) -> None:
    """On the first pass nothing is clipped, so the trunk's gradient is the same from K surrogates that no threshold
    cuts, compared at parameters or at states, as from one."""
    weighted = {
        "odd": here(weight=2.0), "low": here(low, weight=1.0), "length": here(length, weight=0.5)
    }  # fmt: skip
    one = gradients(tmp_path, rewards=weighted)
    for level in ("parameters", "states"):
        isolation = {"mode": "project", "threshold": 0.999, "level": level}
        several = gradients(tmp_path, rewards=weighted, isolation=isolation)
        for name in one:
            assert torch.allclose(one[name], several[name], atol=1e-5 * float(one[name].abs().max()) + 1e-7), name


PASSES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"measure_every": 2}, 1),
    ({"measure_every": 1}, 4),
    ({"mode": "project"}, 4),
    ({"mode": "project", "level": "states"}, 1),
]


@pytest.mark.parametrize(("isolation", "passes"), PASSES)
def test_backward_passes_of_the_trunk(isolation: dict[str, Any], passes: int, tmp_path: Path) -> None:
    """One; where three rewards are compared at its parameters, one for each and one for the rest."""
    seen = []

    class Count(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            first = next(p for p in module.policy.parameters() if p.requires_grad)
            first.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))

    fit(decoupled(isolation=isolation), tmp_path, callbacks=[Count()], max_steps=1)
    assert len(seen) == passes


def test_gradients_of_rewards_are_measured_without_changing_anything(tmp_path: Path) -> None:
    """At every second update, and what is logged there is what isolation measures on the same weights."""

    def run(steps: int, **isolation: Any) -> tuple[Watch, dict[str, Any]]:
        module = decoupled(isolation=isolation)
        return fit(module, tmp_path, max_steps=steps)[0], weights_of(module)

    plain, weights = run(2)
    measured, same = run(2, measure_every=2)
    assert same == weights
    assert [row["loss"] for row in measured.logged] == [row["loss"] for row in plain.logged]
    cosines = {"grad/cos/odd/low", "grad/cos/odd/length", "grad/cos/low/length"}
    lengths = {f"grad_norm/{name}" for name in NAMES}
    assert [cosines | lengths <= set(row) for row in measured.logged] == [False, True]
    assert not any(name.startswith("grad/") for row in plain.logged for name in row)
    first, _ = run(1, measure_every=1)
    isolated, _ = run(1, mode="block", threshold=0.99)
    for name in cosines | lengths:
        assert first.logged[0][name] == pytest.approx(isolated.logged[0][name], rel=1e-6)


@pytest.mark.parametrize(
    ("isolation", "kept"), [({}, 1), ({"measure_every": 9}, 4), *(case for case in PASSES if "mode" in case[0])]
)
def test_memory_counts_the_gradients_of_rewards(isolation: dict[str, Any], kept: int, tmp_path: Path) -> None:
    assert decoupled(isolation=isolation).memory_plan(trainer(tmp_path)).gradients == kept


def test_the_kl_of_each_head_can_be_measured_alone(tmp_path: Path) -> None:
    """Nothing but what is logged changes, and it is what the heads' own KL would show."""

    def run(heads: float, measure: bool) -> Watch:
        settings = {"heads": {"kl": heads, "kl_every": 1}, "kl": {"coefficient": 0.0, "measure": measure}}
        return fit(with_heads(decoupled(**settings)), tmp_path)[0]

    own, measured, plain = run(0.02, False), run(0.0, True), run(0.0, False)
    names = [f"kl/{name}" for name in NAMES]
    assert [measured.updates[0][name] for name in names] == [own.updates[0][name] for name in names]
    assert measured.updates[0]["kl/odd"] > 0
    assert not set(names) & set(plain.updates[0])
    assert [a["loss"] for a in measured.updates] == [b["loss"] for b in plain.updates]


def test_gram_matrix_at_the_states(tmp_path: Path) -> None:
    """Against the gradients themselves."""
    module = with_heads(decoupled(isolation={"mode": "project", "level": "states"}))
    checked = []

    def check(part: GroupBatch) -> None:
        module.begin_update(part)
        found = module._at_states(part)
        h = module.trunk_states(part).detach().requires_grad_()
        losses = module.reward_losses(part, module.see(part, h).logps[0], Counts.of(part))
        grads = [torch.autograd.grad(loss, h, retain_graph=True)[0].flatten().double() for loss in losses.values()]
        expected = torch.stack([torch.stack([a @ b for b in grads]) for a in grads])
        assert torch.allclose(found.gram, expected, rtol=1e-4, atol=1e-10)
        assert torch.allclose(found.losses, torch.stack([x.detach().double() for x in losses.values()]), atol=1e-6)
        checked.append(part)

    update = module.update_part

    def both(part: GroupBatch) -> None:
        check(part)
        update(part)

    module.update_part = both
    fit(module, tmp_path, max_steps=1)
    assert checked


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"isolation": {"mode": "project", "threshold": 0.0}},
        {"isolation": {"mode": "gradvac", "level": "states", "ratio": {"odd": 2.0}}},
        {"fusion": {"pool": "linear"}, "isolation": {"mode": "block"}},
        {"heads": {"kl_every": 2, "kl": 1.0}, "kl": {"coefficient": 0.1, "estimator": "full_reverse"}},
        {"entropy": {"coefficient": 0.1}, "loss": "gspo"},
    ],
)
def test_micro_batches_change_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = gradients(tmp_path, **settings, micro_batch_tokens=None)
    cut = gradients(tmp_path, **settings, micro_batch_tokens=24)
    for name in whole:
        assert torch.allclose(whole[name], cut[name], atol=2e-5 * float(whole[name].abs().max()) + 1e-8), name


def test_a_weight_of_0_drops_the_head(tmp_path: Path) -> None:
    seen = Weights()
    rewards = REWARDS | {"length": here(length, weight=0.0)}
    watch, _ = fit(decoupled(rewards=rewards, heads={"every": 1}), tmp_path, callbacks=[seen])
    assert seen.moved()[-1] == {"trunk", "fusion", "odd", "low"}
    assert "fusion/alpha/length" not in watch.logged[-1]
    assert watch.logged[0]["fusion/alpha/odd"] == pytest.approx(0.5, abs=1e-6)


# ---------------------------------------------------------------------- when heads step


def test_heads_step_at_every_third_step(tmp_path: Path) -> None:
    """And the number of optimizer steps is that of the trunk's."""
    seen = Weights()
    module = decoupled()
    _, run = fit(module, tmp_path, callbacks=[seen], max_epochs=3, max_steps=6)
    both, trunk = {"trunk", "fusion", *NAMES}, {"trunk", "fusion"}
    # the fusion has no gradient before heads differ, but for the zeros that the bonus for even weights gives
    assert [step - {"fusion"} for step in seen.moved()] == [{"trunk"}, {"trunk"}, both - {"fusion"}] * 2
    assert trunk <= seen.moved()[-1]
    assert run.global_step == 6
    state = run.optimizers[0].state
    assert {int(state[p]["step"]) for p in module.heads.subs.parameters()} == {2}
    assert {int(state[p]["step"]) for p in module.policy.parameters()} == {6}


def test_heads_step_on_the_mean(tmp_path: Path) -> None:
    """With SGD: weights move by the rate times the mean of three gradients."""
    seen, parts = Weights(), Parts()
    fit(with_heads(decoupled(optim=SGD)), tmp_path, callbacks=[seen, parts], max_epochs=2, max_steps=3)
    for name in NAMES:
        mean = sum(update[f"head/{name}"] for update in parts.parts) / 3
        step = torch.tensor(seen.seen[-1][name]) - torch.tensor(seen.seen[0][name])
        assert torch.allclose(step, -SGD.lr * mean, atol=1e-6)


@pytest.mark.parametrize(("between", "share"), [("rate", 1 / 3), ("last", 1.0)])
def test_other_ways_to_step_less(between: str, share: float, tmp_path: Path) -> None:
    seen, parts = Weights(), Parts()
    heads = {"between": between}
    fit(with_heads(decoupled(optim=SGD, heads=heads)), tmp_path, callbacks=[seen, parts], max_epochs=2, max_steps=3)
    for name in NAMES:
        used = parts.parts if between == "rate" else parts.parts[-1:]
        step = torch.tensor(seen.seen[-1][name]) - torch.tensor(seen.seen[0][name])
        expected = -SGD.lr * share * sum(update[f"head/{name}"] for update in used)
        assert torch.allclose(step, expected, atol=1e-6)


def test_each_head_is_clipped_by_itself(tmp_path: Path) -> None:
    seen, parts = Weights(), Parts()
    optim = replace(SGD, clip_norm=1e-3, lr=1.0)
    fit(with_heads(decoupled(optim=optim, heads={"every": 1})), tmp_path, callbacks=[seen, parts], max_steps=1)
    steps = {n: torch.tensor(seen.seen[1][n]) - torch.tensor(seen.seen[0][n]) for n in seen.seen[0]}
    for name in NAMES:
        assert float(steps[name].norm()) == pytest.approx(1e-3, rel=1e-2)
    assert float(torch.cat([steps["trunk"], steps["fusion"]]).norm()) == pytest.approx(1e-3, rel=2e-2)


def test_frozen_heads_wait(tmp_path: Path) -> None:
    module, seen = decoupled(heads={"every": 1}), Weights()
    module.frozen = {"low"}
    fit(module, tmp_path, callbacks=[seen])
    assert seen.moved()[-1] == {"trunk", "fusion", "odd", "length"}


# ---------------------------------------------------------------------- whose batch it is


def test_cold_start_trains_heads_one_by_one(tmp_path: Path) -> None:
    """Trunk, fusion and the other heads stay, whatever momentum they have; then everything is trained."""
    seen = Weights()
    settings = {"cold_start": {"rollouts": 1}, "heads": {"every": 1}}
    watch, run = fit(decoupled(**settings), tmp_path, callbacks=[seen], max_epochs=3, max_steps=5)
    assert seen.moved()[:3] == [{name} for name in NAMES]
    assert seen.moved()[4] == {"trunk", "fusion", *NAMES}
    assert run.global_step == 5
    for update, name in zip(watch.updates, NAMES, strict=False):
        assert update[f"fusion/alpha/{name}"] == 1.0
        assert "fusion/alpha/odd" not in update or name == "odd"


def test_cold_start_draws_from_the_head(tmp_path: Path) -> None:
    module = with_heads(decoupled(cold_start={"rollouts": 1}), 0.5)
    preferences = []
    sample = module._sample

    def watched(*args: Any) -> GroupBatch:
        preferences.append(module.heads.preference)
        return sample(*args)

    module._sample = watched
    watch, _ = fit(module, tmp_path, max_epochs=2, max_steps=4)
    assert preferences == [(1, 0, 0), (0, 1, 0), (0, 0, 1), pytest.approx((1 / 3, 1 / 3, 1 / 3))]
    assert [update["ratio"] for update in watch.updates] == pytest.approx([1.0] * 4, abs=1e-5)


def test_cold_start_in_epochs(tmp_path: Path) -> None:
    """Two batches an epoch, three heads: one and a half epochs are three batches for each."""
    module, seen = decoupled(cold_start={"epochs": 1.5}), Weights()
    fit(module, tmp_path, callbacks=[seen], max_epochs=5)
    assert seen.moved()[:9] == [{name} for name in NAMES] * 3
    assert "trunk" in seen.moved()[9]


def test_decode_only_never_trains_the_rest(tmp_path: Path) -> None:
    seen = Weights()
    module = decoupled(fusion={"mode": "decode_only", "weights": {"odd": 2.0, "low": 1.0, "length": 1.0}})
    fit(module, tmp_path, callbacks=[seen], max_epochs=2)
    assert seen.moved() == [{"odd"}, {"low"}, {"length"}, {"odd"}]
    assert module.dial == (0.5, 0.25, 0.25)


def test_one_head_may_have_all_batches(tmp_path: Path) -> None:
    module, seen = decoupled(), Weights()
    module.only = "low"
    fit(module, tmp_path, callbacks=[seen])
    assert seen.moved() == [{"low"}, {"low"}]


# ---------------------------------------------------------------------- the dial


class Still:
    """Trunk and fusion hardly learn: under opposed rewards a trunk goes wherever chance leads it, and heads with it."""

    def lr_factors(self) -> dict[str, float]:
        return {"policy.": 1e-3, "heads.fusion.": 1e-3}


class StillDecoupledPO(Still, DecoupledPO):
    pass


class StillOneRoute(Still, OneRoute):
    pass


def dialled(kind: type[DecoupledPO], weight: float, folder: Path) -> list[float]:
    """Share of odd ids under a preference for odd ones and under one for even ones, after training on both at once."""
    optim = OptimConfig(lr=0.05, schedule="constant")
    settings: dict[str, Any] = {
        "rewards": {"odd": here(), "even": here(even, weight=weight)},
        "rollout": {"eval_completions": 16, "eval_temperature": 1.0},
        "heads": {"every": 1},
        "completions": 16,
    }
    module = online(kind, optim=optim, **settings)
    data = FixedData(prompts(8), batch_size=8)
    fit(module, folder, data, max_steps=12, max_epochs=-1)
    found = []
    for weights in ({"odd": 1.0, "even": 0.0}, {"odd": 0.0, "even": 1.0}):
        module.turn_dial(weights)
        said = trainer(folder).validate(module, datamodule=data, verbose=False)
        found.append(said[0]["val/rewards/odd/mean"])
    return found


def test_routing_makes_the_dial_move(tmp_path: Path) -> None:
    """Two rewards that are exactly opposed: together they say nothing, and to each head its own says what to do."""
    odd_ones, even_ones = dialled(StillDecoupledPO, 1.0, tmp_path)
    assert odd_ones > 0.65
    assert even_ones < 0.35


def test_without_routing_it_does_not(tmp_path: Path) -> None:
    """Heads that learn from the sum all learn the same, here that odd is better, so there is nothing to choose from."""
    odd_ones, even_ones = dialled(StillOneRoute, 0.5, tmp_path)
    assert odd_ones > 0.7
    assert abs(odd_ones - even_ones) < 0.1


# ---------------------------------------------------------------------- guards


def test_kl_limit_leaves_the_step_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, seen = moved(decoupled(kl_limit=1e-4), 0.05), Weights()
    _, run = fit(module, tmp_path, callbacks=[seen])
    assert seen.moved() == [set(), set()]
    assert (run.global_step, module.kl_skips, module.nonfinite_steps) == (0, 2, 0)
    assert "kl_limit 0.0001" in caplog.text
    assert module.head_steps.phase == 0


def test_heads_that_go_far_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(with_heads(decoupled(), 3.0), tmp_path, max_steps=1)
    assert "is further from the trunk's states" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, "each head has its own reward"),
        ({"rollout": {"vllm": {"url": "http://127.0.0.1:1", "model": "m", "weights": "lora"}}}, "a vLLM server knows"),
        ({"fusion": {"pool": "linear"}, "sampling": {"temperature": 0.7}}, "sampling.temperature 1"),
        ({"fusion": {"pool": "linear"}, "entropy": {"coefficient": 0.1}}, "entropy bonus"),
        ({"fusion": {"pool": "product"}}, "fusion.pool is 'product'"),
        ({"fusion": {"mode": "late"}}, "fusion.mode is 'late'"),
        ({"fusion": {"temperature": 0.0}}, "fusion.temperature is 0"),
        ({"fusion": {"weights": {"tone": 1.0}}}, "a preference names tone"),
        ({"heads": {"every": 0}}, "heads.every is 0"),
        ({"heads": {"between": "sum"}}, "heads.between is 'sum'"),
        ({"heads": {"kl": -1.0}}, "heads.kl is -1"),
        ({"budget": {"trunk": 0.0}}, "each share must be above 0"),
        ({"cold_start": {"rollouts": -1}}, "cold_start is -1"),
        ({"kl_limit": 0.0}, "kl_limit is 0"),
        ({"eps": -1e-4}, "has eps -0.0001; it is a number of at least 0"),
        ({"preset": "short"}, "preset is 'short'"),
        ({"rewards": REWARDS | {"odd": here(weight=-1.0)}}, "not by a negative weight"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        decoupled(**settings)
    assert "\n" not in str(caught.value)


def test_preset_brief() -> None:
    """It replaces defaults and keeps what was given."""
    module = decoupled(preset="brief", heads={"rank": 8})
    assert (module.heads_config.rank, module.heads_config.scaled, module.heads_config.kl) == (8, False, 0.0)
    assert (module.isolation.config.mode, module.isolation.config.threshold) == ("project", 0.25)
    assert (module.cold_start.epochs, module.heads_config.every) == (3.0, 3)
    assert decoupled(preset="brief").heads_config.rank == 64
    given: list[dict[str, Any]] = [{"rollouts": 10}, {"epochs": 0.0}]
    starts = [decoupled(preset="brief", cold_start=start).cold_start for start in given]
    assert [(start.rollouts, start.epochs or 0) for start in starts] == [(10, 0), (0, 0)]
    assert decoupled().cold_start.epochs is None


def test_real_counts_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    module = decoupled(budget={"trunk": 70, "heads": 30, "fusion": 10})
    module.configure_model()
    told = module._sizes()
    counts = [
        sum(p.numel() for p in part.parameters()) for part in (module.policy, module.heads.subs, module.heads.fusion)
    ]
    for count in counts:
        assert f"{count:,}" in told
    assert [c / sum(counts) for c in counts] == pytest.approx([70 / 110, 30 / 110, 10 / 110], abs=0.005)


# ---------------------------------------------------------------------- what is saved


class Leave(L.Callback):
    """Saves after some batches and ends the run."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if module.batches_seen == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"heads": {"kl_every": 1}, "isolation": {"mode": "gradvac", "ratio": {"odd": 2.0}}},
        {"policy": LORA, "cold_start": {"rollouts": 1}, "epochs": 2},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(after: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, also in the middle of three steps of the trunk and of a cold start."""
    saved, ends = tmp_path / "here.ckpt", []
    for leave, start in ((None, None), (after, None), (None, saved)):
        module, data = decoupled(**settings), FixedData(prompts(4), batch_size=4)  # one batch an epoch
        run = trainer(
            tmp_path,
            callbacks=[] if leave is None else [Leave(leave, saved)],
            plugins=[SafeCheckpointIO()],
            limit_val_batches=0,
            max_epochs=6,
        )
        run.fit(module, datamodule=data, ckpt_path=start)
        ends.append(weights_of(module))
    assert ends[2] == ends[0] != ends[1]


def test_what_callbacks_moved_is_kept(tmp_path: Path) -> None:
    module = decoupled()
    module.fusion_entropy, module.frozen, module.only = 0.5, {"low"}, "odd"
    _, run = fit(module, tmp_path, plugins=[SafeCheckpointIO()], max_steps=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = DecoupledPO.load_from_checkpoint(tmp_path / "a.ckpt", rewards=REWARDS)
    assert (again.fusion_entropy, again.frozen, again.only) == (0.5, {"low"}, "odd")
    other = DecoupledPO.load_from_checkpoint(tmp_path / "a.ckpt", rewards=REWARDS, fusion={"entropy": 0.2})
    assert other.fusion_entropy == 0.2
    with pytest.raises(UserError, match="have rank 24, those of this run 8"):
        DecoupledPO.load_from_checkpoint(tmp_path / "a.ckpt", rewards=REWARDS, heads={"rank": 8})
