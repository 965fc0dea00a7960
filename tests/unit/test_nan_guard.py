"""NanGuard and R7: NaN or infinity in every place, the policy followed, and the place named. `benchmarks.nonfinite`
puts it there; the whole matrix of places and algorithms is `python -m benchmarks.reliability --only R7`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from mlflow.tracking import MlflowClient
from torch import Tensor, nn

import alignment.moments
import alignment.once_more
import alignment.online
import alignment.update
from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.guard import FiniteGuard, Limits, TrainingDivergedError
from alignment.moments import MomentWatch, nonfinite_state
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.protocols import HasArchive, PolicyArchive
from alignment.rewards import RewardSpec
from alignment.tracking import TrackingLogger
from benchmarks import nonfinite
from benchmarks.nonfinite import NAN, PLACES, Place
from callbacks import Checkpoint, Fp8PolicyArchive, NanGuard
from modules import GRPO, SFT
from tests.loops import Recorder
from tests.rl_toys import fit, online
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

QUICK = [(name, algorithm) for name, place in PLACES.items() for algorithm in place.quick]


@pytest.mark.parametrize(("name", "algorithm"), QUICK)
def test_one_place(name: str, algorithm: str, tmp_path: Path) -> None:
    """R7: no parameter or moment is changed by the batch that meets it, later ones train, and the guard names it."""
    assert nonfinite.run(PLACES[name], algorithm, tmp_path) == ""


def test_there_are_enough_places() -> None:
    """Twenty here, beside evaluation, a reward worker and one rank of two, which are tests of their own."""
    assert len(PLACES) >= 20
    assert {algorithm for _, algorithm in QUICK} >= {"SFT", "DPO", "GRPO", "PPO", "DecoupledPO"}
    assert all(set(place.quick) <= set(place.algorithms) for place in PLACES.values())


# ---------------------------------------------------------------------- each guard broken once


MUTANTS: dict[str, tuple[Any, str, Any, str, str]] = {
    "the update's flag": (
        *(alignment.update, "math", SimpleNamespace(isfinite=lambda value: True, inf=math.inf, nan=math.nan)),
        *("loss", "GRPO"),
    ),
    "what makes a step unsafe": (FiniteGuard, "unsafe", lambda guard, optimizer: "", "optimizer state", "SFT"),
    "version counters": (alignment.moments, "_versions", lambda optimizer: [], "optimizer state", "SFT"),
    "what a rollout measured": (
        *(alignment.online, "measured_fault"),
        lambda batch: torch.zeros((), dtype=torch.bool),
        *("value", "PPO"),
    ),
    "layers": (alignment.once_more, "_output_hook", lambda heard, name: lambda *args: None, "layer", "DPO"),
    "the loss once more": (alignment.once_more, "_micro", lambda module, micro, rerun: iter(()), "one gradient", "SFT"),
    "rows": (alignment.once_more, "_rows_of", lambda module, micro, rerun: [], "last micro-batch", "DPO"),
}
"""What is broken -> (where, its name, what comes in its place, the try that must fail)."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_guard_is_noticed(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead, place, algorithm = MUTANTS[mutant]
    monkeypatch.setattr(where, name, instead)
    assert nonfinite.run(PLACES[place], algorithm, tmp_path) != ""


# ---------------------------------------------------------------------- going back


class Stays(L.Callback):
    """Puts something into a place at one batch and leaves it there. Notes the weights after each batch."""

    def __init__(self, put: Callable[[Any, Any], Any], at: int = 2) -> None:
        self.put, self.at = put, at
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: GroupBatch, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.put(module, batch)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in module.named_parameters()})


def sft(**settings: Any) -> SFT:
    return SFT(policy=TINY, optim=OPTIM, **settings)


def job(folder: Path, *callbacks: L.Callback, module: Any = None, **settings: Any) -> Any:
    """Nine batches of two rows."""
    module = module or sft()
    run = trainer(
        folder,
        callbacks=list(callbacks),
        plugins=[SafeCheckpointIO()],
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        **{"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, **settings},
    )
    run.fit(module, datamodule=FixedData(groups(18, 1), batch_size=2))
    return module


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("put", [nonfinite.weight, nonfinite.optimizer_state])
def test_what_stays_broken_goes_back_to_the_checkpoint(put: Any, tmp_path: Path) -> None:
    """Batches 2, 3 and 4 are left out; then weights and moments are those of the last save, and training goes on."""
    stays = Stays(put)
    keep = Checkpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    module = job(tmp_path, stays, keep, NanGuard())
    assert module.nonfinite_steps == 3
    assert module.guard.rolled_back
    assert same(stays.weights[4], stays.weights[1])
    assert not same(stays.weights[5], stays.weights[4])
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert nonfinite_state(module.trainer.optimizers[0]) is None


def test_a_checkpoint_that_is_not_finite_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved after the weight was damaged: the one before it is taken."""

    class Save(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: GroupBatch, batch_idx: int) -> None:
            if batch_idx == 3:
                assert isinstance(trainer.checkpoint_callback, Checkpoint)
                trainer.checkpoint_callback.save_now(trainer)

    stays, keep = Stays(nonfinite.weight), Checkpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    module = job(tmp_path, stays, Save(), keep)
    assert same(stays.weights[4], stays.weights[1])
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert "holds values that are not finite" in caplog.text


def test_what_no_checkpoint_heals_stops_the_run_with_its_place(tmp_path: Path) -> None:
    keep = Checkpoint(dirpath=tmp_path / "c", every_n_train_steps=1)
    with pytest.raises(TrainingDivergedError, match=r"batch-7; buffer: .*inv_freq is nan at \[0\]") as raised:
        job(tmp_path, Stays(nonfinite.buffer), keep, NanGuard())
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("training stopped: 6 of 8 updates were not finite")


class Kept:
    """Copies, as an archive of policies keeps codes."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.kept)

    def restore(self, module: nn.Module, name: str) -> None:
        with torch.no_grad():
            for key, p in module.named_parameters():
                p.copy_(self.kept[name][key])


class Archive(L.Callback):
    """Keeps the policies after the first two batches."""

    def __init__(self, batches: int = 2) -> None:
        self.archive, self.batches = Kept(), batches

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < self.batches:
            copies = {name: p.detach().clone() for name, p in module.named_parameters()}
            self.archive.kept[f"step-{batch_idx + 1}"] = copies


def test_going_back_to_an_archived_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its weights; moments begin anew: the next step is the first one of AdamW, whose size is the learning rate."""
    stays, archive = Stays(nonfinite.weight), Archive()
    assert isinstance(archive, HasArchive)
    assert isinstance(archive.archive, PolicyArchive)
    module = job(tmp_path, stays, archive, NanGuard(back_to="archive"))
    assert same(stays.weights[4], archive.archive.kept["step-2"])
    assert "step-2 of the archive, which has no moments: the optimizer begins anew" in caplog.text
    moved = {n: (stays.weights[5][n] - stays.weights[4][n]).abs().max() for n in stays.weights[4]}
    assert max(float(value) for value in moved.values()) == pytest.approx(OPTIM.lr, rel=1e-2)
    assert {float(s["step"]) for s in module.trainer.optimizers[0].state.values()} == {4.0}  # batches 5 to 8


def test_going_back_to_fp8_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The policy after two steps, but for the rounding of its matrices to e4m3: 1/17 of a weight, or half the spacing
    of the smallest codes, 2^-10 amax / 448. Vectors are kept as they are."""
    stays = Stays(nonfinite.weight)
    job(tmp_path, stays, Fp8PolicyArchive(every_n_steps=1), NanGuard(back_to="archive"))
    assert "step-2 of the archive" in caplog.text
    moved = False
    for name, was in stays.weights[1].items():
        now = stays.weights[4][name]
        if was.dim() < 2:
            assert torch.equal(now, was)
        else:
            bound = torch.maximum(was.abs() / 17, was.abs().max() / 448 * 2**-10)
            assert bool(((now - was).abs() <= bound * (1 + 1e-5)).all())
            moved |= not torch.equal(now, was)
    assert moved


def test_an_archive_that_is_empty_or_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(batches=0)
    stays, keep = Stays(nonfinite.weight), Checkpoint(dirpath=tmp_path / "c", every_n_train_steps=1)
    job(tmp_path, stays, archive, keep, NanGuard(back_to="archive"))
    assert same(stays.weights[4], stays.weights[1])
    assert "the archive holds no policy yet" in caplog.text
    with pytest.raises(UserError, match=r"add callbacks\.Fp8PolicyArchive"):
        job(tmp_path, NanGuard(back_to="archive"))


# ---------------------------------------------------------------------- limits and settings


def test_limits_of_ones_own() -> None:
    """Two in a row; or more than two among five: 1, 4 and 5 (by hand)."""
    guard = FiniteGuard()
    guard.limits = Limits(in_a_row=2, in_window=9, window=9)
    assert [guard.record(finite) for finite in (False, True, False, False)] == [False, False, False, True]
    guard = FiniteGuard()
    guard.limits = Limits(in_a_row=9, in_window=2, window=5)
    assert [guard.record(finite) for finite in (False, True, True, False, False)] == [*[False] * 4, True]
    guard = FiniteGuard()
    guard.limits = Limits(in_a_row=9, in_window=2, window=4)  # the first is too long ago then
    assert not any(guard.record(finite) for finite in (False, True, True, False, False))


def test_limits_reach_the_guard(tmp_path: Path) -> None:
    with pytest.raises(TrainingDivergedError, match=r"1 of 3 updates .* within 4 updates"):
        job(tmp_path, Stays(nonfinite.weight), NanGuard(limits={"in_a_row": 1, "window": 4}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limits": {"in_a_row": 0}}, "in_a_row is 0"),
        ({"limits": {"rows": 3}}, "no field rows"),
        ({"back_to": "start"}, "back_to is 'start'; it is checkpoint or archive"),
        ({"read_state_every": -1}, "read_state_every is -1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NanGuard(**settings)


def test_other_modules(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not for a Recorder; leave the callback out"):
        job(tmp_path, NanGuard(), module=Recorder())


def test_the_callback_changes_no_weight(tmp_path: Path) -> None:
    """Nor what is drawn: dropout after a batch that is left out draws as without it."""

    class Once(Stays):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, module, *args)
            if len(self.weights) == 3:
                self.undo()

        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: GroupBatch, batch_idx: int) -> None:
            if batch_idx == self.at:
                self.undo = self.put(module, batch)

    found = []
    for guard in ([], [NanGuard()]):
        torch.manual_seed(3)
        spoil = Once(nonfinite.whole_loss)
        policy = PolicyConfig(name="tiny", lora=LoRAConfig(r=4, dropout=0.2))
        job(tmp_path / str(len(guard)), spoil, *guard, module=SFT(policy=policy, optim=OPTIM))
        found.append((spoil.weights[-1], torch.rand(3)))
    assert same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# ---------------------------------------------------------------------- moments


def adam() -> torch.optim.AdamW:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def reads(watch: MomentWatch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    read = nonfinite_state

    def counted(optimizer: torch.optim.Optimizer) -> Any:
        seen.append(1)
        return read(optimizer)

    monkeypatch.setattr(alignment.moments, "nonfinite_state", counted)
    return seen


def test_moments_are_read_when_something_else_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, watch = adam(), MomentWatch()
    seen = reads(watch, monkeypatch)
    assert watch.fault(optimizer) == ""
    assert len(seen) == 1  # they were new
    for _ in range(3):
        optimizer.step()
        watch.stepped(optimizer)
        assert watch.fault(optimizer) == ""
    assert len(seen) == 1
    moment = next(iter(optimizer.state.values()))["exp_avg_sq"]
    with torch.no_grad():
        moment[0, 0] = math.inf
    assert watch.fault(optimizer) == "the optimizer's exp_avg_sq is not finite"
    assert watch.fault(optimizer) != ""  # and so it stays
    with torch.no_grad():
        moment[0, 0] = 1.0
    assert watch.fault(optimizer) == ""
    optimizer.load_state_dict(optimizer.state_dict())
    watch.forget()
    before = len(seen)
    assert watch.fault(optimizer) == ""
    assert len(seen) == before + 1


def test_moments_are_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no counter tells: written past it. Every second step finds it; without that, nothing does."""
    for every, expected in ((2, "the optimizer's exp_avg is not finite"), (0, "")):
        optimizer, watch = adam(), MomentWatch()
        watch.every = every
        assert watch.fault(optimizer) == ""
        for _ in range(2):
            watch.stepped(optimizer)
        moment = next(iter(optimizer.state.values()))["exp_avg"]
        moment.numpy()[0, 0] = math.nan
        assert watch.fault(optimizer) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moments_of_any_kind(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = torch.optim.SGD([p, nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.state[p] = {"momentum_buffer": torch.ones(2, dtype=dtype), "nothing": torch.ones(0), "count": 3}
    assert nonfinite_state(optimizer) is None
    optimizer.state[p]["momentum_buffer"][1] = -math.inf
    assert nonfinite_state(optimizer) == (0, "momentum_buffer")


# ---------------------------------------------------------------------- rewards


def test_a_reward_worker_that_returns_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Told once for the run, with reward and row; the completion abstains and every update is made."""
    values = "[float('nan') if i == 5 else float(len(c)) for i, c in enumerate(completions)]"
    broken = RewardSpec(reward="tests.reward_faults.Returns", args={"expression": values})
    module = online(GRPO, rewards={"broken": broken})
    guard = NanGuard()
    with caplog.at_level(logging.WARNING, logger="alignment.events"):
        fit(module, tmp_path, callbacks=[guard])
    lines = [r.getMessage() for r in caplog.records if "reward_no_number" in r.getMessage()]
    # Completion 5 of 4 prompts x 4 is the second one's second.
    assert lines == ["reward_no_number at step 0: reward broken gave NaN for row 1, completion 1; it abstains there"]
    assert module.nonfinite_steps == 0
    again = NanGuard()
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again._told == {("broken", "gave NaN")}


def test_which_reward_divided_by_zero(tmp_path: Path) -> None:
    """An estimator that divides by the deviation of a reward that is 1 for every completion of a prompt."""
    flat = RewardSpec(reward=lambda completion: 1.0, in_process=True)
    varied = RewardSpec(reward=lambda completion, completion_ids: float(len(completion_ids)), in_process=True)
    module = online(GRPO, rewards={"flat": flat, "varied": varied}, advantage="tests.unit.test_nan_guard.divided_by_0")
    fit(module, tmp_path, callbacks=[NanGuard()], max_epochs=1, limit_train_batches=1)
    facts = json.loads((tmp_path / "nonfinite" / "batch-0" / "rank0.json").read_text())["facts"]
    assert facts["blame"]["place"] == "advantage"
    assert "rewards with deviation 0 among its completions: flat (1)" in facts["text"]
    assert [row["row"] for row in facts["blame"]["rows"]] == [row for row in (0, 1) for _ in range(4)]


def divided_by_0(table: Any) -> Tensor:
    first = table.rewards[:, 0]
    return (first - first.mean()) / first.std()


# ---------------------------------------------------------------------- evaluation


class SometimesBlind(SFT):
    """Validations number 1 and 2 are not finite, the first in part, the second as a whole."""

    evaluations = -1

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.evaluations += 1

    def evaluation_metrics(self, batch: GroupBatch) -> Any:
        metrics = super().evaluation_metrics(batch)
        first = 0 in batch.group_index.tolist()
        total, count = metrics["loss"]
        # Better and better, but for the ones that are not finite, which would be the best.
        total = count * (1.0 - 0.1 * self.evaluations)
        if self.evaluations == 2 or (self.evaluations == 1 and first):
            total = total * NAN
        elif self.evaluations == 1:
            total = -100.0 * count
        return {"loss": (total, count)}


def test_evaluations_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are counted and told, stop nothing, and are never the best."""
    keep = Checkpoint(dirpath=tmp_path / "c", monitor="val/loss", mode="min", filename="{step}")
    early = EarlyStopping("val/loss", mode="min", patience=3)
    guard, module = NanGuard(), SometimesBlind(policy=TINY, optim=OPTIM, micro_batch_tokens=20)
    best: list[str] = []

    class Note(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            best.append(Path(keep.best_model_path).name)

    with caplog.at_level(logging.WARNING, logger="alignment.events"):
        job(
            tmp_path,
            early,
            keep,
            guard,
            Note(),
            module=module,
            max_epochs=4,
            limit_train_batches=1,
            limit_val_batches=1.0,
        )
    assert module.trainer.current_epoch == 4
    assert guard.evaluations == 2
    # The first epoch's state is the best until that of the fourth is.
    assert best == ["", "step=1.ckpt", "step=1.ckpt", "step=1.ckpt"]
    assert Path(keep.best_model_path).name == "step=4.ckpt"
    assert float(keep.best_model_score) == pytest.approx(0.7)
    told = [r.getMessage() for r in caplog.records if "nonfinite_evaluation" in r.getMessage()]
    assert len(told) == 2
    assert "val/loss" in told[0]
    assert "-100" in told[0]
    again = NanGuard()
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again.evaluations == 2


# ---------------------------------------------------------------------- where the reason is told


def test_dump_event_and_artifact(workdir: Path) -> None:
    logger = TrackingLogger()
    spoil = nonfinite.Spoil(PLACES["row weight"])
    run = nonfinite.trainer(workdir, [spoil, NanGuard()], logger=logger)
    run.fit(nonfinite.build("SFT", {}), torch.utils.data.DataLoader(nonfinite.batches("SFT"), batch_size=None))
    logger.finalize("success")
    dump = logger.run_dir / "nonfinite" / "batch-1"
    facts = json.loads((dump / "rank0.json").read_text())["facts"]
    text = "data: weights is nan in 1 of 4 completions; row 104 (completion 0)"
    assert facts["text"] == text
    assert facts["blame"]["rows"] == [{"row": 104, "completion": 0, "columns": {"source": "line 4"}}]
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    artifact = json.loads(Path(client.download_artifacts(logger.run_id, "nonfinite/batch-1/blame.json")).read_text())
    assert artifact["blame"] == facts["blame"]
    events = (logger.run_dir / "events.txt").read_text().splitlines()
    said = "nonfinite: update left out (loss nan, gradient norm nan)"
    assert events == [f"step 1  {said}: {text}; the batch is in {dump}"]
    marks = client.get_metric_history(logger.run_id, "event/nonfinite")
    assert [(mark.step, mark.value) for mark in marks] == [(1, 1.0)]


def test_without_computing_again(tmp_path: Path) -> None:
    """What is known without a pass: weights, the batch, gradients."""
    put = Place(put=nonfinite.one_gradient, blamed="", says="", quick=())
    run = nonfinite.trainer(tmp_path, [nonfinite.Spoil(put), NanGuard(rerun=False)])
    run.fit(nonfinite.build("SFT", {}), torch.utils.data.DataLoader(nonfinite.batches("SFT"), batch_size=None))
    facts = json.loads((tmp_path / "nonfinite" / "batch-1" / "rank0.json").read_text())["facts"]["blame"]
    assert facts["place"] == "gradient"
    assert "policy.model.layers.0.mlp.up_proj.weight" in facts["text"]


def test_what_does_not_come_back_is_told_as_such(tmp_path: Path) -> None:
    """A loss that was NaN once, for no reason that is left."""
    calls: list[int] = []

    def put(module: Any, batch: GroupBatch) -> nonfinite.Undo:
        def first(micro: GroupBatch) -> bool:
            calls.append(1)
            return len(calls) == 1

        return nonfinite._loss(module, first)

    run = nonfinite.trainer(tmp_path, [nonfinite.Spoil(Place(put=put, blamed="", says="", quick=())), NanGuard()])
    module = nonfinite.build("SFT", {"micro_batch_tokens": None})
    run.fit(module, torch.utils.data.DataLoader(nonfinite.batches("SFT"), batch_size=None))
    facts = json.loads((tmp_path / "nonfinite" / "batch-1" / "rank0.json").read_text())["facts"]["blame"]
    assert facts["place"] == "transient"
    assert "computed again the same batch gives finite numbers" in facts["text"]
    assert module.nonfinite_steps == 1
