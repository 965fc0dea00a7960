"""SFT, RewardModel and DPO on a real tiny Llama: invariance to micro-batches, masks, references, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.ensemble import RewardHeads
from alignment.errors import UserError
from alignment.module import PolicyMixin
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.update import UNIT
from modules import DPO, SFT, RewardModel
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

LORA = PolicyConfig(name="tiny", lora=LoRAConfig(r=4))

MODULES: dict[str, Callable[..., PolicyMixin]] = {
    "sft": lambda **kw: SFT(policy=TINY, optim=OPTIM, **kw),
    "reward": lambda **kw: RewardModel(policy=TINY, members=2, centre_coefficient=0.1, optim=OPTIM, **kw),
    "dpo": lambda **kw: DPO(policy=TINY, reference="copy", optim=OPTIM, **kw),
    "dpo+sft": lambda **kw: DPO(policy=TINY, reference="copy", sft_weight=0.5, ld_alpha=0.3, optim=OPTIM, **kw),
}


def completions_of(name: str) -> int:
    return 1 if name == "sft" else 2


class Capture(L.Callback):
    """The first gradient, before clipping, and the metrics logged after every batch."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.logged: list[dict[str, float]] = []

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Any) -> None:
        if self.gradient is None:
            parts = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            self.gradient = torch.cat([torch.zeros(0), *parts])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def run(module: L.LightningModule, data: L.LightningDataModule, folder: Path, **settings: Any) -> Capture:
    capture = Capture()
    trainer(folder, max_steps=2, limit_val_batches=0, callbacks=[capture], **settings).fit(module, datamodule=data)
    return capture


@pytest.mark.parametrize("name", MODULES)
def test_micro_batches_change_nothing(name: str, tmp_path: Path) -> None:
    """Batch 1 x 8 micro-batches = batch 8: loss, gradient and every metric, to 1e-6 in fp32."""
    data = FixedData(groups(16, completions_of(name), margin=0.1))
    whole = run(MODULES[name](micro_batch_tokens=None), data, tmp_path)
    split = run(MODULES[name](micro_batch_tokens=1), data, tmp_path)
    assert whole.gradient is not None
    assert split.gradient is not None
    torch.testing.assert_close(split.gradient, whole.gradient, atol=1e-6, rtol=1e-6)
    for a, b in zip(split.logged, whole.logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-6)
    assert len(whole.logged) == 2
    assert whole.logged[1]["loss"] != whole.logged[0]["loss"]


@pytest.mark.parametrize("name", MODULES)
def test_validation_weighs_rows_not_batches(name: str, tmp_path: Path) -> None:
    """11 groups in batches of 4, 4, 3 and in one batch give the same validation metrics."""
    rows = groups(11, completions_of(name), margin=0.1)
    results = []
    for batch_size in (4, 11):
        data = FixedData(rows, batch_size=batch_size)
        results.append(trainer(tmp_path).validate(MODULES[name](), datamodule=data, verbose=False)[0])
    assert results[0] == pytest.approx(results[1], rel=1e-6, abs=1e-6)
    assert "val/loss" in results[0]


def test_sft_loss_is_the_token_mean_of_scored_tokens(tmp_path: Path) -> None:
    """Against transformers' own cross-entropy over the same labels."""
    module = SFT(policy=TINY, optim=OPTIM)
    rows = groups(5, 1)
    metrics = trainer(tmp_path).validate(module, datamodule=FixedData(rows), verbose=False)[0]
    nll, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.completions[0]]])
        assert row.scored is not None
        labels = ids.clone()
        labels[0, : len(row.prompt)] = -100
        labels[0, len(row.prompt) :][~torch.tensor(row.scored[0])] = -100
        n = sum(row.scored[0])
        with torch.no_grad():
            nll += float(module.policy(input_ids=ids, labels=labels).loss) * n
        count += n
    assert metrics["val/loss"] == pytest.approx(nll / count, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)


def test_truncated_completions_are_left_out(tmp_path: Path) -> None:
    """C2 in a real module: masking one completion gives the loss of the other alone; all masked gives 0 and no NaN."""
    one, two = groups(2, 1)
    assert one.scored is not None
    masked = Group(prompt=two.prompt, completions=two.completions, scored=[[False] * len(two.completions[0])])
    module = SFT(policy=TINY, optim=OPTIM)
    module.configure_model()
    alone = module.loss(GroupBatch.from_groups([one]), UNIT)[1]["loss"]
    both = module.loss(GroupBatch.from_groups([one, masked]), UNIT)[1]["loss"]
    assert both[1] == alone[1]
    assert float(both[0]) == pytest.approx(float(alone[0]), rel=1e-6)
    capture = run(SFT(policy=TINY, optim=OPTIM), FixedData([masked] * 16), tmp_path)
    assert [row["loss"] for row in capture.logged] == [0.0, 0.0]
    assert all(row["grad_norm"] == 0.0 for row in capture.logged)


# ---------------------------------------------------------------------- DPO


def pretrained_adapter(folder: Path) -> PolicyConfig:
    policy = load_policy(LORA)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    policy.save_pretrained(str(folder))  # type: ignore[operator]
    return PolicyConfig(name="tiny", lora=LoRAConfig(pretrained=str(folder)))


@pytest.mark.parametrize("kind", ["cached", "copy", "adapter_off", "frozen_adapter", "auto", "auto_lora"])
def test_first_dpo_loss_is_ln_2(kind: str, tmp_path: Path) -> None:
    """C9: for each kind of reference loss ln 2, rewards 0, and after a step the policy has moved."""
    policy = {
        "adapter_off": LORA,
        "auto_lora": LORA,
        "frozen_adapter": pretrained_adapter(tmp_path / "adapter") if kind == "frozen_adapter" else TINY,
    }.get(kind, TINY)
    reference: Any = "auto" if kind == "auto_lora" else kind
    module = DPO(policy=policy, reference=reference, optim=OPTIM)
    capture = run(module, FixedData(groups(16, 2)), tmp_path, max_epochs=1)
    expected = {"auto": "cached", "auto_lora": "adapter_off"}.get(kind, kind)
    assert module.reference.kind == expected
    assert capture.logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert capture.logged[0]["rewards/chosen"] == pytest.approx(0, abs=1e-6)
    if expected != "cached":  # cached rows were scored in other batches and may differ in the last bit
        assert capture.logged[0]["rewards/accuracies"] == 0
    assert abs(capture.logged[1]["delta"]) > 1e-6


def test_references_agree_after_training(tmp_path: Path) -> None:
    """Two steps with cached log-probs and with a copy: the same losses (C10)."""
    rows = groups(16, 2)
    cached = run(DPO(policy=TINY, reference="cached", optim=OPTIM), FixedData(rows), tmp_path)
    copied = run(DPO(policy=TINY, reference="copy", optim=OPTIM), FixedData(rows), tmp_path)
    assert [r["loss"] for r in cached.logged] == pytest.approx([r["loss"] for r in copied.logged], abs=1e-6)


def test_lora_with_gradient_checkpointing_moves(tmp_path: Path) -> None:
    """C9, last sentence."""
    policy = PolicyConfig(name="tiny", lora=LoRAConfig(r=4), gradient_checkpointing=True)
    module = DPO(policy=policy, optim=OPTIM)
    before = load_policy(policy).state_dict()
    run(module, FixedData(groups(16, 2)), tmp_path)
    after = module.policy.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_reference_follows_the_stage(tmp_path: Path) -> None:
    """A cached reference of a trained policy is still the start when other rows are tested."""
    data = FixedData(groups(16, 2), val=groups(5, 2, seed=9))
    module = DPO(policy=TINY, reference="cached", optim=OPTIM)
    run(module, data, tmp_path)
    tested = trainer(tmp_path).test(module, datamodule=data, verbose=False)[0]
    twin = DPO(policy=TINY, reference="copy", optim=OPTIM)
    twin.configure_model()
    twin.load_state_dict(module.state_dict())
    expected = trainer(tmp_path).test(twin, datamodule=data, verbose=False)[0]
    assert tested == pytest.approx(expected, abs=1e-6)
    assert abs(tested["test/delta"]) > 1e-6


def test_option_changes_the_loss_of_the_module() -> None:
    """C7: what is configured is what is computed, here through the module."""
    batch = GroupBatch.from_groups(groups(4, 2))
    values = {}
    for name in ("sigmoid", "hinge", "ipo", "ipo_sum", "robust", "sigmoid_norm"):
        module = DPO(policy=TINY, loss=name, reference="copy")
        module.configure_model()
        values[name] = float(module.loss(batch, UNIT)[1]["loss"][0]) / 4
    # At the start delta is 0: ln 2 for the sigmoid family, 1 for hinge, (1 / (2 beta))^2 for both forms of IPO.
    expected = {"hinge": 1.0, "ipo": 25.0, "ipo_sum": 25.0}
    assert values == pytest.approx({n: expected.get(n, math.log(2)) for n in values}, abs=1e-5)


def test_pair_with_nothing_to_score_is_left_out() -> None:
    whole, other = groups(2, 2)
    silent = Group(prompt=other.prompt, completions=[[5], [6]], scored=[[False], [True]])
    module = DPO(policy=TINY, reference="copy", loss="ipo")
    module.configure_model()
    share, metrics = module.loss(GroupBatch.from_groups([whole, silent]), UNIT)
    alone, _ = module.loss(GroupBatch.from_groups([whole]), UNIT)
    assert float(share.detach()) == pytest.approx(float(alone.detach()), rel=1e-6)
    assert float(metrics["rewards/accuracies"][1]) == 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"loss": "dpo"}, "available"), ({"ld_alpha": 2.0}, "ld_alpha"), ({"sft_weight": -1.0}, "sft_weight")],
)
def test_bad_dpo_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        DPO(policy=TINY, **settings)


def test_moved_beta_is_restored_unless_given_anew(tmp_path: Path) -> None:
    class Move(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            module.beta *= 0.5  # type: ignore[operator, assignment]

    module = DPO(policy=TINY, beta=0.4, reference="copy", optim=OPTIM)
    t = trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[Move()], plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(16, 2)))
    t.save_checkpoint(tmp_path / "c")
    again = DPO.load_from_checkpoint(tmp_path / "c")
    assert (again.beta, again.batches_seen) == (pytest.approx(0.1), 2)
    assert DPO.load_from_checkpoint(tmp_path / "c", beta=0.9).beta == 0.9


# ---------------------------------------------------------------------- reward model


def scores(module: RewardModel, rows: list[Group]) -> Tensor:
    with torch.no_grad():
        return module.rewards(GroupBatch.from_groups(rows))


def built(**settings: Any) -> RewardModel:
    module = RewardModel(**({"policy": TINY} | settings))
    module.configure_model()
    return module


def test_score_does_not_depend_on_the_batch() -> None:
    """C25: alone, beside longer rows, and on the padded path."""
    rows = groups(6, 2)
    module = built()
    together = scores(module, rows)
    alone = torch.cat([scores(module, [row]) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert float(together.std()) > 1e-3
    padded = built(policy=PolicyConfig(name="tiny", logprob_path="plain"))
    torch.testing.assert_close(scores(padded, rows), together, atol=1e-5, rtol=0)


def test_score_is_the_head_on_the_last_token() -> None:
    """Against the trunk's own hidden state, unpadded; an unscored last token is still the last token."""
    module = built()
    row = groups(1, 2)[0]
    ids = torch.tensor([[*row.prompt, *row.completions[0]]])
    with torch.no_grad():
        state = module.policy.model(input_ids=ids).last_hidden_state[0, -1]  # type: ignore[union-attr, operator]
        expected = state @ module.heads.weight[0]
    assert float(scores(module, [row])[0]) == pytest.approx(float(expected), abs=1e-5)


def test_margin_column_is_used() -> None:
    batch = GroupBatch.from_groups(groups(1, 2, margin=0.5))
    with_margin, without = built(), built(use_margin=False)
    chosen, rejected = batch.pair(scores(without, groups(1, 2)))
    gap = float(chosen - rejected)
    assert with_margin.loss(batch, UNIT)[0].item() == pytest.approx(math.log1p(math.exp(-(gap - 0.5))), abs=1e-6)
    assert without.loss(batch, UNIT)[0].item() == pytest.approx(math.log1p(math.exp(-gap)), abs=1e-6)


@pytest.mark.parametrize(("kind", "policy"), [("heads", TINY), ("adapters", LORA), ("copies", TINY)])
def test_ensembles_train_and_reload(kind: Any, policy: PolicyConfig, tmp_path: Path) -> None:
    """Every member learns, members differ, and a checkpoint brings all of them back."""
    module = RewardModel(policy=policy, members=3, ensemble=kind, aggregation="uwo", optim=OPTIM)
    t = trainer(tmp_path, max_steps=3, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    rows = groups(24, 2)
    t.fit(module, datamodule=FixedData(rows))
    start = built(policy=policy, members=3, ensemble=kind, aggregation="uwo")
    batch = GroupBatch.from_groups(rows[:4])
    with torch.no_grad():
        before, after = start.heads(batch), module.heads(batch)
    assert after.shape == (8, 3)
    assert bool(((after - before).abs().amax(dim=0) > 1e-4).all())
    assert bool((after.std(dim=1) > 1e-6).all())
    t.save_checkpoint(tmp_path / "c")
    again = RewardModel.load_from_checkpoint(tmp_path / "c")
    with torch.no_grad():
        assert torch.equal(again.heads(batch), after)


def test_members_trunks_are_their_own(tmp_path: Path) -> None:
    """With adapters, training on member 1's score alone leaves the trunks of the others where they were."""
    module = built(policy=LORA, members=2, ensemble="adapters")
    batch = GroupBatch.from_groups(groups(3, 2))
    module.heads(batch)[:, 1].sum().backward()
    touched = {n for n, p in module.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert any(".member1." in n for n in touched)
    assert not any(".default." in n for n in touched)
    assert all(p.requires_grad for n, p in module.named_parameters() if "lora_" in n)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"members": 0}, "members"),
        ({"ensemble": "adapters", "members": 2}, r"policy\.lora"),
        ({"centre_coefficient": -1.0}, "centre_coefficient"),
        (
            {
                "ensemble": "adapters",
                "policy": PolicyConfig(name="tiny", lora=LoRAConfig(), gradient_checkpointing=True),
            },
            "gradient_checkpointing",
        ),
    ],
)
def test_bad_reward_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        RewardModel(**({"policy": TINY} | settings))


def test_completion_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        scores(built(), [Group(prompt=[1], completions=[[], [5]])])


# ---------------------------------------------------------------------- state and hyper-parameters


@pytest.mark.parametrize("name", MODULES)
def test_hyperparameters_are_plain_and_rebuild_the_module(name: str, tmp_path: Path) -> None:
    module = MODULES[name](micro_batch_tokens=77)
    t = trainer(tmp_path, max_steps=1, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(8, completions_of(name))))
    t.save_checkpoint(tmp_path / "c")
    text = json.loads(json.dumps(dict(module.hparams)))
    assert text["policy"]["name"] == "tiny"
    again = type(module).load_from_checkpoint(tmp_path / "c")
    assert again.optim == module.optim
    assert again.policy_config == module.policy_config
    assert again.micro_batch_tokens == 77
    for key, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_lora_checkpoint_holds_only_what_is_trained(tmp_path: Path) -> None:
    module = RewardModel(policy=LORA)
    module.configure_model()
    names = set(module.state_dict())
    assert names == {n for n, p in module.named_parameters() if p.requires_grad}
    assert "heads.weight" in names
    assert not module.strict_loading


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    module = SFT(policy=LORA)
    module.configure_model()
    state = dict(list(module.state_dict().items())[1:])
    with pytest.raises(UserError, match="lacks 1 weights"):
        module.on_load_checkpoint({"alignment": module.training_state(), "state_dict": state})


def test_dropout_is_keyed_by_the_batch(tmp_path: Path) -> None:
    """With dropout on, draws depend on the batch's number only, not on random numbers consumed in between."""

    class Consume(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            torch.rand(7)

    policy = PolicyConfig(name="tiny", lora=LoRAConfig(r=4, dropout=0.5))
    data = FixedData(groups(16, 1))
    losses = []
    for extra in ([], [Consume()]):
        capture = Capture()
        module = SFT(policy=policy, optim=OptimConfig(lr=1e-2, schedule="constant"))
        trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[capture, *extra]).fit(module, datamodule=data)
        assert module.dropout_on
        losses.append([row["loss"] for row in capture.logged])
    assert losses[0] == losses[1]


def test_register_transform_after_building() -> None:
    module = built()
    with pytest.raises(UserError, match="setup"):
        module.register_transform("compile", lambda model: model)


def test_heads_start_differently() -> None:
    module = built(members=3)
    assert isinstance(module.heads, RewardHeads)
    assert module.heads.weight.detach().std(dim=0).min().item() > 0


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_precisions_that_would_change_the_batch_are_refused(precision: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.dtype"):
        run(SFT(policy=TINY), FixedData(groups(4, 1)), tmp_path, precision=precision)


@pytest.mark.parametrize("reference", ["copy", "cached"])
def test_mixed_precision_starts_at_ln_2(reference: Any, tmp_path: Path) -> None:
    """The reference is computed under the same autocast as the policy."""
    module = DPO(policy=TINY, reference=reference, optim=OPTIM)
    capture = run(module, FixedData(groups(16, 2)), tmp_path, precision="bf16-mixed")
    assert capture.logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert capture.logged[1]["loss"] != capture.logged[0]["loss"]


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "ademamix_8bit"])
def test_8bit_state_resumes_exactly(optimizer: Any, tmp_path: Path) -> None:
    """2 + 2 steps through a checkpoint equal 4, bit for bit."""
    rows = groups(32, 1)
    optim = OptimConfig(lr=1e-3, optimizer=optimizer, schedule="constant")
    whole, first, second = (SFT(policy=TINY, optim=optim) for _ in range(3))
    settings: dict[str, Any] = {"limit_val_batches": 0, "plugins": [SafeCheckpointIO()]}
    trainer(tmp_path, max_steps=4, **settings).fit(whole, datamodule=FixedData(rows))
    t = trainer(tmp_path, max_steps=2, **settings)
    t.fit(first, datamodule=FixedData(rows[:16]))
    t.save_checkpoint(tmp_path / "c")
    t = trainer(tmp_path, max_steps=4, **settings)
    t.fit(second, datamodule=FixedData(rows[16:]), ckpt_path=str(tmp_path / "c"))
    assert t.global_step == 4
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
