"""Checkpoints that are damaged, forged, or refused by the disk: never loaded in silence, never executed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from alignment import checkpoint_folder
from alignment.checkpoint import CheckpointError, SafeCheckpointIO, load_module, resolve, verify
from alignment.checkpoint_folder import (
    MANIFEST,
    STATE,
    TENSORS,
    _seal,
    load_checkpoint_folder,
    read_manifest,
    write_checkpoint,
)
from benchmarks.faults import DAMAGE, flip, save, state

# ---------------------------------------------------------------------- R3: damage


VARIANTS = [(name, file) for name in DAMAGE for file in (TENSORS, STATE, MANIFEST)]


def _mixed(folder: Path) -> None:
    for name in (TENSORS, STATE):
        shutil.copy(folder / "a.ckpt" / name, folder / "b.ckpt" / name)


def _foreign_file(folder: Path) -> None:
    (folder / "b.ckpt" / "extra.bin").write_bytes(b"x")


def _half_written(folder: Path) -> None:
    shutil.rmtree(folder / "b.ckpt")
    (folder / "b.ckpt").mkdir()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    save(tmp_path / "a.ckpt", 1)
    save(tmp_path / "b.ckpt", 2)
    return tmp_path


def _assert_noticed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_folder(folder / "b.ckpt")
    assert "\n" not in str(error.value)
    assert str(folder / "b.ckpt") in str(error.value)
    with caplog.at_level(logging.ERROR):
        loaded = SafeCheckpointIO().load_checkpoint(folder / "b.ckpt")
    assert loaded["global_step"] == 1
    assert f"FALLING BACK to {folder / 'a.ckpt'} (step 1)" in caplog.text
    with pytest.raises(CheckpointError):
        SafeCheckpointIO(fallback=False).load_checkpoint(folder / "b.ckpt")


@pytest.mark.parametrize(("damage", "file"), VARIANTS)
def test_a_damaged_file_is_noticed_and_the_older_checkpoint_taken(damage, file, two, caplog):
    DAMAGE[damage](two / "b.ckpt" / file)
    _assert_noticed(two, caplog)


@pytest.mark.parametrize("damage", [_mixed, _foreign_file, _half_written])
def test_a_folder_that_is_not_one_whole_checkpoint_is_noticed(damage, two, caplog):
    damage(two)
    _assert_noticed(two, caplog)


def test_damage_everywhere_is_an_error(two):
    for name in ("a", "b"):
        flip(0.5)(two / f"{name}.ckpt" / TENSORS)
    with pytest.raises(CheckpointError, match="no good checkpoint beside it"):
        SafeCheckpointIO().load_checkpoint(two / "b.ckpt")


def test_a_checkpoint_of_another_configuration_is_no_substitute(tmp_path):
    write_checkpoint({**state(1), "hyper_parameters": {"beta": 0.9}}, tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt", 2)
    flip(0.5)(tmp_path / "b.ckpt" / TENSORS)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")


def test_a_name_nobody_used_is_an_error_not_a_substitute(two):
    with pytest.raises(CheckpointError, match=r"typo\.ckpt is missing"):
        SafeCheckpointIO().load_checkpoint(two / "typo.ckpt")


# ---------------------------------------------------------------------- R4: malice


class Gadget:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _forge(path: Path, **files: bytes) -> None:
    """Replace files and seal a manifest that fits them, as an attacker would."""
    names = {"tensors": TENSORS, "state": STATE}
    for name, data in files.items():
        (path / names[name]).write_bytes(data)
    body = json.loads((path / MANIFEST).read_bytes())
    body.pop("sha256")
    for name in names.values():
        size, digest = checkpoint_folder._write_file(path / name, (path / name).read_bytes())
        body["files"][name] = {"size": size, "sha256": digest}
    (path / MANIFEST).write_bytes(_seal(body))


HEADER = 10**15
FORGED = {
    "pickled tensors": lambda mark: {"tensors": pickle.dumps(Gadget(mark))},
    "pickled state": lambda mark: {"state": pickle.dumps(Gadget(mark))},
    "header longer than the file": lambda _: {"tensors": HEADER.to_bytes(8, "little") + b"{}"},
    "header is not JSON": lambda _: {"tensors": (8).to_bytes(8, "little") + b"notjson!"},
    "offsets beyond the file": lambda _: {"tensors": _header({"w": [0, 4 * 10**9]})},
    "overlapping offsets": lambda _: {"tensors": _header({"w": [0, 4], "v": [0, 4]}) + bytes(4)},
    "deep nesting": lambda _: {"state": b"[" * 100_000 + b"]" * 100_000},
    "state is a list": lambda _: {"state": b"[]"},
    "unknown tag": lambda _: {"state": b'{"a": {"$python": "os.system"}}'},
    "tensor of no name": lambda _: {"state": b'{"a": {"$tensor": "../../x"}}'},
}


def _header(offsets: dict[str, list[int]]) -> bytes:
    text = json.dumps({k: {"dtype": "F32", "shape": [1], "data_offsets": v} for k, v in offsets.items()}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_with_a_fitting_manifest_are_one_line_errors(name, tmp_path):
    path, mark = save(tmp_path / "a.ckpt", 1), tmp_path / "executed"
    _forge(path, **FORGED[name](mark))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_folder(path)
    assert "\n" not in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_a_link_in_place_of_a_file_is_refused(name, two):
    file = two / "b.ckpt" / name
    outside = two / name
    shutil.move(file, outside)
    file.symlink_to(outside)
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(two / "b.ckpt")


@pytest.mark.parametrize("target", ["../elsewhere", "/etc", "."])
def test_a_pointer_that_leaves_its_folder_is_refused(target, tmp_path):
    (tmp_path / "last.ckpt").symlink_to(target)
    with pytest.raises(CheckpointError, match="is a link to"):
        verify(tmp_path / "last.ckpt")


@pytest.mark.parametrize("names", [[TENSORS, STATE, "../../x"], [TENSORS, "/etc/passwd"], [TENSORS]])
def test_a_manifest_that_names_other_files_is_refused(names, tmp_path):
    path = save(tmp_path / "a.ckpt", 1)
    body = read_manifest(path)
    body["files"] = {name: {"size": 1, "sha256": ""} for name in names}
    (path / MANIFEST).write_bytes(_seal(body))
    with pytest.raises(CheckpointError, match="damaged or of another format"):
        verify(path)


def test_a_huge_manifest_is_not_read(tmp_path):
    path = save(tmp_path / "a.ckpt", 1)
    (path / MANIFEST).write_bytes(b" " * (2 << 20))
    with pytest.raises(CheckpointError, match="larger than"):
        verify(path)


def test_a_pickled_lightning_checkpoint_is_refused_unread(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Gadget(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("url", ["http://x/a.ckpt", "https://x/a.ckpt", "s3://x/a.ckpt"])
def test_remote_paths_are_refused(url):
    actions = [
        SafeCheckpointIO().load_checkpoint,
        lambda p: resolve(p, "."),
        lambda p: load_module(L.LightningModule, p),
    ]
    for action in actions:
        with pytest.raises(CheckpointError, match="not a local folder"):
            action(url)


def test_remote_code_cannot_be_turned_on_by_a_checkpoint(tmp_path):
    hyper_parameters = {"policy": {"name": "x", "trust_remote_code": True}, "list": [{"trust_remote_code": True}]}
    write_checkpoint({"hyper_parameters": hyper_parameters, "state_dict": {}}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["hyper_parameters"]
    assert back["policy"]["trust_remote_code"] is False
    assert back["list"][0]["trust_remote_code"] is False


# ---------------------------------------------------------------------- R5: a disk that does not take it


@contextmanager
def failing(name: str, error: OSError) -> Iterator[None]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


DISK = [
    ("fsync", OSError(28, "No space left on device")),
    ("fsync", OSError(5, "Input/output error")),
    ("mkdir", OSError(30, "Read-only file system")),
    ("mkdir", OSError(13, "Permission denied")),
    ("rename", OSError(30, "Read-only file system")),
    ("rename", OSError(116, "Stale file handle")),
]


@pytest.mark.parametrize(("call", "error"), DISK)
def test_one_failed_save_is_survived_and_leaves_the_last_good_one(call, error, tmp_path, caplog):
    io = SafeCheckpointIO()
    io.save_checkpoint(state(1), tmp_path / "a.ckpt")
    with failing(call, error), caplog.at_level(logging.ERROR):
        io.save_checkpoint(state(2), tmp_path / "b.ckpt")
    assert io.failed_saves == 1
    assert str(tmp_path / "b.ckpt") in caplog.text
    assert error.strerror in caplog.text
    assert "bytes" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    assert io.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1
    io.save_checkpoint(state(3), tmp_path / "c.ckpt")
    assert io.failed_saves == 0


def test_two_failed_saves_in_a_row_stop_the_run(tmp_path):
    io = SafeCheckpointIO()
    with failing("fsync", OSError(28, "No space left on device")):
        io.save_checkpoint(state(1), tmp_path / "a.ckpt")
        with pytest.raises(CheckpointError, match="No space left"):
            io.save_checkpoint(state(2), tmp_path / "b.ckpt")


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with caplog.at_level(logging.ERROR):
        SafeCheckpointIO().save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert f"{tmp_path / 'a.ckpt'} not written: it needs" in caplog.text
    assert "1,000 free" in caplog.text
    assert list(tmp_path.iterdir()) == []
