"""Checkpoint folders: what they hold, that they are committed whole, and that a bad one is never loaded in silence."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import json
import logging
import os
import pickle
import shutil
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from alignment import checkpoint_folder
from alignment.checkpoint import CheckpointError, SafeCheckpointIO, load_module, point, resolve, verify
from alignment.checkpoint_folder import (
    MANIFEST,
    STATE,
    TENSORS,
    _seal,
    complete,
    load_checkpoint_folder,
    read_manifest,
    retire,
    write_checkpoint,
)
from alignment.codec import Encoder, decode


def state(step: int) -> dict[str, Any]:
    weight = torch.full((3, 2), float(step))
    return {"global_step": step, "epoch": 0, "state_dict": {"w": weight}, "hyper_parameters": {"beta": 0.1}}


def save(path: Path, step: int) -> Path:
    write_checkpoint(state(step), path)
    return path


def round_trip(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode({"v": value}), allow_nan=False)
    return decode(json.loads(text), encoder.tensors)["v"]


# ---------------------------------------------------------------------- codec


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Inner:
    size: int = 3


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)


PLAIN = [
    None, True, 0, -7, 10**30, "text", "", 0.1, -0.0, float("inf"), float("-inf"), [], {}, (), [1, [2]], (1, (2, "a")),
    {"a": {"b": 1}}, {1: "int key", (2, 3): "tuple key", None: 0}, {"$tuple": [1]}, {"$": 1}, {1, 2, 3}, {(1, "x")},
    frozenset({"a"}), b"\x00\xff", timedelta(days=1, seconds=2, microseconds=3), Path("a/b"), torch.float32,
    torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_with_their_type(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_negative_zero_and_nan_keep_their_bits():
    assert str(round_trip(-0.0)) == "-0.0"
    assert round_trip(float("nan")) != round_trip(float("nan"))


def test_numpy_scalars_and_arrays():
    back = round_trip({"f": np.float32(0.1), "i": np.int64(5), "nan": np.float64("nan"), "a": np.arange(6).reshape(2, 3)})
    assert type(back["f"]) is np.float32
    assert back["f"] == np.float32(0.1)
    assert type(back["i"]) is np.int64
    assert np.isnan(back["nan"])
    np.testing.assert_array_equal(back["a"], [[0, 1, 2], [3, 4, 5]])


def test_mappings_dataclasses_and_enums_become_plain():
    assert round_trip(OrderedDict(a=1)) == {"a": 1}
    assert round_trip(Outer()) == {"inner": {"size": 3}}
    assert round_trip(Colour.RED) == "red"


Point = namedtuple("Point", "x")  # noqa: PYI024
REFUSED = [object(), lambda: 0, Point(1), int, 1j, SimpleNamespace(a=1), np.array(["a"], dtype=object)]


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_unknown_objects_are_refused_with_their_place(value):
    with pytest.raises(TypeError, match="callbacks/Mine/2/deep"):
        Encoder().encode({"callbacks": {"Mine": [0, 1, {"deep": value}]}})


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensor, word, tmp_path):
    with pytest.raises(TypeError, match=rf"state_dict/odd.*{word}"):
        write_checkpoint({"state_dict": {"odd": tensor}}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ['{"$evil": 1}', '{"$tensor": "no"}', '{"$dtype": "Tensor"}', '{"$float": "1e5"}',
                                  '{"$tuple": 5}', '{"$dict": [1]}', '{"$numpy": ["object", 1]}', '{"$bytes": "?"}'])  # fmt: skip
def test_unknown_or_malformed_entries_do_not_decode(text):
    with pytest.raises(ValueError, match=r"."):
        decode(json.loads(text), {})


# ---------------------------------------------------------------------- tensors

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]


def test_tensors_of_every_kind_and_shape_come_back_bit_for_bit(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    tensors = {str(kind): base.to(kind) for kind in KINDS}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "expanded": torch.ones(1).expand(3),
    }
    write_checkpoint({"state_dict": tensors}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["state_dict"]
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        ours, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (back[name], tensor))
        assert torch.equal(ours, theirs), name


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    weight = torch.randn(100, 10)
    write_checkpoint({"state_dict": {"embed": weight, "head": weight, "row": weight[0]}}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["state_dict"]
    assert back["embed"] is back["head"]
    assert torch.equal(back["row"], weight[0])
    assert set(load_file(tmp_path / "a.ckpt" / TENSORS)) == {"state_dict/embed", "state_dict/row"}


def test_names_that_collide_keep_their_values(tmp_path):
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    write_checkpoint({"state_dict": value}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["state_dict"]
    assert (int(back["a/b"]), int(back["a"]["b"])) == (1, 2)


def test_manifest_says_what_the_checkpoint_is(tmp_path):
    manifest = verify(save(tmp_path / "a.ckpt", 5))
    assert (manifest["step"], manifest["world_size"]) == (5, 1)
    assert manifest["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in manifest["versions"]["torch"]
    other = {**state(5), "hyper_parameters": {"beta": 0.2}}
    write_checkpoint(other, tmp_path / "b.ckpt")
    assert verify(tmp_path / "b.ckpt")["config"] != manifest["config"]


# ---------------------------------------------------------------------- R2: death at every point of the save


class Dead(BaseException):
    """The process is gone: nothing after it runs, and what was not fsynced is damaged."""


class Mortal:
    """Counts the calls that touch the disk and dies at one of them. A file that was not fsynced by then loses its second
    half, as after a power cut."""

    NAMES = ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "fsync")

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, die_at: int) -> None:
        self.calls, self.die_at, self.root = 0, die_at, root
        self.unsynced: set[int] = set()
        self.log: list[str] = []
        for name in self.NAMES:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))
        opened = builtins.open

        def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "w" not in mode or not str(path).startswith(str(root)):
                return opened(path, mode, *args, **kwargs)
            self._tick(f"open {Path(path).name}")
            file = opened(path, mode, *args, **kwargs)
            self.unsynced.add(os.fstat(file.fileno()).st_ino)
            return file

        patch.setattr(builtins, "open", open_)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tick(name)
            result = real(*args, **kwargs)
            if name == "fsync":
                self.unsynced.discard(os.fstat(args[0]).st_ino)
            return result

        return call

    def _tick(self, what: str) -> None:
        self.calls += 1
        self.log.append(what)
        if self.calls >= self.die_at:
            raise Dead

    def power_cut(self) -> None:
        for path in self.root.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_ino in self.unsynced:
                os.truncate(path, path.stat().st_size // 2)


def _new_name(folder: Path) -> None:
    save(folder / "b.ckpt", 2)
    point(folder / "last.ckpt", folder / "b.ckpt")


def _same_name(folder: Path) -> None:
    save(folder / "a.ckpt", 2)


def _retiring(folder: Path) -> None:
    for step, name in enumerate("bcd", start=2):
        save(folder / f"{name}.ckpt", step)
        point(folder / "last.ckpt", folder / f"{name}.ckpt")
        retire(folder / f"{chr(ord(name) - 1)}.ckpt")


def _last_is_a_folder(folder: Path) -> None:
    save(folder / "last.ckpt", 2)
    save(folder / "b.ckpt", 3)
    point(folder / "last.ckpt", folder / "b.ckpt")


@pytest.mark.parametrize("scenario", [_new_name, _same_name, _retiring, _last_is_a_folder])
def test_death_at_every_call_leaves_a_checkpoint_to_resume_from(scenario, tmp_path, monkeypatch):
    # What is on the disk is modelled here, so nothing needs to wait for a real one.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    points, finished = 0, False
    while not finished:
        folder = tmp_path / str(points)
        save(folder / "a.ckpt", 1)
        point(folder / "last.ckpt", folder / "a.ckpt")
        with pytest.MonkeyPatch.context() as patch:
            mortal = Mortal(patch, folder, points + 1)
            try:
                scenario(folder)
                finished = True
            except Dead:
                points += 1
        mortal.power_cut()
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
    with pytest.MonkeyPatch.context() as patch:
        log = Mortal(patch, tmp_path, 10**9).log
        save(tmp_path / "a.ckpt", 1)
    done = ["mkdir", f"open {TENSORS}", "fsync", f"open {STATE}", "fsync", f"open {MANIFEST}", "fsync"]
    assert [entry for entry in log if entry != "unlink"] == [*done, "fsync", "rename", "fsync"]


# ---------------------------------------------------------------------- R3: damage


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(position: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(position * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return flip


def _missing(path: Path) -> None:
    path.unlink()


def _swap(path: Path) -> None:
    """The same file of another checkpoint, of the same size."""
    shutil.copy(path.parent.parent / "a.ckpt" / path.name, path)


DAMAGE = {"truncated": _truncate, "empty": _empty, "grown": _grow, "zeroed": _zero, "missing": _missing, "swapped": _swap}
DAMAGE |= {f"bit at {at}": _flip(at) for at in (0.0, 0.03, 0.2, 0.5, 0.8, 0.95, 1.0)}
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
        _flip(0.5)(two / f"{name}.ckpt" / TENSORS)
    with pytest.raises(CheckpointError, match="no good checkpoint beside it"):
        SafeCheckpointIO().load_checkpoint(two / "b.ckpt")


def test_a_checkpoint_of_another_configuration_is_no_substitute(tmp_path):
    write_checkpoint({**state(1), "hyper_parameters": {"beta": 0.9}}, tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt", 2)
    _flip(0.5)(tmp_path / "b.ckpt" / TENSORS)
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


@pytest.mark.parametrize("name", (TENSORS, STATE, MANIFEST))
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
    for action in (SafeCheckpointIO().load_checkpoint, lambda p: resolve(p, "."), lambda p: load_module(Small, p)):
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
    _flip(0.5)(tmp_path / "c.ckpt" / TENSORS)
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
    point(tmp_path / "last.ckpt", tmp_path / "c.ckpt")
    retire(tmp_path / "b.ckpt")
    assert names(tmp_path) == ["a.ckpt", "c.ckpt"]
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


def test_a_damaged_checkpoint_gives_no_module(two):
    _flip(0.5)(two / "b.ckpt" / TENSORS)
    with pytest.raises(CheckpointError, match="sha256"):
        load_module(Small, two / "b.ckpt")
