"""A reference that follows the policy: TR-DPO's formula in every form, what checkpoints hold of it, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from alignment import guard, memory
from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO, load_checkpoint_folder
from alignment.errors import UserError
from alignment.export import export
from alignment.memory_report import remedies
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.reference import Reference
from alignment.reference_sync import PREFIX, Follower, ReferenceSync
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader
from modules.decoupled_po import DecoupledPO
from modules.dpo import DPO
from modules.gdpo import GDPO
from modules.grpo import GRPO
from modules.kto import KTO
from modules.morl import MORL
from modules.online_dpo import OnlineDPO
from modules.ppo import PPO
from tests.rl_toys import fit, here, odd, online, pretrained_adapter
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

LORA = PolicyConfig(lora=LoRAConfig(r=4))
SGD = OptimConfig(lr=0.05, optimizer="sgd", schedule="constant", clip_norm=None)


class Pairs(Reference):
    """Two lists of weights."""

    kind = "pairs"

    def __init__(self, policy: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        both = zip(policy, own, strict=True)
        self.weights = {str(i): (nn.Parameter(p), nn.Parameter(q)) for i, (p, q) in enumerate(both)}

    def trained(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        return self.weights

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        raise AssertionError("only weights here")

    def put(self, *values: Any) -> None:
        """The policy is trained to these."""
        with torch.no_grad():
            for (policy, _), value in zip(self.weights.values(), values, strict=True):
                policy.copy_(torch.as_tensor(value))

    @property
    def own(self) -> list[Tensor]:
        return [own.detach() for _, own in self.weights.values()]


# ---------------------------------------------------------------------- the formula


def test_the_formula_by_hand() -> None:
    """alpha 0.6 from 1: to a policy at 2, 0.6 * 2 + 0.4 * 1 = 1.6; then to one at 3, 1.8 + 0.64 = 2.44."""
    pairs = Pairs([torch.tensor([2.0, 0.0])], [torch.tensor([1.0, 0.0])])
    follower = Follower(pairs, ReferenceSync())
    follower.move(1)
    assert pairs.own[0].tolist() == pytest.approx([1.6, 0])
    pairs.put([3.0, -5.0])
    follower.move(1)
    assert pairs.own[0].tolist() == pytest.approx([2.44, -3.0])


def test_alpha_1_is_the_policy_bit_for_bit() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        pairs = Pairs([values.to(dtype)], [torch.full((1000,), 7.0, dtype=dtype)])
        Follower(pairs, ReferenceSync(alpha=1.0)).move(1)
        assert torch.equal(pairs.own[0], values.to(dtype))


def test_when_a_move_is_due() -> None:
    follower = Follower(Pairs([], []), ReferenceSync(every=4))
    steps = [(0, 1), (3, 4), (4, 4), (4, 5), (3, 9), (0, 12)]
    assert [follower.due(*pair) for pair in steps] == [0, 1, 0, 0, 2, 3]


def test_several_due_moves_at_once() -> None:
    """Of the old reference (1 - 0.6)^3 = 0.064 is left."""
    pairs = Pairs([torch.tensor([2.0])], [torch.tensor([1.0])])
    Follower(pairs, ReferenceSync()).move(3)
    assert pairs.own[0].item() == pytest.approx(2 - 0.064)


def test_factors_of_adapters_miss_the_mixture_by_a_product_of_differences() -> None:
    """The identity that docs/reference.md states, on random factors; alpha 1 misses nothing."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(6, 2), (2, 5)]
    b, a, b_ref, a_ref = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes * 2)
    for alpha in (0.6, 1.0):
        pairs = Pairs([b.clone(), a.clone()], [b_ref.clone(), a_ref.clone()])
        Follower(pairs, ReferenceSync(alpha=alpha)).move(1)
        mixture = alpha * b @ a + (1 - alpha) * b_ref @ a_ref
        missing = alpha * (1 - alpha) * (b - b_ref) @ (a - a_ref)
        got = pairs.own[0] @ pairs.own[1]
        torch.testing.assert_close(got, mixture - missing, atol=1e-12, rtol=0)
        assert ((got - mixture).abs().max() < 1e-12) == (alpha == 1)


def test_an_average_of_bf16_weights_does_not_stand_still() -> None:
    """1000 steps of 0.001 from 1 to 2 leave 0.999^1000 = 0.3677 of the way: 1.6323. In bf16, whose numbers from 1 to 2
    are 1/128 apart, the first step of 0.001 would round to nothing, and so would all others."""
    pairs = Pairs([torch.tensor([2.0]).bfloat16()], [torch.tensor([1.0]).bfloat16()])
    follower = Follower(pairs, ReferenceSync(alpha=0.001, every=1))
    for _ in range(1000):
        follower.move(1)
    assert pairs.own[0].dtype == torch.bfloat16
    assert pairs.own[0].item() == pytest.approx(2 - 0.999**1000, abs=1 / 256)
    (average,) = follower.state_dict().values()
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(2 - 0.999**1000, abs=1e-4)
    other = Pairs([torch.tensor([2.0]).bfloat16()], [torch.tensor([1.0]).bfloat16()])
    again = Follower(other, ReferenceSync(alpha=0.001, every=1))
    again.load_state_dict({name: value.clone() for name, value in follower.state_dict().items()})
    for one in (follower, again):
        one.move(1)
    assert torch.equal(other.own[0], pairs.own[0])
    assert torch.equal(again.state_dict()["0"], follower.state_dict()["0"])


# ---------------------------------------------------------------------- in a run


class Recorder(L.Callback):
    """The policy's trained weights and the reference's after each batch, by the name of the former."""

    def __init__(self) -> None:
        self.policy: list[dict[str, Tensor]] = []
        self.reference: list[dict[str, Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self._note(module)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self._note(module)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def _note(self, module: Any) -> None:
        reference = getattr(module.reference, "_inner", module.reference)
        both = reference.trained()
        self.policy.append({name: policy.detach().double() for name, (policy, _) in both.items()})
        self.reference.append({name: own.detach().double() for name, (_, own) in both.items()})


def dpo(policy: PolicyConfig = TINY, **settings: Any) -> DPO:
    return DPO(**{"policy": policy, "optim": SGD, "reference_sync": {"alpha": 0.6, "every": 2}, **settings})


class Pairwise(FixedData):
    """Six batches of four pairs, from a loader that knows where it is."""

    def __init__(self) -> None:
        super().__init__(groups(24, 2), batch_size=4)

    def train_dataloader(self) -> Any:
        return StatefulLoader(self.train, BatchOrder(SampleOrder(24, seed=1), batch_size=4))


def run_dpo(module: DPO, folder: Path, ckpt_path: str | None = None, **settings: Any) -> tuple[Recorder, L.Trainer]:
    watch = Recorder()
    settings = {"max_epochs": 1, "limit_val_batches": 0, "plugins": [SafeCheckpointIO()], **settings}
    run = trainer(folder, callbacks=[watch] if module.reference_sync else [], **settings)
    run.fit(module, datamodule=Pairwise(), ckpt_path=ckpt_path)
    return watch, run


def expected(watch: Recorder, alpha: float, moves: Sequence[int]) -> list[dict[str, Tensor]]:
    """The reference after each batch, from the policy's weights in float64; `moves` says how many each batch makes."""
    found = [watch.reference[0]]
    for policy, times in zip(watch.policy[1:], moves, strict=True):
        kept = (1 - alpha) ** times
        found.append({name: (1 - kept) * policy[name] + kept * old for name, old in found[-1].items()})
    return found


def check_trajectory(watch: Recorder, alpha: float, moves: Sequence[int]) -> None:
    for got, want in zip(watch.reference, expected(watch, alpha, moves), strict=True):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0)
    moved = max(float((watch.policy[-1][n] - v).abs().max()) for n, v in watch.policy[0].items())
    assert moved > 1e-4, "the policy has to move for this to say anything"


@pytest.mark.parametrize("policy", ["whole", "lora", "pretrained", "lora, a whole copy"])
@pytest.mark.parametrize(("alpha", "every"), [(0.6, 2), (1.0, 3), (0.1, 1)])
def test_the_reference_of_dpo_is_where_the_formula_puts_it(
    policy: str, alpha: float, every: int, tmp_path: Path
) -> None:
    adapter = str(pretrained_adapter(LORA, tmp_path / "adapter")) if policy == "pretrained" else None
    config = TINY if policy == "whole" else PolicyConfig(lora=LoRAConfig(r=4, pretrained=adapter))
    kind = "copy" if policy == "lora, a whole copy" else "auto"
    module = dpo(config, reference=kind, reference_sync={"alpha": alpha, "every": every})
    watch, run = run_dpo(module, tmp_path)
    assert run.global_step == 6
    assert module.reference.kind == ("copy" if policy in ("whole", "lora, a whole copy") else "frozen_adapter")
    check_trajectory(watch, alpha, [int(step % every == 0) for step in range(1, 7)])
    trained = {n for n, p in module.policy.named_parameters() if p.requires_grad}
    assert len(watch.policy[0]) == len(trained) > 0
    assert not any(own.requires_grad for _, own in module.reference.trained().values())


class Labelled(FixedData):
    """Three batches of four completions, every other one good."""

    def __init__(self) -> None:
        rows = [replace(group, rows={"label": [float(group.index % 2)]}) for group in groups(12, 1)]
        super().__init__(rows, batch_size=4)

    def train_dataloader(self) -> Any:
        return StatefulLoader(self.train, BatchOrder(SampleOrder(12, seed=1), batch_size=4))


def kto(policy: PolicyConfig = TINY, **settings: Any) -> KTO:
    return KTO(**{"policy": policy, "optim": SGD, "reference_sync": {"alpha": 0.6, "every": 2}, **settings})


@pytest.mark.parametrize("loss", ["kto", "apo_zero"])
@pytest.mark.parametrize("policy", [TINY, LORA], ids=["whole", "lora"])
def test_the_reference_of_kto(policy: PolicyConfig, loss: Any, tmp_path: Path) -> None:
    """Three steps, a move after the second and, hard, after each: then z and the loss are those of the start again,
    0 and 1/2. Neither kind takes a cache."""
    for alpha, every, moves in ((0.6, 2, [0, 1, 0]), (1.0, 1, [1, 1, 1])):
        module = kto(policy, loss=loss, reference_sync={"alpha": alpha, "every": every})
        watch = Recorder()
        fit(module, tmp_path, Labelled(), callbacks=[watch])
        assert module.reference.kind == ("copy" if policy is TINY else "frozen_adapter")
        check_trajectory(watch, alpha, moves)
        found = [row["loss"] for row in watch.logged]
        assert found[0] == pytest.approx(0.5, abs=1e-6)
        if alpha == 1:
            assert found == pytest.approx([0.5] * 3, abs=1e-6)
            assert [row["kl"] for row in watch.logged] == pytest.approx([0.0] * 3, abs=1e-5)
        else:
            assert abs(found[1] - 0.5) > 1e-5


def test_kto_resumes_with_its_reference(tmp_path: Path) -> None:
    """Stopped before the only move: weights of both and what came of them, bit for bit."""
    ends = []
    for stop in (0, 1):
        start = None
        if stop:
            _, first = fit(kto(), tmp_path, Labelled(), max_steps=stop, plugins=[SafeCheckpointIO()])
            first.save_checkpoint(tmp_path / "kto")
            start = str(tmp_path / "kto")
        module = kto()
        run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
        run.fit(module, datamodule=Labelled(), ckpt_path=start)
        ends.append(module.state_dict())
    assert ends[0].keys() == ends[1].keys()
    assert [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])] == []


def test_after_a_hard_update_the_loss_is_ln_2_again(tmp_path: Path) -> None:
    """Every second step starts with reference = policy: loss ln 2 and rewards 0 there, and nowhere else."""
    watch, _ = run_dpo(dpo(reference_sync={"alpha": 1.0, "every": 2}), tmp_path)
    losses = [logged["loss"] for logged in watch.logged]
    assert [losses[i] for i in (0, 2, 4)] == pytest.approx([math.log(2)] * 3, abs=1e-6)
    assert all(abs(losses[i] - math.log(2)) > 1e-4 for i in (1, 3, 5))
    assert [watch.logged[i]["rewards/chosen"] for i in (0, 2, 4)] == pytest.approx([0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("policy", [TINY, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {"kl": {"coefficient": 0.1}}),
        (GRPO, {"kl": {"coefficient": 0.1, "estimator": "full_reverse"}}),
        (GDPO, {"kl": {"coefficient": 0.1}, "rewards": {"odd": here(odd), "size": here("Efficiency")}}),
        (PPO, {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}),
        (MORL, {"kl": {"coefficient": 0.1}, "rewards": {"odd": here(odd), "size": here("Efficiency")}}),
        (DecoupledPO, {"rewards": {"odd": here(odd), "size": here("Efficiency")}}),
        (OnlineDPO, {}),
    ],
    ids=["GRPO", "GRPO over the vocabulary", "GDPO", "PPO", "MORL", "DecoupledPO", "OnlineDPO"],
)
def test_the_references_of_modules_that_sample(
    kind: Any, settings: dict[str, Any], policy: PolicyConfig, tmp_path: Path
) -> None:
    """Two batches of two updates each and a move every step: each batch takes two at once, after its updates.
    DecoupledPO compares with the trunk."""
    sync = {"alpha": 0.3, "every": 1}
    module = online(kind, policy=policy, epochs=1, minibatches=2, optim=SGD, reference_sync=sync, **settings)
    watch = Recorder()
    _, run = fit(module, tmp_path, callbacks=[watch])
    assert run.global_step == 4
    check_trajectory(watch, 0.3, [2, 2])


def test_without_it_nothing_changes(tmp_path: Path) -> None:
    """Checkpoints, and a reference that stays; an interval longer than the run gives the same weights as none."""
    ends = []
    for sync in (None, {"every": 100}):
        module = dpo(reference="copy", reference_sync=sync)
        run_dpo(module, tmp_path)
        ends.append({n: v for n, v in module.state_dict().items() if not n.startswith(PREFIX)})
        assert any(n.startswith(PREFIX) for n in module.state_dict()) == (sync is not None)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("policy", ["whole", "lora", "pretrained", "bf16"])
@pytest.mark.parametrize("stop", [2, 3])
def test_resumed_is_uninterrupted(policy: str, stop: int, tmp_path: Path) -> None:
    """C21, at a move and between two: weights of policy and reference, losses, bit for bit."""
    adapter = str(pretrained_adapter(LORA, tmp_path / "adapter")) if policy == "pretrained" else None
    lora = LoRAConfig(r=4, pretrained=adapter) if policy in ("lora", "pretrained") else None
    config = PolicyConfig(lora=lora, dtype="bfloat16" if policy == "bf16" else "float32")
    whole, last = dpo(config), dpo(config)
    watch, _ = run_dpo(whole, tmp_path)
    _, first = run_dpo(dpo(config), tmp_path, max_steps=stop)
    first.save_checkpoint(tmp_path / "c")
    again, _ = run_dpo(last, tmp_path, str(tmp_path / "c"))
    assert [logged["loss"] for logged in again.logged] == [logged["loss"] for logged in watch.logged[stop:]]
    ours, theirs = whole.state_dict(), last.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
    assert any((ours[PREFIX + n] != p).any() for n, (p, _) in whole.reference.trained().items())


@pytest.mark.parametrize("policy", [TINY, LORA], ids=["whole", "lora"])
def test_a_checkpoint_holds_what_moves_once(policy: PolicyConfig, tmp_path: Path) -> None:
    """As many values as are trained; while saving they are the reference's own memory, not a copy of it."""
    module = dpo(policy)
    _, run = run_dpo(module, tmp_path, max_steps=3)
    run.save_checkpoint(tmp_path / "c")
    saved = load_checkpoint_folder(tmp_path / "c")["state_dict"]
    own = {PREFIX + name: own for name, (_, own) in module.reference.trained().items()}
    assert {name for name in saved if name.startswith(PREFIX)} == own.keys()
    assert all(torch.equal(saved[name], value) for name, value in own.items())
    assert sum(v.numel() for v in own.values()) == sum(p.numel() for p in module.policy.parameters() if p.requires_grad)
    state = module.state_dict()
    assert all(state[name].data_ptr() == value.data_ptr() for name, value in own.items())


def test_a_loaded_module_compares_with_the_saved_reference(tmp_path: Path) -> None:
    module = dpo()
    _, run = run_dpo(module, tmp_path, max_steps=3)
    run.save_checkpoint(tmp_path / "c")
    batch = GroupBatch.from_groups(groups(4, 2))
    again = DPO.load_from_checkpoint(tmp_path / "c")
    assert again.reference_sync == ReferenceSync(alpha=0.6, every=2)
    assert torch.equal(again.reference_logps(batch), module.reference_logps(batch))
    start = dpo()
    start.configure_model()
    assert (start.reference_logps(batch) - module.reference_logps(batch)).abs().max() > 1e-3


def test_an_export_leaves_the_reference_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = dpo(LORA)
    _, run = run_dpo(module, tmp_path, max_steps=2)
    run.save_checkpoint(tmp_path / "c")
    for source in (tmp_path / "c", module):
        out = export(source, tmp_path / "out", force=True)
        assert not any("reference" in key for key in tensors_of(out))
    assert "left out of the export, which holds the policy alone: reference." in caplog.text


def tensors_of(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_a_run_may_begin_to_follow_and_may_not_stop(tmp_path: Path) -> None:
    """From the start the reference has stayed at; and a reference that has moved would jump back without it."""
    for name, sync in (("stays", None), ("moves", {"every": 1})):
        _, run = run_dpo(dpo(LORA, reference_sync=sync), tmp_path, max_steps=2)
        run.save_checkpoint(tmp_path / name)
    watch, _ = run_dpo(dpo(LORA, reference_sync={"every": 4}), tmp_path, str(tmp_path / "stays"))
    check_trajectory(watch, 0.6, [0, 1, 0, 0])
    fresh = dpo(LORA)
    fresh.configure_model()
    for name, (_, own) in fresh.reference.trained().items():
        assert torch.equal(watch.reference[0][name], own.detach().double())
    with pytest.raises(UserError, match="has followed the policy, and without reference_sync it would be"):
        run_dpo(dpo(LORA, reference_sync=None), tmp_path, str(tmp_path / "moves"))


def test_without_a_kl_a_saved_reference_is_not_needed(tmp_path: Path) -> None:
    module = online(GRPO, kl={"coefficient": 0.1}, reference_sync={"every": 1})
    _, run = fit(module, tmp_path, max_steps=1, plugins=[SafeCheckpointIO()])
    run.save_checkpoint(tmp_path / "c")
    again = GRPO.load_from_checkpoint(tmp_path / "c", kl={"coefficient": 0.0}, reference_sync=None)
    assert all(torch.equal(v, module.policy.state_dict()[n]) for n, v in again.policy.state_dict().items())


def test_going_back_takes_the_reference_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the finite guard does: weights of both as the checkpoint has them."""
    module = dpo()
    _, run = run_dpo(module, tmp_path, max_steps=2)
    run.save_checkpoint(tmp_path / "c")
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for policy, own in module.reference.trained().values():
            policy.add_(1.0)
            own.add_(2.0)
    monkeypatch.setattr(guard, "checkpoints", lambda trainer: [str(tmp_path / "c")])
    assert guard.roll_back(module) == str(tmp_path / "c")
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


# ---------------------------------------------------------------------- what is refused, and what it takes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": "cached"}, "reference=cached is log-probs of the start, which cannot follow the policy"),
        ({"reference": "adapter_off", "policy": LORA}, "reference=adapter_off is the base without its adapters, which"),
        ({"reference": "frozen_adapter"}, "needs policy.lora"),
        ({"reference_sync": {"alpha": 0.0}}, r"reference_sync.alpha is 0.0 .* above 0 and at most 1"),
        ({"reference_sync": {"alpha": 1.1}}, "reference_sync.alpha is 1.1"),
        ({"reference_sync": {"alpha": float("nan")}}, "reference_sync.alpha is nan"),
        ({"reference_sync": {"every": 0}}, "every 0; alpha is above 0 and at most 1, every at least 1"),
        ({"reference_sync": {"tau": 0.5}}, "ReferenceSync has no field tau"),
    ],
)
def test_what_cannot_follow_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        dpo(**settings).configure_model()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [GRPO, PPO, GDPO, MORL])
def test_a_run_without_a_reference_is_refused(kind: Any) -> None:
    rewards = {"odd": here(odd), "size": here("Efficiency")}
    with pytest.raises(UserError, match=r"this run has none: set kl\.coefficient above 0, or kl\.measure"):
        online(kind, rewards=rewards, kl={"coefficient": 0.0}, reference_sync={})
    online(kind, rewards=rewards, kl={"measure": True}, reference_sync={})


def test_a_finite_data_set_is_not_cached_for_a_reference_that_moves(tmp_path: Path) -> None:
    module = DPO(policy=TINY, optim=OPTIM, reference_sync={"every": 1})
    run_dpo(module, tmp_path)
    assert module.reference.kind == "copy"
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize(("alpha", "bytes_a_value"), [(None, 2), (1.0, 2), (0.5, 6)])
def test_the_estimate_counts_averages_in_fp32(alpha: float | None, bytes_a_value: int) -> None:
    policy = PolicyConfig(dtype="bfloat16")
    found = memory.estimate(memory.Plan(policy=policy, reference="copy", reference_alpha=alpha))
    assert found.reference == bytes_a_value * found.parameters
    whole = memory.estimate(memory.Plan(policy=TINY, reference="copy", reference_alpha=alpha))
    assert whole.reference == 4 * whole.parameters


def test_advice_on_memory_offers_no_reference_that_cannot_move() -> None:
    plan = memory.Plan(policy=TINY, reference="copy", reference_alpha=0.6)
    offered = {changed.reference for _, changed in remedies(plan)}
    assert offered == {"copy", "frozen_adapter"}
