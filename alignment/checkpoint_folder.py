"""One checkpoint is one folder, committed by one rename. This file writes, verifies, reads and retires such folders.

    manifest.json         size and sha256 of the other files, step, config hash, versions, world size; written last
    state.json            everything that is not a tensor, as typed JSON (see `alignment.codec`)
    tensors.safetensors   every tensor
    shard-*.safetensors   of a sharded run, what each rank holds of tensors that are spread (`alignment.spread_file`)

Commit: a hidden folder beside the final place, every file fsynced, the manifest last, one rename, fsync of the parent.
A process that dies at any point leaves either the old state or the new one, never half of one under a final name.
Replacing a folder moves the old one to `.NAME.previous` first and deletes it once the new one verifies.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alignment import distributed, spread_file, tensor_file
from alignment.codec import Encoder, decode
from alignment.errors import UserError
from alignment.whole_file import sync

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
_FORMAT = 1
_MAX_MANIFEST = 1 << 20
_SPARE_BYTES = 1 << 20
_KEPT = 2
_PACKAGES = ("torch", "lightning", "transformers")


class CheckpointError(UserError):
    """A checkpoint that cannot be written or must not be loaded. The message is one line and names the folder."""


# ---------------------------------------------------------------------- writing


def write_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write `state` as the folder `path`, replacing what is there.

    Raises TypeError for a state that cannot be expressed (naming the entry) and CheckpointError when the disk does not
    take it (naming path and bytes); whatever was loadable before still is.
    """
    encoder = Encoder()
    text = json.dumps(encoder.encode(state), allow_nan=False, separators=(",", ":")).encode()
    head, _ = tensor_file.header(encoder.tensors)
    need = len(text) + len(head) + sum(t.numel() * t.element_size() for t in encoder.tensors.values()) + _SPARE_BYTES
    temporary = _hidden(path, "tmp")
    try:
        _make_folder(path.parent)
        _remove_leftovers(path.parent)
        free = shutil.disk_usage(path.parent).free
        if free < need:
            raise CheckpointError(f"checkpoint {path} not written: it needs {need:,} bytes, the disk has {free:,} free")
        os.mkdir(temporary)
        files = {
            TENSORS: tensor_file.write_tensors(temporary / TENSORS, encoder.tensors),
            STATE: _write_file(temporary / STATE, text),
        }
        _write_file(temporary / MANIFEST, _manifest(state, files))
        sync(temporary)
        _commit(temporary, path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint {path} not written ({need:,} bytes): {error.strerror or error}") from error


def write_together(state: dict[str, Any], path: Path) -> None:
    """`write_checkpoint` of a state with tensors that are spread over ranks, into a folder that all of them see. A
    collective, which raises the same error on every rank: CheckpointError when any rank cannot write its part."""
    encoder = Encoder(spread=True)
    text = json.dumps(encoder.encode(state), allow_nan=False, separators=(",", ":")).encode()
    first = distributed.process() == 0
    names: Any = distributed.gather_from_processes(encoder.names if first else None)[0]
    parts = spread_file.parts_of({name: encoder.parts[name] for name in names})
    tensors = encoder.tensors if first else {}
    own = len(text) + sum(t.numel() * t.element_size() for t in (*parts.values(), *tensors.values())) + _SPARE_BYTES
    need = sum(int(n) for n in distributed.gather_from_processes(own))  # type: ignore[call-overload]
    temporary = _hidden(path, "tmp")
    mine = spread_file.file_name(distributed.process(), distributed.processes())
    files: dict[str, tuple[int, str]] = {}

    def begin() -> None:
        _make_folder(path.parent)
        _remove_leftovers(path.parent)
        free = shutil.disk_usage(path.parent).free
        if free < need:
            raise CheckpointError(f"checkpoint {path} not written: it needs {need:,} bytes, the disk has {free:,} free")
        os.mkdir(temporary)

    def end() -> None:
        files[TENSORS] = tensor_file.write_tensors(temporary / TENSORS, tensors)
        files[STATE] = _write_file(temporary / STATE, text)
        _write_file(temporary / MANIFEST, _manifest(state, files))
        sync(temporary)
        _commit(temporary, path)

    try:
        _everywhere(begin if first else None, path, need)
        wrote = _everywhere(lambda: (mine, tensor_file.write_tensors(temporary / mine, parts)), path, need)
        files |= dict(wrote)
        _everywhere(end if first else None, path, need)
    except CheckpointError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _everywhere(act: Callable[[], Any] | None, path: Path, need: int) -> list[Any]:
    """What `act` returns on each rank, on all of them. An error of the disk on one is raised on every one."""
    result, message = None, ""
    try:
        result = act() if act is not None else None
    except CheckpointError as error:
        message = str(error)
    except OSError as error:
        message = f"checkpoint {path} not written ({need:,} bytes): {error.strerror or error}"
    found: list[Any] = distributed.gather_from_processes((result, message))
    if failed := [text for _, text in found if text]:
        raise CheckpointError(failed[0])
    return [result for result, _ in found]


def _manifest(state: dict[str, Any], files: dict[str, tuple[int, str]]) -> bytes:
    config = [state.get(key) for key in ("hyper_parameters", "datamodule_hyper_parameters")]
    config_text = json.dumps(Encoder().encode(config), sort_keys=True)
    body = {
        "format": _FORMAT,
        "step": int(state.get("global_step", 0)),
        "epoch": int(state.get("epoch", 0)),
        "created": time.time_ns(),
        "config": hashlib.sha256(config_text.encode()).hexdigest(),
        "world_size": distributed.processes(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "files": {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()},
    }
    return _seal(body)


def _seal(body: dict[str, Any]) -> bytes:
    """The manifest's bytes, its own digest included: any changed byte shows."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1).encode()


def _commit(temporary: Path, path: Path) -> None:
    previous = _hidden(path, "previous")
    # A retirement mark of an older checkpoint of this name must not outlive it.
    _hidden(path, "retired").unlink(missing_ok=True)
    if os.path.lexists(path):
        _remove(previous)
        os.rename(path, previous)
    os.rename(temporary, path)
    sync(path.parent)
    if os.path.lexists(previous):
        verify(path)
        _remove(previous)


def _write_file(path: Path, data: bytes) -> tuple[int, str]:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data), hashlib.sha256(data).hexdigest()


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def _hidden(path: Path, role: str) -> Path:
    """A checkpoint's hidden sibling: being written (`tmp`), replaced (`previous`), its retirement mark (`retired`)."""
    return path.parent / f".{path.name}.{role}"


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed saves left half-written. One run owns one folder of checkpoints: nobody else writes here."""
    for path in folder.glob(".*.tmp"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to its sibling `target`, atomically. A real folder at `link` is moved aside
    first and removed afterwards."""
    temporary, previous = _hidden(link, "tmp"), _hidden(link, "previous")
    _remove(temporary)
    os.symlink(target.name, temporary)
    if link.is_dir() and not link.is_symlink():
        _remove(previous)
        os.rename(link, previous)
    os.replace(temporary, link)
    sync(link.parent)
    _remove(previous)


# ---------------------------------------------------------------------- verifying and reading


def follow(path: Path) -> Path:
    """The folder a pointer names. A pointer may only name a sibling; anything else is refused."""
    if not path.is_symlink():
        return path
    target = os.readlink(path)
    if target != os.path.basename(target) or target in ("", ".", ".."):
        raise CheckpointError(f"checkpoint {path} is a link to {target}, not to a sibling; give the real folder")
    followed = path.parent / target
    if followed.is_symlink():
        raise CheckpointError(f"checkpoint {path} is a link to a link; give the real folder")
    return followed


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest after checking its own digest and the folder's shape, without hashing the files."""
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} is {'a file, not a folder' if path.exists() else 'missing'}")
    names = sorted(entry.name for entry in os.scandir(path))
    if sorted(n for n in names if not spread_file.FILE.fullmatch(n)) != sorted((MANIFEST, STATE, TENSORS)):
        raise CheckpointError(f"checkpoint {path} must hold {MANIFEST}, {STATE} and {TENSORS} only, not {names}")
    for name in names:
        if not stat.S_ISREG(os.lstat(path / name).st_mode):
            raise CheckpointError(f"checkpoint {path}: {name} is not a regular file")
    if file.stat().st_size > _MAX_MANIFEST:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is larger than {_MAX_MANIFEST:,} bytes")
    raw = file.read_bytes()
    try:
        body = json.loads(raw)
        body.pop("sha256")
        sealed = _seal(body)
        listed = {name for name in body["files"] if not spread_file.FILE.fullmatch(name)}
        well_formed = body["format"] == _FORMAT and listed == {STATE, TENSORS}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged") from error
    if raw != sealed or not well_formed:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged or of another format")
    if {*body["files"], MANIFEST} != set(names):
        raise CheckpointError(f"checkpoint {path} must hold {sorted({*body['files'], MANIFEST})} only, not {names}")
    return dict(body)


def verify(path: Path | str, *, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Check the size and sha256 of every file. Returns the manifest; raises CheckpointError naming what is wrong.

    Args:
        share: (i, n) hashes every n-th file from the i-th on, for n ranks that hash the rest.
    """
    path = follow(Path(path))
    manifest = read_manifest(path)
    for place, (name, expected) in enumerate(sorted(manifest["files"].items())):
        size = (path / name).stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"checkpoint {path}: {name} has {size:,} bytes instead of {expected['size']:,}")
        if place % share[1] != share[0]:
            continue
        with open(path / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected["sha256"]:
            raise CheckpointError(f"checkpoint {path}: {name} does not have the sha256 its manifest gives")
    return manifest


def load_checkpoint_folder(path: Path | str, *, joined: bool = True, hashed: bool = False) -> dict[str, Any]:
    """Verify, then read: the state as it was saved, every tensor on the CPU. `trust_remote_code` in saved
    hyper-parameters reads as False, whatever the file says: only the command line can turn it on.

    Args:
        joined: False leaves what lies in shards unread, as `spread_file.SpreadTensor`s.
        hashed: the files have been verified just now.
    """
    path = follow(Path(path))
    files = (read_manifest(path) if hashed else verify(path))["files"]
    shards = [path / name for name in sorted(files) if spread_file.FILE.fullmatch(name)]
    try:
        tensors: dict[str, Any] = {**tensor_file.read_tensors(path / TENSORS)}
        spread = spread_file.open_spread(shards)
        tensors |= {name: tensor.whole() for name, tensor in spread.items()} if joined else spread
        state = decode(json.loads((path / STATE).read_bytes()), tensors)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path}: {STATE} does not hold a state")
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in state:
            state[key] = _distrust(state[key])
    return state


def _distrust(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: False if k == "trust_remote_code" else _distrust(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_distrust(v) for v in value)
    return value


# ---------------------------------------------------------------------- several checkpoints in one folder


def complete(folder: Path) -> list[Path]:
    """Checkpoints of a folder whose manifest is in order, the last written first. Their hashes are not checked yet."""
    found: list[tuple[int, Path]] = []
    for path in _entries(folder):
        try:
            found.append((read_manifest(path)["created"], path))
        except CheckpointError:
            continue
    return [path for _, path in sorted(found, reverse=True)]


def _entries(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and not path.name.endswith(".tmp"):
            yield path


def retire(path: Path) -> None:
    """Mark a checkpoint as no longer wanted, then delete what may go: see `collect`."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        _hidden(path, "retired").touch()
        collect(path.parent)


def collect(folder: Path) -> None:
    """Delete retired checkpoints, oldest first, as long as two complete ones remain and the newest of those verifies.

    The mark is a file, so a checkpoint retired just before a crash is still collected by the resumed run.
    """
    alive = complete(folder)
    pointed = {path.resolve() for path in folder.iterdir() if path.is_symlink()}
    verified = False
    for path in reversed(list(alive)):
        mark = _hidden(path, "retired")
        rest = [p for p in alive if p != path]
        if not mark.exists() or len(rest) < _KEPT or path.resolve() in pointed:
            continue
        if not verified:
            verify(rest[0])
            verified = True
        trash = _hidden(path, "tmp")
        os.rename(path, trash)
        shutil.rmtree(trash)
        mark.unlink(missing_ok=True)
        alive = rest
