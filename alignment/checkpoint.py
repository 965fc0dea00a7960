"""Checkpoints for Lightning: the CheckpointIO plug-in, finding a checkpoint by name, rebuilding a module from one.

`Trainer(plugins=[SafeCheckpointIO()])` makes ModelCheckpoint, `ckpt_path=last|best|FOLDER` and
`trainer.save_checkpoint` write and read verified folders instead of pickles; see `alignment.checkpoint_folder`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden

from alignment import distributed
from alignment.checkpoint_folder import (
    CheckpointError,
    complete,
    follow,
    load_checkpoint_folder,
    point,
    read_manifest,
    retire,
    verify,
    write_checkpoint,
    write_together,
)

__all__ = [
    "CheckpointError",
    "SafeCheckpointIO",
    "checkpoint_of",
    "load_checkpoint_folder",
    "load_module",
    "point",
    "resolve",
    "verify",
]

log = logging.getLogger(__name__)
_Module = TypeVar("_Module", bound=L.LightningModule)
_SUFFIX = ".ckpt"


class SafeCheckpointIO(CheckpointIO):
    """Verified folders instead of pickled files.

    A save that the disk refuses is reported and survived; a second one in a row stops the run. Loading falls back to
    the last good checkpoint of the same folder when the named one is damaged, and says so. Removal is late: two
    complete checkpoints stay, and the newest of them is verified before an older one goes.

    Args:
        fallback: False makes a damaged checkpoint an error, for evaluation, where another one is another result.
            `callbacks.Checkpoint` sets it for the stage that runs.
    """

    def __init__(self, fallback: bool = True) -> None:
        self.fallback = fallback
        self.failed_saves = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path | str, storage_options: Any | None = None) -> None:
        """Called on rank 0 only. Raises TypeError at once for a state that cannot be expressed."""
        if storage_options is not None:
            raise TypeError("storage_options are for remote stores; checkpoints are written to local folders only")
        self._save(write_checkpoint, checkpoint, path)

    def save_together(self, checkpoint: dict[str, Any], path: Path | str) -> None:
        """The same for a sharded run: called on every rank, each of which writes what it holds."""
        self._save(write_together, checkpoint, path)

    def _save(
        self, write: Callable[[dict[str, Any], Path], None], checkpoint: dict[str, Any], path: Path | str
    ) -> None:
        try:
            write(checkpoint, _local(path))
        except CheckpointError as error:
            self.failed_saves += 1
            if self.failed_saves > 1:
                raise
            if distributed.process() == 0:
                log.error("%s; training goes on, a second failed save in a row will stop it", error)
        else:
            self.failed_saves = 0

    def load_checkpoint(
        self,
        path: Path | str,
        map_location: Any | None = None,
        weights_only: bool | None = None,
        *,
        joined: bool = True,
    ) -> dict[str, Any]:
        """Called on every rank; all of them must arrive at the same checkpoint. Tensors come on the CPU, from where
        Lightning copies them into the model and the optimizers, and nothing but data is ever read: `map_location` and
        `weights_only` have nothing to add. `joined` False: see `load_checkpoint_folder`."""
        chosen = self._choose(_local(path), verify if joined else _verify_together)
        manifest = read_manifest(chosen)
        if len(set(distributed.gather_from_processes((manifest["created"], manifest["config"])))) > 1:
            raise CheckpointError(f"the ranks do not see the same checkpoint at {path}; put it on a shared file system")
        return load_checkpoint_folder(chosen, joined=joined, hashed=not joined)

    def remove_checkpoint(self, path: Path | str) -> None:
        try:
            retire(_local(path))
        except CheckpointError as error:
            log.error("older checkpoints are kept: %s", error)

    def _choose(self, path: Path, check: Callable[[Path], object]) -> Path:
        try:
            check(path)
        except CheckpointError as error:
            if not self.fallback or not _was_checkpoint(path):
                raise
            config = _config_of(path)
            for other in complete(path.parent):
                if other == path or (config is not None and read_manifest(other)["config"] != config):
                    continue
                if _is_good(other, check):
                    step = read_manifest(other)["step"]
                    log.error("%s; FALLING BACK to %s (step %d)", error, other, step)
                    return other
            raise CheckpointError(f"{error}; no good checkpoint beside it") from error
        return follow(path)


def _local(path: Path | str) -> Path:
    if "://" in str(path):
        raise CheckpointError(f"checkpoint {path} is not a local folder; download it first")
    return Path(path)


def _was_checkpoint(path: Path) -> bool:
    """A folder, a pointer, or a name whose folder was being replaced when the process died. A name nobody ever used is
    a typing error, not a reason to load something else."""
    return path.is_dir() or path.is_symlink() or (path.parent / f".{path.name}.previous").is_dir()


def _config_of(path: Path) -> str | None:
    try:
        return str(read_manifest(follow(path))["config"])
    except CheckpointError:
        return None


def _verify_together(path: Path) -> None:
    """Each rank hashes its share of the files; what is wrong with one is an error on every rank. A collective."""
    message = ""
    try:
        verify(path, share=(distributed.process(), distributed.processes()))
    except CheckpointError as error:
        message = str(error)
    if wrong := [str(found) for found in distributed.gather_from_processes(message) if found]:
        raise CheckpointError(wrong[0])


def _is_good(path: Path, check: Callable[[Path], object]) -> bool:
    try:
        check(path)
    except CheckpointError as error:
        log.error("%s", error)
        return False
    return True


# ---------------------------------------------------------------------- by name


def resolve(name: str | Path, run_dir: Path | str) -> Path:
    """The folder meant by `last`, `best` or a path. `run_dir` is the folder that holds the run's checkpoints.

    `last` follows the pointer `last.ckpt`, else takes the one written last; `best` is what the newest checkpoint's
    ModelCheckpoint says. Raises CheckpointError when there is none.
    """
    if str(name) not in ("last", "best"):
        return _local(name)
    folder = Path(run_dir)
    found = complete(folder)
    pointer = folder / f"last{_SUFFIX}"
    if not found:
        raise CheckpointError(f"no checkpoint in {folder}")
    if str(name) == "last":
        return pointer if pointer.is_dir() else found[0]
    callbacks = load_checkpoint_folder(found[0]).get("callbacks", {})
    states = [s for s in callbacks.values() if isinstance(s, dict) and "best_model_path" in s]
    # The run may have been moved since: what counts is the name within its folder.
    paths = [folder / Path(s["best_model_path"]).name for s in states if s["best_model_path"]]
    for path in paths:
        if path.is_dir():
            return path
    raise CheckpointError(f"no best checkpoint in {folder}: {_why_none_is_best(states, paths)}; use last")


def checkpoint_of(path: str | Path) -> Path:
    """A checkpoint's folder as it is; of a run's folder its last checkpoint. Raises CheckpointError for one without."""
    folder = Path(path)
    return resolve("last", folder / "checkpoints") if (folder / "checkpoints").is_dir() else folder


def _why_none_is_best(states: list[dict[str, Any]], paths: list[Path]) -> str:
    """From what the ModelCheckpoints of a run recorded."""
    monitors = [s["monitor"] for s in states if s.get("monitor")]
    if paths:
        return f"{paths[0].name} is not there any more"
    return f"{monitors[0]} was never logged" if monitors else "no `callbacks.Checkpoint` of it has a `monitor`"


# ---------------------------------------------------------------------- modules


def _parameters(cls: type[L.LightningModule]) -> dict[str, inspect.Parameter]:
    """What `cls` is constructed with, including what its `**settings` hand on to the next class in line."""
    found: dict[str, inspect.Parameter] = {}
    for kind in cls.__mro__:
        if "__init__" in vars(kind):
            own = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[1:]
            named = [p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            found = {p.name: p for p in named} | found
            if not any(p.kind is p.VAR_KEYWORD for p in own):
                break
    return found


def load_module(cls: type[_Module], path: Path | str, *, strict: bool | None = None, **overrides: Any) -> _Module:
    """`cls` with the hyper-parameters and weights of a checkpoint; keyword arguments win over the saved ones.

    The class is the caller's: nothing in the file names code to import or to call. Dataclasses were saved as mappings,
    which our modules accept in their place. Raises CheckpointError for a damaged folder or one that belongs to another
    class. There is no fall-back here: another checkpoint would be another model.
    """
    checkpoint = load_checkpoint_folder(_local(path))
    saved = dict(checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    class_path = saved.get("_class_path")
    if class_path is not None and str(class_path).rpartition(".")[2] != cls.__name__:
        raise CheckpointError(f"checkpoint {path} is of a {class_path}, not of a {cls.__name__}")
    known = _parameters(cls)
    arguments = {k: v for k, v in {**saved, **overrides}.items() if k in known}
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__} has no parameter {', '.join(unknown)}")
    missing = [name for name, p in known.items() if p.default is p.empty and name not in arguments]
    if missing:
        raise CheckpointError(f"checkpoint {path} holds no {', '.join(missing)} for {cls.__name__}; give it as well")
    module = cls(**arguments)
    if is_overridden("configure_model", module):
        module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)
    return module
