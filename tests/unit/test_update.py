"""The shared update: normalisers over micro-batches (C1, C2), the finite guard (C18), schedule and optimizer."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.guard import FiniteGuard, TrainingDivergedError
from alignment.losses import share
from alignment.metrics import Metrics, mean_of
from alignment.optim import OptimConfig, build_optimizer, build_schedule, lr_factor, peak_lr
from alignment.settings import as_config
from alignment.training import TrainingMixin
from alignment.update import Counts, group_weights, row_weights, total_norm

SGD = OptimConfig(lr=1.0, optimizer="sgd", schedule="constant", clip_norm=None)


class Toy(TrainingMixin):
    """loss of a token = weight * x, token mean over the batch: the gradient is the mean of x."""

    def __init__(self, optim: OptimConfig = SGD, micro_batch_tokens: int | None = 1) -> None:
        super().__init__(optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.weight = nn.Parameter(torch.ones(2))
        self.history: list[dict[str, float]] = []
        self.weights_after: list[Tensor] = []

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        x = torch.where(micro.scored, micro.tokens["x"], torch.zeros_like(micro.tokens["x"]))
        values = self.weight.sum() / 2 * x
        weights = row_weights(micro)[micro.row_of()] * micro.scored
        return share(values, weights, counts.tokens), {"x": mean_of(micro.tokens["x"], micro.scored)}

    def note_update(self, *, loss: float, grad_norm: float, lr: float, metrics: Metrics) -> None:
        self.history.append({"loss": loss, "grad_norm": grad_norm, "lr": lr})
        super().note_update(loss=loss, grad_norm=grad_norm, lr=lr, metrics=metrics)

    def on_train_batch_end(self, outputs: Any, batch: GroupBatch, batch_idx: int) -> None:
        self.weights_after.append(self.weight.detach().clone())


def batch(*rows: list[float], scored: list[list[bool]] | None = None, weights: list[float] | None = None) -> GroupBatch:
    """One group per row of token values."""
    groups = [
        Group(
            prompt=[1],
            completions=[[2] * len(row)],
            scored=[scored[i]] if scored else None,
            weights=[weights[i]] if weights else None,
            index=i,
            columns={"text": f"row {i}"},
        )
        for i, row in enumerate(rows)
    ]
    return GroupBatch.from_groups(groups).with_tokens(x=torch.tensor([v for row in rows for v in row]))


def fit(module: TrainingMixin, batches: list[GroupBatch], folder: Path, **kwargs: Any) -> L.Trainer:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, **kwargs}
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 4])
def test_loss_is_normalised_over_the_whole_batch(micro_batch_tokens: int | None, tmp_path: Path) -> None:
    """C1: micro-batches [1.0] and [0, 0, 0] give 1/4, not 1/2 and not 1/8, and the gradient of the single batch."""
    module = Toy(micro_batch_tokens=micro_batch_tokens)
    fit(module, [batch([1.0], [0.0, 0.0, 0.0])], tmp_path)
    assert module.history[0]["loss"] == pytest.approx(0.25, abs=1e-7)
    assert module.weights_after[0].tolist() == pytest.approx([1 - 0.125, 1 - 0.125], abs=1e-7)
    assert float(module.trainer.callback_metrics["x"]) == pytest.approx(0.25)


def test_truncated_completions_leave_numerator_and_denominator(tmp_path: Path) -> None:
    """C2: loss 1 per token, the second completion masked: 1.0, not 0.5."""
    module = Toy()
    fit(module, [batch([1.0, 1.0], [1.0, 1.0], scored=[[True, True], [False, False]])], tmp_path)
    assert module.history[0]["loss"] == pytest.approx(1.0)


def test_all_truncated(tmp_path: Path) -> None:
    """C2: loss 0, finite gradients, nothing counted as non-finite; NaN at unscored positions stays there (C3)."""
    module = Toy()
    fit(module, [batch([1.0, math.nan], scored=[[False, False]])], tmp_path)
    assert module.history[0]["loss"] == 0.0
    assert module.history[0]["grad_norm"] == 0.0
    assert module.nonfinite_steps == 0
    assert module.weights_after[0].tolist() == [1.0, 1.0]


def test_counts_and_weights() -> None:
    pair = Group(prompt=[1], completions=[[1, 2], [3, 4, 5]], weights=[2.0, 0.5])
    masked = Group(prompt=[1], completions=[[1], [3]], scored=[[False], [True]])
    both = GroupBatch.from_groups([pair, masked])
    assert row_weights(both).tolist() == [2.0, 0.5, 0.0, 1.0]
    assert group_weights(both).tolist() == [0.5, 0.0]
    assert Counts.of(both) == Counts(prompts=0.5, rows=3.5, tokens=2 * 2 + 0.5 * 3 + 1)
    assert Counts.of(both.select_groups([])) == Counts(prompts=0.0, rows=0.0, tokens=0.0)


def test_loss_without_gradient_is_an_error(tmp_path: Path) -> None:
    class Detached(Toy):
        def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
            part, metrics = super().loss(micro, counts)
            return part.detach(), metrics

    with pytest.raises(ValueError, match="has no gradient"):
        fit(Detached(), [batch([1.0])], tmp_path)


# ---------------------------------------------------------------------- the finite guard


class Recorder(L.Callback):
    """Keeps what is logged and the state of optimizer and trainer after every batch."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.moments: list[dict[str, Any]] = []
        self.global_step: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        state = trainer.optimizers[0].state_dict()["state"]
        self.moments.append({f"{i}.{k}": torch.as_tensor(v).clone() for i, s in state.items() for k, v in s.items()})
        self.global_step.append(trainer.global_step)


ADAM = OptimConfig(lr=0.1, schedule="linear")


def test_a_nonfinite_update_is_skipped(tmp_path: Path) -> None:
    """C18: NaN at step 2 of 4."""
    module, recorder = Toy(optim=ADAM), Recorder()
    values = [[1.0], [math.nan], [2.0], [1.0]]
    fit(module, [batch(v) for v in values], tmp_path, callbacks=[recorder])
    assert torch.equal(module.weights_after[1], module.weights_after[0])
    assert recorder.moments[1].keys() == recorder.moments[0].keys()
    assert len(recorder.moments[0]) >= 3
    for name, moment in recorder.moments[0].items():
        assert torch.equal(recorder.moments[1][name], moment), name
    assert recorder.global_step == [1, 1, 2, 3]
    assert module.nonfinite_steps == 1
    assert math.isnan(recorder.logged[1]["loss"])
    assert recorder.logged[1]["nonfinite/loss"] == 1
    assert not torch.equal(module.weights_after[2], module.weights_after[1])
    assert not torch.equal(module.weights_after[3], module.weights_after[2])
    # The schedule counts optimizer steps: 4 in all, of which the second batch made none.
    assert [h["lr"] for h in module.history] == pytest.approx([0.1, 0.075, 0.075, 0.05])


def test_one_bad_micro_batch_spoils_the_whole_update(tmp_path: Path) -> None:
    module = Toy(micro_batch_tokens=1)
    fit(module, [batch([1.0], [math.inf], [1.0])], tmp_path)
    assert module.weights_after[0].tolist() == [1.0, 1.0]
    assert module.nonfinite_steps == 1


def test_nonfinite_gradient_under_a_finite_loss(tmp_path: Path) -> None:
    class Root(Toy):
        def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
            return torch.sqrt((self.weight - 1).sum()), {}  # value 0, slope infinite

    module = Root()
    fit(module, [batch([1.0])], tmp_path)
    assert module.history[0]["loss"] == 0.0
    assert math.isinf(module.history[0]["grad_norm"])
    assert module.weights_after[0].tolist() == [1.0, 1.0]


def test_dump_holds_the_batch(tmp_path: Path) -> None:
    bad = batch([1.0, math.nan], [3.0])
    fit(Toy(), [batch([1.0]), bad], tmp_path)
    folders = sorted((tmp_path / "nonfinite").iterdir())
    assert [f.name for f in folders] == ["batch-1"]
    stored = load_file(folders[0] / "rank0.safetensors")
    assert torch.equal(stored["completion_ids"], bad.completion_ids)
    assert torch.equal(stored["tokens.x"].isnan(), bad.tokens["x"].isnan())
    text = json.loads((folders[0] / "rank0.json").read_text())
    assert text["columns"] == [{"text": "row 0"}, {"text": "row 1"}]
    assert text["facts"]["global_step"] == 1


def test_three_in_a_row_stop_the_run(tmp_path: Path) -> None:
    module = Toy()
    with pytest.raises(TrainingDivergedError, match="nonfinite/batch-3"):
        fit(module, [batch([v]) for v in (1.0, math.nan, math.nan, math.nan, 1.0)], tmp_path)
    assert module.nonfinite_steps == 3


def test_going_back_once_then_stopping(tmp_path: Path) -> None:
    """With a checkpoint: weights and moments return to it, the schedule does not; the second time the run stops."""
    module = Toy(optim=ADAM)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    recorder = Recorder()
    values = [1.0, 1.0, math.nan, math.nan, math.nan, 1.0, math.nan, math.nan, math.nan, 1.0]

    class Drift(L.Callback):
        """Moves the weights after the last checkpoint, so that going back shows."""

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if args[1] == 4:
                assert isinstance(module, Toy)
                with torch.no_grad():
                    module.weight += 5

    with pytest.raises(TrainingDivergedError, match="nonfinite/batch-8"):
        fit(
            module,
            [batch([v]) for v in values],
            tmp_path,
            callbacks=[recorder, Drift(), checkpoint],
            enable_checkpointing=True,
        )
    assert torch.equal(module.weights_after[4], module.weights_after[1])
    for name, moment in recorder.moments[1].items():
        assert torch.equal(recorder.moments[4][name], moment), name
    assert module.guard.rolled_back
    assert recorder.global_step[4:6] == [2, 3]
    assert module.history[5]["lr"] == pytest.approx(0.1 * (1 - 2 / 10))


def test_more_than_five_of_the_last_500() -> None:
    guard = FiniteGuard()
    pattern = [u % 80 != 0 for u in range(1, 481)]  # failures at 80, 160, ..., 480: the sixth is too much
    reached = [guard.record(finite) for finite in pattern]
    assert reached.index(True) == 479
    sparse = FiniteGuard()
    assert not any(sparse.record(u % 100 != 0) for u in range(1, 2001))  # never more than five within 500
    assert sparse.nonfinite == 20


def test_guard_survives_a_checkpoint() -> None:
    guard = FiniteGuard()
    guard.record(False)
    guard.record(False)
    other = FiniteGuard()
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other.record(False)
    assert other.nonfinite == 3


# ---------------------------------------------------------------------- gradients, clipping, schedule


def test_listeners_see_gradients_before_clipping(tmp_path: Path) -> None:
    class Listener(L.Callback):
        norms: Mapping[str, float]
        gradient: Tensor

        def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Mapping[str, float]) -> None:
            self.norms = norms
            self.gradient = next(module.parameters()).grad.clone()  # type: ignore[union-attr]

    listener = Listener()
    module = Toy(optim=OptimConfig(lr=1.0, optimizer="sgd", schedule="constant", clip_norm=1.0))
    fit(module, [batch([6.0])], tmp_path, callbacks=[listener])
    assert listener.gradient.tolist() == [3.0, 3.0]
    assert listener.norms["total"] == pytest.approx(math.sqrt(18))
    # Clipped to length 1: both components 1 / sqrt 2.
    assert module.weights_after[0].tolist() == pytest.approx([1 - math.sqrt(0.5)] * 2, abs=1e-6)
    assert module.history[0]["grad_norm"] == pytest.approx(math.sqrt(18))


def test_the_norm_is_not_rounded_to_the_gradients_dtype() -> None:
    """bf16 would give 5.03125, and fp16 has no number as large as the second."""
    grads = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16)]
    assert float(total_norm(grads)) == pytest.approx(math.sqrt(25.25), rel=1e-6)
    assert float(total_norm([torch.full((2,), 60000.0, dtype=torch.float16)])) == pytest.approx(60000 * math.sqrt(2))


def test_float16_weights_are_not_trained() -> None:
    """Adam's eps of 1e-8 is 0 in float16, so a gradient of 0 would make a weight NaN."""
    layer = nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(UserError, match="bfloat16 or float32"):
        build_optimizer(layer.named_parameters(), OptimConfig(), 0.1)
    layer.requires_grad_(False)
    model = nn.ModuleDict({"base": layer, "adapter": nn.Linear(2, 2)})
    assert len(build_optimizer(model.named_parameters(), OptimConfig(), 0.1).param_groups) == 2


def test_no_decay_on_vectors() -> None:
    layer = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(layer.named_parameters(), OptimConfig(weight_decay=0.1), 1e-3)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {id(layer[0].weight)}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 4


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False).named_parameters(), OptimConfig(), 1e-3)


@pytest.mark.parametrize("kind", ["adamw_8bit", "lion_8bit", "ademamix_8bit", "paged_adamw_8bit"])
@pytest.mark.filterwarnings("ignore:.*[Pp]aged.*")
def test_bitsandbytes_optimizers_step(kind: Any) -> None:
    """On the CPU too; the state of a 64 x 64 matrix is 8-bit, and a step goes downhill."""
    layer = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(layer.named_parameters(), OptimConfig(optimizer=kind), 1e-2)
    losses = []
    for _ in range(3):
        loss = layer.weight.square().sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    state = optimizer.state[layer.weight]
    assert any(isinstance(v, Tensor) and v.dtype == torch.uint8 for v in state.values())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 2 warm-up steps of 10, floor 0.1; progress (step - 2) / 8.
        ("cosine", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.1 + 0.9 * 0.5, 10: 0.1, 12: 0.1}),
        ("linear", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 10: 0.1}),
        ("constant", {0: 0.5, 1: 1.0, 6: 1.0, 10: 1.0}),
    ],
)
def test_schedule(schedule: Any, expected: dict[int, float]) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    assert {s: lr_factor(s, config, 10) for s in expected} == pytest.approx(expected)


def test_schedule_needs_an_end() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2).named_parameters(), OptimConfig(), 1e-3)
    with pytest.raises(ValueError, match=r"trainer\.max_steps"):
        build_schedule(optimizer, OptimConfig(schedule="cosine"), math.inf)


@pytest.mark.parametrize(("batch_size", "expected"), [(1023, 1.0), (1024, 0.7), (4096, 0.7)])
def test_large_batch_rule(batch_size: int, expected: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="alignment.optim"):
        assert peak_lr(OptimConfig(lr=1.0, large_batch_rule=True), batch_size) == pytest.approx(expected)
    said = [f"large-batch rule: batch {batch_size} >= 1024, learning rate 1 -> 0.7"]
    assert caplog.messages == (said if expected < 1 else [])
    assert peak_lr(OptimConfig(lr=1.0), batch_size) == 1.0


def test_large_batch_rule_needs_a_batch_size() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        peak_lr(OptimConfig(large_batch_rule=True), None)


def test_small_batch_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="alignment.training"):
        fit(Toy(micro_batch_tokens=None), [batch([1.0])] * 3, tmp_path)
    assert [r.args for r in caplog.records if "noisy" in r.message] == [(1, 32)]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="alignment.training"):
        fit(Toy(micro_batch_tokens=None), [batch(*[[1.0]] * 32)], tmp_path)
    assert not [r for r in caplog.records if "noisy" in r.message]


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.0}, {"clip_norm": 0.0}, {"warmup_steps": -1}, {"min_lr_ratio": 2.0}, {"betas": (0.9, 0.95, 0.99)}],
)
def test_bad_optimizer_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"optim\."):
        OptimConfig(**settings)


def test_config_from_plain_values() -> None:
    assert as_config(OptimConfig, {"lr": 0.5, "betas": [0.9, 0.95]}) == OptimConfig(lr=0.5, betas=(0.9, 0.95))
    with pytest.raises(ValueError, match="no field lrr"):
        as_config(OptimConfig, {"lrr": 0.5})
