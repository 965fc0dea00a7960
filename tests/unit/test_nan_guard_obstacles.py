"""What is in the way of NanGuard and of going back: damaged files, a full disk, a rank that lacks something, a search
that fails, and numbers that are finite and do harm all the same."""

from __future__ import annotations

import decimal
import json
import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import alignment.blame
import alignment.guard
from alignment import distributed
from alignment.batches import GroupBatch
from alignment.guard import TrainingDivergedError
from alignment.moments import nonfinite_state
from alignment.rewards.calls import fault
from benchmarks import nonfinite
from benchmarks.nonfinite import NAN, Place
from callbacks import Checkpoint, NanGuard
from modules import GRPO
from tests.rl_toys import fit, here, online
from tests.unit.test_nan_guard import Archive, Stays, job, same

# ---------------------------------------------------------------------- going back


def test_an_archive_whose_newest_policy_one_rank_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose own weights were damaged kept none at that step: all go back to the newest that every rank has."""
    stays, archive, gather = Stays(nonfinite.weight), Archive(), distributed.gather_from_processes

    def of_two(value: Any) -> list[Any]:
        return [value, value[:-1]] if value == ("step-1", "step-2") else gather(value)

    monkeypatch.setattr(distributed, "gather_from_processes", of_two)
    job(tmp_path, stays, archive, NanGuard(back_to="archive"))
    assert same(stays.weights[4], archive.archive.kept["step-1"])


def test_damaged_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where none is left the run ends for its numbers, with the batch, and not for a file."""

    class Damage(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: GroupBatch, batch_idx: int) -> None:
            if batch_idx == 4:
                for file in (tmp_path / "c").rglob("tensors.safetensors"):
                    file.write_bytes(b"")

    keep = Checkpoint(dirpath=tmp_path / "c", every_n_train_steps=1)
    with pytest.raises(TrainingDivergedError, match=r"3 of 5 updates .* the batch is in .*batch-4; weight: "):
        job(tmp_path, Stays(nonfinite.weight), keep, Damage(), NanGuard())
    assert "the run cannot go back to checkpoint" in caplog.text


# ---------------------------------------------------------------------- what is in the way of the reason


def spoilt(put: Any, folder: Path, algorithm: str = "SFT", **settings: Any) -> tuple[Any, dict[str, Any]]:
    """(the module after a run whose second batch meets this, what was found out)."""
    spoil = nonfinite.Spoil(Place(put=put, blamed="", says="", quick=()))
    run, module = nonfinite.trainer(folder, [spoil, NanGuard()]), nonfinite.build(algorithm, settings)
    run.fit(module, torch.utils.data.DataLoader(nonfinite.batches(algorithm), batch_size=None))
    file = folder / "nonfinite" / "batch-1" / "rank0.json"
    return module, json.loads(file.read_text(), parse_constant=pytest.fail)["facts"] if file.exists() else {}


def test_a_gradient_whose_square_overflows(tmp_path: Path) -> None:
    """Each value and, where it is summed in double precision, the norm are finite; the second moment would not be."""

    def large(module: Any, batch: GroupBatch) -> Any:
        weight = nonfinite.parameter(module, "0.mlp.up_proj.weight")
        return weight.register_hook(lambda gradient: torch.full_like(gradient, 1e30)).remove

    module, facts = spoilt(large, tmp_path, micro_batch_tokens=None)
    assert module.nonfinite_steps == 1
    assert nonfinite_state(module.trainer.optimizers[0]) is None
    assert facts["blame"]["place"] == "gradient"
    assert "the largest is 1e+30, of policy.model.layers.0.mlp.up_proj.weight" in facts["text"]


def test_a_setting_of_the_optimizer(tmp_path: Path) -> None:
    """A decay of NaN would make a NaN of every weight, from a gradient that is finite."""

    def decay(module: Any, batch: GroupBatch) -> Any:
        group = module.trainer.optimizers[0].param_groups[0]
        before, group["weight_decay"] = group["weight_decay"], NAN
        return lambda: group.update(weight_decay=before)

    module, facts = spoilt(decay, tmp_path)
    assert module.nonfinite_steps == 1
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert facts["text"] == "setting: weight_decay is nan"


def test_the_dump_is_json_for_every_reader(tmp_path: Path) -> None:
    """`spoilt` fails for a NaN in it."""
    _, facts = spoilt(nonfinite.whole_loss, tmp_path)
    assert facts["loss"] == "nan"


def test_a_search_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks would wait for this one. What was known by then is told."""

    def fails(module: Any) -> Any:
        raise KeyError("beta")

    monkeypatch.setattr(alignment.blame, "_settings", fails)
    module, facts = spoilt(nonfinite.learning_rate, tmp_path)
    assert module.nonfinite_steps == 1
    assert facts["blame"]["place"] == "learning rate"
    assert "transient: the search ended with KeyError: 'beta'" in facts["blame"]["chain"]["0"]


def test_a_loss_that_does_not_take_a_prompt_alone(tmp_path: Path) -> None:
    """The layer is named, and no row."""

    def put(module: Any, batch: GroupBatch) -> Any:
        loss, undo = module.loss, nonfinite.layer(module, batch)

        def together(micro: GroupBatch, counts: Any) -> Any:
            assert micro.num_prompts > 1, "it compares prompts"
            return loss(micro, counts)

        module.loss = together

        def undo_both() -> None:
            del module.loss
            undo()

        return undo_both

    module, facts = spoilt(put, tmp_path, micro_batch_tokens=None)
    assert module.nonfinite_steps == 1
    assert facts["blame"]["place"] == "layer"
    assert "1.self_attn.o_proj" in facts["text"]
    assert facts["blame"]["rows"] == []


def test_a_disk_that_takes_no_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(alignment.guard, "save_file", full)
    module, facts = spoilt(nonfinite.whole_loss, tmp_path)
    assert (module.nonfinite_steps, facts) == (1, {})
    assert list((tmp_path / "nonfinite" / "batch-1").iterdir()) == []
    assert "No space left on device" in caplog.text


# ---------------------------------------------------------------------- rewards


def raised(code: str) -> BaseException:
    try:
        eval(code, {"D": decimal.Decimal})
    except ArithmeticError as error:
        return error
    raise AssertionError(f"{code} raises nothing")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (raised("1 / 0"), True),
        (raised("D(1) / D(0)"), True),
        (raised("D(0) / D(0)"), True),
        (FloatingPointError("divide by zero encountered in divide"), True),
        (RuntimeError("scorer: division by zero"), True),
        (ValueError("no answer"), False),
    ],
)
def test_divisions_by_zero_of_every_kind_are_told(error: BaseException, told: bool) -> None:
    assert fault(error).no_number is told


def test_a_reward_that_fails_everywhere_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """48 completions of the one, of which each is counted, and one of the other, whose row is named."""

    def nowhere(completions: list[str]) -> list[float]:
        return [NAN] * len(completions)

    def once(completions: list[str]) -> list[float]:
        return [math.inf if i == 40 else float(i) for i in range(len(completions))]

    rewards = {"nowhere": here(nowhere), "once": here(once)}
    module = online(GRPO, rewards=rewards, completions=12)
    with caplog.at_level(logging.WARNING, logger="alignment.events"):
        fit(module, tmp_path, callbacks=[NanGuard()], limit_train_batches=1)
    lines = [r.getMessage() for r in caplog.records if "reward_no_number" in r.getMessage()]
    # Completion 40 of 4 prompts x 12 is the fourth one's fifth.
    assert lines == [
        "reward_no_number at step 0: reward nowhere gave NaN for row 0, completion 0 and 47 others; it abstains there",
        "reward_no_number at step 0: reward once gave inf, beyond float32 for row 3, completion 4; it abstains there",
    ]
