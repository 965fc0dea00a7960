"""A trained reward model as a plain transformers folder for `AutoModelForSequenceClassification.from_pretrained`.

    python -m alignment.reward_export CHECKPOINT OUT

The scores are those of `modules.RewardModel` for a prompt and completion in one row. An ensemble of heads aggregated by
its mean is one linear head; any other aggregation leaves one label a member, to be aggregated by the caller.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from alignment.checkpoint_folder import load_checkpoint_folder
from alignment.errors import UserError
from alignment.export import export

HEADS = "heads.weight"


def export_reward(checkpoint: str | Path, out: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Write trunk, head and tokenizer to `out` (new or empty) and return it. LoRA is merged.

    Raises:
        UserError: not a reward model, members with trunks of their own, `out` is taken, or an architecture for which
            transformers has no sequence classifier.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' is taken; choose another folder")
    saved = load_checkpoint_folder(Path(checkpoint))
    settings = saved["hyper_parameters"]
    if HEADS not in saved["state_dict"]:
        raise UserError(f"checkpoint {checkpoint} holds no reward heads; use `alignment export` for a policy")
    if settings["ensemble"] != "heads" and settings["members"] > 1:
        raise UserError(f"members with their own trunks (ensemble: {settings['ensemble']}) are not one classifier")
    weight: Tensor = saved["state_dict"][HEADS].float()
    weight = weight.mean(dim=0, keepdim=True) if settings["aggregation"] == "mean" else weight
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        policy = export(checkpoint, Path(folder) / "policy", trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(policy)
        complete = Path(folder) / "complete"
        _write_classifier(policy, weight, tokenizer, complete)
        os.replace(complete, out)
    return out


def _write_classifier(policy: Path, weight: Tensor, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    tokenizer.pad_token_id = _padding(tokenizer)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            policy, num_labels=len(weight), pad_token_id=tokenizer.pad_token_id, dtype="auto"
        )
    except ValueError as error:
        known = ", ".join(sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES))
        raise UserError(f"transformers has no sequence classifier for this architecture; it has: {known}") from error
    with torch.no_grad():
        model.score.weight.copy_(weight)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """A padding id no row ends with: transformers scores the last token that is not padding, so a padding token that is
    also the end of text would move the score one token back."""
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, *sorted(tokenizer.all_special_ids)]
    free = [i for i in ids if isinstance(i, int) and i != tokenizer.eos_token_id]
    if not free:
        raise UserError("the tokenizer has no special token besides the end of text to pad with")
    return free[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m alignment.reward_export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder of a RewardModel, or the pointer `last`")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args(argv)
    print(f"{export_reward(arguments.checkpoint, arguments.out)} holds the reward model")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
