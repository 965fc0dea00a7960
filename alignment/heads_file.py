"""Heads beside an exported model, and the fused policy from both.

    OUT/config.json, model.safetensors, ...          the trunk with its LM head: a plain transformers model, unfused
    OUT/heads/config.json, heads.safetensors         names of the rewards, sizes, preference; the heads' weights

    model, heads = load_fused(OUT)                   a transformers model with its heads in it
    model.generate(...)                              the fused policy
    with heads.preferring({"kind": 2.0}): ...        another point of the dial

They lie in a folder of their own because some loaders (vLLM's) read every safetensors file beside a config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.errors import UserError
from alignment.heads import Heads, HeadsSpec
from alignment.sources import check_folder, loading
from alignment.tensor_file import write_tensors

FOLDER = "heads"
_CONFIG, _TENSORS = "config.json", "heads.safetensors"
_STATE = "heads."


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedHeads:
    """What is written: the preference in `spec` is the one to decode with."""

    spec: HeadsSpec
    tensors: Mapping[str, Tensor]


@runtime_checkable
class HasHeads(Protocol):
    """A module whose policy is fused from heads."""

    def saved_heads(self) -> SavedHeads: ...


def of_checkpoint(state: Mapping[str, Tensor], training: Mapping[str, Any]) -> SavedHeads | None:
    """From a checkpoint's `state_dict` and training state; None for a policy without heads."""
    saved = training.get("heads")
    if saved is None:
        return None
    spec = replace(spec_of(saved["spec"]), weights=tuple(saved["dial"]))
    return SavedHeads(spec=spec, tensors={n.removeprefix(_STATE): v for n, v in state.items() if n.startswith(_STATE)})


def spec_of(values: Mapping[str, Any]) -> HeadsSpec:
    """From plain values. Raises UserError for a field too many or too few."""
    known = {field.name for field in fields(HeadsSpec)}
    if set(values) != known:
        raise UserError(f"heads are described by {', '.join(sorted(known))}; got {', '.join(sorted(values))}")
    given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
    return HeadsSpec(**given)


def write_heads(saved: SavedHeads, folder: Path) -> None:
    """Into `folder`/heads."""
    (folder / FOLDER).mkdir()
    write_tensors(folder / FOLDER / _TENSORS, saved.tensors)
    text = json.dumps(asdict(saved.spec), indent=1) + "\n"
    (folder / FOLDER / _CONFIG).write_text(text, encoding="utf-8")


def load_fused(
    folder: str | Path, weights: Mapping[str, float] | None = None, **arguments: Any
) -> tuple[PreTrainedModel, Heads]:
    """An exported model with its heads in it, in eval mode as `from_pretrained` leaves it, and the heads.

    Args:
        weights: name -> preference; rewards that are not named keep their exported share of 1.
        arguments: of `from_pretrained` (dtype, device_map, ...).

    Raises UserError for a folder without heads, or with damaged ones.
    """
    folder = Path(folder)
    own = folder / FOLDER
    if not (own / _CONFIG).is_file():
        raise UserError(f"'{folder}' has no heads; it is a plain model, or was not exported from DecoupledPO")
    check_folder(folder)
    check_folder(own)
    try:
        spec = spec_of(json.loads((own / _CONFIG).read_text(encoding="utf-8")))
        heads = Heads(spec)
        heads.load_state_dict(load_file(own / _TENSORS))
    except (ValueError, TypeError, OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the heads in '{own}' are damaged: {' '.join(str(error).split())}") from error
    if weights is not None:
        heads.prefer(weights)
    with loading(f"the model '{folder}'"):
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **arguments)
    assert isinstance(model, PreTrainedModel)
    heads.to(model.device).attach(model)
    return model, heads
