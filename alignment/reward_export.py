"""A trained reward model as a plain transformers folder for `AutoModelForSequenceClassification.from_pretrained`.

`alignment export CHECKPOINT OUT` comes here when the checkpoint is a reward model's.

The scores are those of `modules.RewardModel` for a prompt and completion in one row. An ensemble of heads aggregated by
its mean is one linear head; any other aggregation leaves one label a member, to be aggregated by the caller.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from alignment.checkpoint import checkpoint_of
from alignment.checkpoint_folder import load_checkpoint_folder
from alignment.errors import UserError
from alignment.export import check_target, export, write_model

HEADS = "heads.weight"


def is_reward_model(checkpoint: str | Path) -> bool:
    """Whether a checkpoint holds reward heads. Raises CheckpointError for a damaged one."""
    return HEADS in load_checkpoint_folder(checkpoint_of(checkpoint))["state_dict"]


def export_reward(
    checkpoint: str | Path, out: str | Path, *, force: bool = False, trust_remote_code: bool = False
) -> Path:
    """Write trunk, head and tokenizer to `out` and return it. It appears complete or not at all; `force` replaces an
    earlier export. LoRA is merged.

    Raises:
        UserError: not a reward model, members with trunks of their own, `out` is taken, or an architecture for which
            transformers has no sequence classifier.
    """
    out = Path(out)
    check_target(out, force)
    saved = load_checkpoint_folder(checkpoint_of(checkpoint))
    settings = saved["hyper_parameters"]
    if HEADS not in saved["state_dict"]:
        raise UserError(f"checkpoint {checkpoint} holds no reward heads; use `alignment export` for a policy")
    if settings["ensemble"] != "heads" and settings["members"] > 1:
        raise UserError(f"members with their own trunks (ensemble: {settings['ensemble']}) are not one classifier")
    weight: Tensor = saved["state_dict"][HEADS].float()
    weight = weight.mean(dim=0, keepdim=True) if settings["aggregation"] == "mean" else weight
    with tempfile.TemporaryDirectory() as folder:
        policy = export(checkpoint, Path(folder) / "policy", trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(policy)
        write_model(_classifier(policy, weight, tokenizer), tokenizer, out)
    return out


def _classifier(policy: Path, weight: Tensor, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    tokenizer.pad_token_id = _padding(tokenizer)
    try:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            policy, num_labels=len(weight), pad_token_id=tokenizer.pad_token_id, dtype="auto"
        )
    except ValueError as error:
        known = ", ".join(sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES))
        raise UserError(f"transformers has no sequence classifier for this architecture; it has: {known}") from error
    head = model.get_submodule("score")
    assert isinstance(head, nn.Linear)  # what transformers' generic sequence classifier has
    with torch.no_grad():
        head.weight.copy_(weight)
    return model


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """A padding id no row ends with: transformers scores the last token that is not padding, so a padding token that is
    also the end of text would move the score one token back."""
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, *sorted(tokenizer.all_special_ids)]
    free = [i for i in ids if isinstance(i, int) and i != tokenizer.eos_token_id]
    if not free:
        raise UserError("the tokenizer has no special token besides the end of text to pad with")
    return free[0]
