"""Runs made to show a fault, and healthy ones: what the doctor says of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from alignment.optim import OptimConfig
from alignment.rollout import SamplingConfig
from benchmarks.doctor import RUNS
from callbacks import Doctor
from modules import DPO, GRPO, PPO, SFT
from tests.doctor_toys import DATA, alarms, recorded
from tests.rl_toys import fit, here, online, prompts
from tests.toys import TINY, FixedData, groups


def seen(
    module: Any, folder: Path, batches: int, data: L.LightningDataModule | None = None, *more: L.Callback
) -> set[str]:
    """Names of the rules that gave an alarm in a run of so many batches."""
    doctor = Doctor(every=5)
    fit(module, folder, data or FixedData(prompts(4), batch_size=4), callbacks=[doctor, *more], max_epochs=batches)
    return {alarm.rule for alarm in doctor.examination.alarms}


def steps(lr: float) -> OptimConfig:
    return OptimConfig(lr=lr, schedule="constant")


def any_number(completion: str, completion_ids: list[int]) -> float:
    """A number that says nothing of the completion."""
    return float(sum(i * i * 7919 for i in completion_ids) % 101) / 100


def test_a_constant_reward_and_groups_without_a_signal(tmp_path: Path) -> None:
    module = online(GRPO, rewards={"same": here(lambda completion: 0.5)})
    assert seen(module, tmp_path, 12) == {"constant_reward", "dead_groups"}


def test_completions_that_never_end(tmp_path: Path) -> None:
    module = online(GRPO, sampling=SamplingConfig(max_tokens=6, stop_ids=[2]))
    assert "truncation" in seen(module, tmp_path, 12)


def test_steps_that_are_too_small(tmp_path: Path) -> None:
    module = online(GRPO, optim=steps(1e-12), kl={"measure": True})
    assert seen(module, tmp_path, 35) == {"over_conservative"}
    pairs = FixedData(groups(4, 2), batch_size=4)
    assert seen(DPO(policy=TINY, optim=steps(1e-12)), tmp_path, 35, pairs) == {"over_conservative_pairs"}


def test_steps_that_are_too_large(tmp_path: Path) -> None:
    """For nothing: the reward says nothing of a completion."""
    module = online(GRPO, rewards={"any": here(any_number)}, optim=steps(0.03), kl={"measure": True})
    assert "kl_runaway" in seen(module, tmp_path, 30)


def test_too_many_updates_of_a_rollout(tmp_path: Path) -> None:
    module = online(PPO, optim=steps(0.05), value_coefficient=10.0, value_clip=None)
    assert "clip_saturation" in seen(module, tmp_path, 30)


def test_returns_that_run_away_from_the_critic(tmp_path: Path) -> None:
    calls = []

    def grows(completion: str, completion_ids: list[int]) -> float:
        calls.append(1)
        return any_number(completion, completion_ids) * len(calls)

    module = online(PPO, rewards={"grows": here(grows)})
    assert "critic_divergence" in seen(module, tmp_path, 30)


def test_a_loss_that_pays_for_length(tmp_path: Path) -> None:
    module = online(
        GRPO, rewards={"any": here(any_number)}, advantage="tests.doctor_toys.longer", optim=steps(0.01), completions=8
    )
    assert "length_drift" in seen(module, tmp_path, 40)


class Jolt(L.Callback):
    """One batch meets weights that are far off."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.at:
            with torch.no_grad():
                module.policy.get_output_embeddings().weight.mul_(1000.0)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.current_epoch == self.at:
            with torch.no_grad():
                module.policy.get_output_embeddings().weight.div_(1000.0)


def test_a_batch_that_breaks_the_loss(tmp_path: Path) -> None:
    data = FixedData(groups(4, 1), batch_size=4)
    assert seen(SFT(policy=TINY, optim=steps(1e-4)), tmp_path, 30, data, Jolt(26)) == {"loss_spike"}


class Slow(FixedData):
    """Every batch is long in coming."""

    class Rows(list):  # type: ignore[type-arg]
        def __getitem__(self, i: Any) -> Any:
            time.sleep(0.15)
            return super().__getitem__(i)

    def _loader(self, split: str) -> DataLoader[Any]:
        parts: Sequence[Any] = super()._loader(split).dataset  # type: ignore[assignment]
        return DataLoader(self.Rows(parts), batch_size=None)  # type: ignore[arg-type]


def test_training_that_waits_for_its_data(tmp_path: Path) -> None:
    doctor = Doctor(every=5)
    module = SFT(policy=TINY, optim=steps(1e-4))
    fit(module, tmp_path, Slow(groups(28, 1), batch_size=2), callbacks=[doctor])
    (alarm,) = doctor.examination.alarms
    assert alarm.rule == "data_bound"
    assert "data.num_workers" in alarm.line()


# ---------------------------------------------------------------------- runs of models that can speak


def test_reward_hacking_by_a_lexicon_of_sentiment() -> None:
    """GRPO of the TinyStories model on sentiment alone: it ends as "friend friend friend"."""
    found = alarms(recorded("hacked_sentiment"), every=5)
    assert {"reward_hacking", "repetition", "entropy_collapse", "kl_runaway"} <= found


HEALTHY = sorted(path.stem for path in DATA.glob("healthy_*.json"))


def test_the_runs_are_those_that_a_command_makes() -> None:
    """Three healthy ones, of different algorithms, among them."""
    assert len(HEALTHY) >= 3
    files = {path.stem: json.loads(path.read_text()) for path in DATA.glob("h*.json")}
    assert set(files) == set(RUNS)
    for name, found in files.items():
        assert found["command"] == f"python -m benchmarks.doctor --data FOLDER {name}"
        assert len(found["rows"]) >= 30


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_on_a_healthy_run(name: str, every: int) -> None:
    """However often one looks: not at any moment of it."""
    assert alarms(recorded(name), every=every) == set()
