"""`alignment export CHECKPOINT OUT`: a policy, or a reward model with its head, as a plain transformers folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from alignment.errors import UserError
from alignment.export import export
from alignment.heads_file import FOLDER as HEADS
from alignment.model_card import converter, push, write_card, write_gguf
from alignment.reward_export import export_reward, is_reward_model
from alignment.runs import named_checkpoint


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises as `export` and `export_reward` do, and the command line prints that as one line."""
    parser = argparse.ArgumentParser(
        prog="alignment export", description="Write a checkpoint as a transformers folder."
    )
    parser.add_argument("checkpoint", help="folder of a checkpoint or a run; or last, best: of the newest run with one")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--merge_lora", choices=("true", "false"), default="true", help="false: the adapter alone")
    parser.add_argument("--weights", help="of a policy with heads: the preference to decode with, such as '{kind: 2}'")
    parser.add_argument("--archived", help="the past policy of that name that callbacks.Fp8PolicyArchive has kept")
    parser.add_argument("--license", help="for the model card: an identifier of the hub, such as apache-2.0")
    parser.add_argument("--gguf", metavar="TYPE", help="also a GGUF file of that type (f16, q8_0, ...), by llama.cpp")
    parser.add_argument("--llama_cpp", type=Path, help="folder of llama.cpp (default: $LLAMA_CPP, or PATH)")
    parser.add_argument("--push", metavar="REPOSITORY", help="copy it to the hub, for example me/my-model")
    parser.add_argument("--private", action="store_true", help="with --push: a private repository")
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code shipped with the base model")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder that holds `runs` (default: here)")
    parser.add_argument("--run_name", help="of `last` and `best`: only runs called so")
    parser.add_argument("--model", help="of `last` and `best`: only runs of this module, for example modules.GRPO")
    given = parser.parse_args(argv)
    wanted = {key: value for key in ("run_name", "model") if (value := getattr(given, key)) is not None}
    checkpoint = named_checkpoint(given.checkpoint, given.root, wanted)
    merge = given.merge_lora == "true"
    weights = _weights(given.weights)
    if given.gguf is not None:
        converter(given.llama_cpp)  # before minutes of work: is it there?
        if not merge or is_reward_model(checkpoint):
            raise UserError("--gguf is for a whole language model: no reward model, and no --merge_lora false")
    if is_reward_model(checkpoint):
        if weights is not None:
            raise UserError("--weights is for a policy with heads (modules.DecoupledPO), and this is a reward model")
        if given.archived is not None:
            raise UserError("--archived is for a policy, and this is a reward model")
        if not merge:
            raise UserError("a reward model is exported merged: its head belongs to the whole trunk")
        out = export_reward(checkpoint, given.out, force=given.force, trust_remote_code=given.trust_remote_code)
        _finish(checkpoint, out, given)
        print(f"{out} holds the reward model: AutoModelForSequenceClassification.from_pretrained('{out}')")
        return 0
    out = export(
        checkpoint,
        given.out,
        merge_lora=merge,
        weights=weights,
        archived=given.archived,
        force=given.force,
        trust_remote_code=given.trust_remote_code,
    )
    _finish(checkpoint, out, given)
    if (out / HEADS).is_dir():
        print(f"{out} holds the trunk and its heads; both together: alignment.heads_file.load_fused('{out}')")
    else:
        print(f"{out} holds the model; try it:  transformers chat {out}")
    return 0


def _finish(checkpoint: Path, out: Path, given: argparse.Namespace) -> None:
    """The card, and what else was asked for."""
    write_card(checkpoint, out, given.license)
    if given.gguf is not None:
        print(f"{write_gguf(out, given.gguf, given.llama_cpp)} is the GGUF file")
    if given.push is not None:
        print(f"{push(out, given.push, private=given.private)} holds a copy")


def _weights(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        values = yaml.safe_load(text)
        return {str(name): float(weight) for name, weight in values.items()}
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"--weights is '{text}'; give a number for each name: '{{kind: 2, short: 1}}'") from error
