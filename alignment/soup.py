"""Rewarded Soups: one model whose weights are a mixture of those of several, each trained on a reward of its own.

    theta = sum_k lambda_k theta_k,    lambda_k >= 0, sum_k lambda_k = 1

Rame et al. 2023 (arXiv 2306.04488). That fine-tunes of one model can be mixed at all is an observation about models
that stayed near their common start; of models from different starts nothing sensible comes, so `soup` warns when they
are far apart. Any preference can be had after training, without more of it: mix again with other weights.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.errors import UserError
from alignment.export import appearing, check_target, export
from alignment.heads_file import FOLDER
from alignment.mixture import mixture
from alignment.policy import PolicyConfig, load_tokenizer
from alignment.sources import PICKLES, check_folder
from alignment.tensor_file import write_tensors

log = logging.getLogger(__name__)

# What a model's configuration says about how it was written, not what it computes.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}

FAR = 0.5
"""Distance between two models, relative to the length of the first, above which they do not look like fine-tunes of
one. Two random initialisations are 1.4 apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One folder of safetensors weights.

    Args:
        name: as the user called it. files: tensor name -> the file that holds it.
    """

    name: str
    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def of(cls, name: str, folder: Path) -> _Model:
        if (folder / FOLDER).is_dir():
            raise UserError(
                f"'{name}' is a policy with heads, which a soup would leave out: it mixes plain models; the heads of "
                "one such policy are mixed at decoding instead, by its dial"
            )
        check_folder(folder)
        files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    files |= dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise UserError(f"'{path}' is damaged: {error}") from error
        return cls(name=name, folder=folder, files=files)

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def config(self) -> dict[str, object]:
        read = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return {key: value for key, value in read.items() if key not in _INCIDENTAL}


def soup(
    sources: Sequence[str | Path], out: str | Path, weights: Sequence[float] | None = None, *, force: bool = False
) -> list[float]:
    """Write the mixture of models as a transformers folder, with the tokenizer and settings of the first one.

    Args:
        sources: exported folders, checkpoint folders or run folders (their last checkpoint), of one architecture.
        out: the new folder. It appears complete or not at all.
        weights: lambda of each source. None: equal.
        force: replace an earlier export.

    Returns the weights. Tensors are mixed in fp32 and written in the dtype of the first model.

    Raises:
        UserError: fewer than two sources, weights that are no mixture, models that do not fit together or that have
            heads, or `out` is taken.
    """
    shares = mixture(weights, len(sources))
    out = Path(out)
    check_target(out, force)
    with tempfile.TemporaryDirectory() as scratch:
        models = [_model(str(source), Path(scratch) / str(k)) for k, source in enumerate(sources)]
        for other in models[1:]:
            _check_alike(models[0], other)
        with appearing(out) as partial:
            partial.mkdir()
            _write(models, shares, partial)
    return shares


def _model(source: str, scratch: Path) -> _Model:
    """The model that a path leads to; a checkpoint is exported to `scratch` first."""
    path = Path(source)
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"'{source}' holds an adapter, and a mixture of the two factors of adapters is not the mixture of the "
            "adapters; export it merged (--merge_lora true)"
        )
    if (path / "config.json").is_file():
        return _Model.of(source, path)
    if not (path / "checkpoints").is_dir() and not (path / "manifest.json").is_file():
        raise UserError(f"'{source}' is neither an exported model, nor a checkpoint, nor a run's folder")
    return _Model.of(source, export(path, scratch))


def _check_alike(first: _Model, other: _Model) -> None:
    """Raise UserError unless two models are of one architecture and tokenizer."""
    names = f"'{first.name}' and '{other.name}'"
    one, two = first.config(), other.config()
    for key in sorted(one.keys() | two.keys()):
        if one.get(key) != two.get(key):
            raise UserError(f"{names} differ in {key} ({one.get(key)} and {two.get(key)}): mix models of one start")
    if lacking := sorted(first.files.keys() ^ other.files.keys()):
        raise UserError(f"{names} hold other tensors, for example {lacking[0]}: mix models of one start")
    for name in first.files:
        shapes = [tuple(model.tensor(name).shape) for model in (first, other)]
        if shapes[0] != shapes[1]:
            raise UserError(f"{names} differ in the shape of {name}, {shapes[0]} and {shapes[1]}")
    vocabularies = [load_tokenizer(PolicyConfig(name=str(model.folder))).get_vocab() for model in (first, other)]
    if vocabularies[0] != vocabularies[1]:
        raise UserError(f"{names} have different vocabularies: mix models of one start")


def _write(models: Sequence[_Model], shares: Sequence[float], folder: Path) -> None:
    first = models[0]
    length, apart = 0.0, [0.0] * len(models)
    for path in sorted(set(first.files.values())):
        mixed: dict[str, Tensor] = {}
        for name in (n for n, file in first.files.items() if file == path):
            tensors = [model.tensor(name) for model in models]
            mixed[name] = _mix(name, tensors, shares)
            length += float(tensors[0].double().square().sum())
            for k, tensor in enumerate(tensors):
                apart[k] += float((tensor.double() - tensors[0].double()).square().sum())
        write_tensors(folder / path.name, mixed)
    for path in first.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not any(path.match(p) for p in PICKLES):
            shutil.copyfile(path, folder / path.name)
    for model, squared in zip(models, apart, strict=True):
        if squared > FAR**2 * length:
            log.warning(
                "'%s' is %.0f %% of the weights' length away from '%s': these do not look like fine-tunes of one model",
                model.name,
                100 * math.sqrt(squared / length),
                first.name,
            )


def _mix(name: str, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():
        if not all(torch.equal(first, other) for other in tensors[1:]):
            raise UserError(f"tensor {name} is not of floating point and differs: there is nothing between its values")
        return first
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    for tensor, weight in zip(tensors, shares, strict=True):
        total.add_(tensor.to(total.dtype), alpha=weight)
    return total.to(first.dtype)
