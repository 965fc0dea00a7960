"""Checkpoint folders: committed whole at every point, several in one folder, found by name, made into modules."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch

from alignment.checkpoint import CheckpointError, SafeCheckpointIO, load_module, point, resolve, verify
from alignment.checkpoint_folder import MANIFEST, STATE, TENSORS, complete, retire, write_checkpoint
from benchmarks.faults import SCENARIOS, Dead, Mortal, flip, last_is_a_folder, save, state

# ---------------------------------------------------------------------- R2: death at every point of the save


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_death_at_every_call_leaves_a_checkpoint_to_resume_from(scenario, tmp_path, monkeypatch):
    # Nothing needs to wait for a disk: what is on it is modelled.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    points, finished = 0, False
    while not finished:
        folder = tmp_path / str(points)
        save(folder / "a.ckpt", 1)
        point(folder / "last.ckpt", folder / "a.ckpt")
        with Mortal(folder, points + 1) as mortal:
            try:
                scenario(folder)
                finished = True
            except Dead:
                points += 1
        mortal.power_cut()
        # Only a folder of that name has to make room before the pointer can be there.
        assert scenario is last_is_a_folder or (folder / "last.ckpt").is_symlink()
        loaded = SafeCheckpointIO().load_checkpoint(resolve("last", folder))
        assert loaded["global_step"] >= 1
        assert torch.equal(loaded["state_dict"]["w"], torch.full((3, 2), float(loaded["global_step"])))
        # The run goes on: the next save works whatever is lying around.
        save(folder / "next.ckpt", 9)
        assert verify(folder / "next.ckpt")["step"] == 9
        assert not list(folder.glob(".*.tmp"))
        shutil.rmtree(folder)
    assert points >= 12


def test_every_file_is_on_the_disk_before_the_one_rename(tmp_path):
    with Mortal(tmp_path, 10**9) as mortal:
        save(tmp_path / "a.ckpt", 1)
    done = ["mkdir", f"open {TENSORS}", "fsync", f"open {STATE}", "fsync", f"open {MANIFEST}", "fsync"]
    assert [entry for entry in mortal.log if entry != "unlink"] == [*done, "fsync", "rename", "fsync"]


# ---------------------------------------------------------------------- several in one folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in complete(folder))


def test_two_stay_and_an_older_one_goes_once_the_newest_verifies(tmp_path):
    io = SafeCheckpointIO()
    for step, name in enumerate("abcd", start=1):
        io.save_checkpoint(state(step), tmp_path / f"{name}.ckpt")
        io.remove_checkpoint(tmp_path / f"{chr(ord(name) - 1)}.ckpt")
    assert names(tmp_path) == ["c.ckpt", "d.ckpt"]


def test_nothing_goes_while_the_newest_is_damaged(tmp_path, caplog):
    io = SafeCheckpointIO()
    for step, name in enumerate("abc", start=1):
        io.save_checkpoint(state(step), tmp_path / f"{name}.ckpt")
    flip(0.5)(tmp_path / "c.ckpt" / TENSORS)
    with caplog.at_level(logging.ERROR):
        io.remove_checkpoint(tmp_path / "a.ckpt")
    assert "older checkpoints are kept" in caplog.text
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "c.ckpt"]


def test_what_a_killed_run_retired_is_collected_by_the_next(tmp_path):
    save(tmp_path / "a.ckpt", 1)
    SafeCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]
    for step, name in enumerate("bc", start=2):
        save(tmp_path / f"{name}.ckpt", step)
    retire(tmp_path / "b.ckpt")
    assert names(tmp_path) == ["b.ckpt", "c.ckpt"]


def test_what_the_pointer_names_is_not_collected(tmp_path):
    for step, name in enumerate("abc", start=1):
        save(tmp_path / f"{name}.ckpt", step)
    point(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    retire(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "c.ckpt"]


def test_a_name_saved_again_is_no_longer_retired(tmp_path):
    for step, name in enumerate("abc", start=1):
        save(tmp_path / f"{name}.ckpt", step)
    point(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    retire(tmp_path / "a.ckpt")
    save(tmp_path / "a.ckpt", 7)
    point(tmp_path / "last.ckpt", save(tmp_path / "d.ckpt", 8))
    retire(tmp_path / "b.ckpt")
    assert names(tmp_path) == ["a.ckpt", "c.ckpt", "d.ckpt"]
    assert verify(tmp_path / "a.ckpt")["step"] == 7


def test_names(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        resolve("last", tmp_path)
    save(tmp_path / "a.ckpt", 1)
    path = str(tmp_path / "elsewhere" / "a.ckpt")
    mine = {**state(2), "callbacks": {"ModelCheckpoint": {"best_model_path": path}}}
    write_checkpoint(mine, tmp_path / "b.ckpt")
    assert resolve("last", tmp_path) == tmp_path / "b.ckpt"
    assert resolve("best", tmp_path) == tmp_path / "a.ckpt"
    point(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    assert resolve("last", tmp_path).resolve() == (tmp_path / "a.ckpt").resolve()
    assert resolve(tmp_path / "x", tmp_path) == tmp_path / "x"


# ---------------------------------------------------------------------- modules


class Small(L.LightningModule):
    def __init__(self, size: int = 2, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(size, 1)
        self.beta = beta


def test_a_module_is_rebuilt_with_overrides(tmp_path):
    module = Small(size=3, beta=0.5)
    saved = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    write_checkpoint(saved, tmp_path / "a.ckpt")
    back = load_module(Small, tmp_path / "a.ckpt", beta=0.9)
    assert back.beta == 0.9
    assert torch.equal(back.layer.weight, module.layer.weight)
    with pytest.raises(ValueError, match="no parameter gamma"):
        load_module(Small, tmp_path / "a.ckpt", gamma=1)


def test_a_checkpoint_cannot_choose_the_class_or_what_is_called(tmp_path):
    hyper_parameters = {"size": 2, "_instantiator": "os.system", "_class_path": "antigravity.Evil"}
    write_checkpoint({"state_dict": {}, "hyper_parameters": hyper_parameters}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"antigravity\.Evil, not of a Small"):
        load_module(Small, tmp_path / "a.ckpt")


def test_a_damaged_checkpoint_gives_no_module_and_no_other(tmp_path):
    save(tmp_path / "a.ckpt", 1)
    flip(0.5)(save(tmp_path / "b.ckpt", 2) / TENSORS)
    with pytest.raises(CheckpointError, match="sha256"):
        load_module(Small, tmp_path / "b.ckpt")
