"""Where a policy's weights and tokenizer come from, decided before anything is opened.

Model folders are untrusted input: weights are read from safetensors only (a pickle runs code when it is read), no URL
is fetched, and code inside a checkpoint is never run unless the user's own configuration says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from alignment.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TOKENIZER_MARKS = ("tokenizer_config.json", "tokenizer.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What `from_pretrained` is given.

    Args:
        location: a local folder or a hub id.
        gguf_file: name of the GGUF file inside `location`, None for safetensors weights.
        local: whether `location` is a folder of this machine.
    """

    location: str
    gguf_file: str | None = None
    local: bool = True


def locate(name: str, *, weights: bool = True) -> Source:
    """Resolve a hub id, a folder, a GGUF file or a folder that holds one.

    Raises:
        UserError: `name` is a URL, an existing folder without usable weights (with `weights`), or a path to nothing.
    """
    if "://" in name:
        raise UserError(f"'{name}' is a URL; give a hub id, a local folder or a local .gguf file (download it first)")
    if not name:
        raise UserError("policy.name is empty; give a hub id, a folder or a .gguf file")
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _gguf(name, path)
    if path.is_dir():
        gguf = sorted(path.glob("*.gguf"))
        if len(gguf) == 1 and not (path / "config.json").is_file():
            return Source(location=str(path), gguf_file=gguf[0].name)
        if weights:
            check_folder(path)
        elif not any((path / file).is_file() for file in _TOKENIZER_MARKS):
            raise UserError(f"'{path}' holds no tokenizer: none of {', '.join(_TOKENIZER_MARKS)} is there")
        return Source(location=str(path))
    if path.exists():
        raise UserError(f"'{name}' is a file; a policy is a hub id, a folder in transformers form or a .gguf file")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"no model folder '{name}'")
    return Source(location=name, local=False)


def _gguf(name: str, path: Path) -> Source:
    if path.is_file():
        return Source(location=str(path.parent), gguf_file=path.name)
    parts = name.split("/")
    if len(parts) == 3 and not name.startswith((".", "/", "~")):
        return Source(location="/".join(parts[:2]), gguf_file=parts[2], local=False)
    raise UserError(f"no GGUF file '{name}'")


def check_folder(folder: Path) -> None:
    """Refuse a folder that has no safetensors weights, or whose index leads outside of them."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"'{folder}' holds an adapter: give its base model as policy.name and this folder as policy.lora.pretrained"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"'{folder}' is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        found = f"only pickles ({', '.join(pickles[:3])}), which can run code when read" if pickles else "no weights"
        raise UserError(f"'{folder}' has {found}; a *.safetensors file is needed")
    for index in folder.glob("*.safetensors.index.json"):
        _check_index(index)


def _check_index(index: Path) -> None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{index}' is not a safetensors index: {error}") from error
    strange = sorted(str(s) for s in shards if not str(s).endswith(".safetensors") or Path(str(s)).name != str(s))
    if strange:
        raise UserError(f"'{index}' names '{strange[0]}' as a shard; shards are *.safetensors files beside the index")


def locate_adapter(name: str) -> Path:
    """The local folder of a LoRA adapter (a hub id is downloaded: its config and safetensors weights, nothing else).

    Raises:
        UserError: no such folder, no safetensors weights, or another kind of adapter than LoRA.
    """
    if "://" in name:
        raise UserError(f"'{name}' is a URL; policy.lora.pretrained takes a folder or a hub id")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise UserError(f"no adapter folder '{name}'")
        try:
            folder = Path(snapshot_download(name, allow_patterns=list(ADAPTER_FILES)))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot fetch the adapter '{name}': {one_line(error)}") from error
    missing = [f for f in ADAPTER_FILES if not (folder / f).is_file()]
    if missing:
        raise UserError(f"adapter '{name}' has no {missing[0]}; an adapter is {' and '.join(ADAPTER_FILES)}")
    try:
        settings = json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"adapter '{name}': adapter_config.json is not JSON: {error}") from error
    if settings.get("peft_type") != "LORA":
        raise UserError(f"adapter '{name}' is of type {settings.get('peft_type')}; LORA is supported")
    # peft would import the module named here.
    if settings.get("megatron_config") is not None:
        raise UserError(f"adapter '{name}' asks for Megatron layers, which are not supported")
    return folder


def adapter_config(folder: Path) -> LoraConfig:
    """The settings an adapter was trained with."""
    from peft import LoraConfig  # here: see alignment.adapters

    settings = LoraConfig.from_pretrained(str(folder))
    assert isinstance(settings, LoraConfig)
    return settings


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn what transformers, peft or the hub raise for an unusable model into one line for the user."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:  # peft's are ValueErrors
        raise UserError(f"cannot load {what}: {one_line(error)}") from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text on one line of at most `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
