"""`alignment generate FILE OUT`: a model's replies to a file of prompts, as JSON lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import UserError
from alignment.whole_file import appearing_file

if TYPE_CHECKING:
    from alignment.batches import Group
    from alignment.ready import Ready
    from alignment.rollout import SamplingConfig

PROMPTS_AT_ONCE = 32


def main(argv: Sequence[str]) -> int:
    """Returns 0; raises UserError for prompts that cannot be read, a model that is none, or an OUT that exists."""
    given = _parser().parse_args(argv)
    if given.out.exists() and not given.force:
        raise UserError(f"'{given.out}' exists; choose another file, or replace it with --force")
    if given.samples < 1:
        raise UserError(f"--samples is {given.samples}; use at least 1")
    if given.samples > 1 and given.temperature == 0:
        raise UserError("--temperature 0 gives the same reply each time: leave out --samples, or raise --temperature")
    from alignment.ready import ready  # here: mistakes come first
    from alignment.rollout import SamplingConfig
    from datamodules import PromptData

    sampling = SamplingConfig(max_tokens=given.max_tokens, temperature=given.temperature, top_p=given.top_p)
    loaded = ready(given.model, given.root, device=given.device)
    data = PromptData(given.file, tokenizer=loaded.tokenizer, val_fraction=0, max_rows=given.max_rows,
                      template=given.template, system=given.system)  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    rows = replies(loaded, data.groups("train"), sampling, given.samples, given.seed)
    count = _write(given.out, rows)
    print(f"{given.out} holds {count:,} replies of {given.model}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alignment generate",
        description="Write a model's replies to prompts, one JSON object a line: index, prompt, completion, tokens, "
        "truncated, and the row's other columns.",
        epilog="alignment generate my_prompts.jsonl replies.jsonl --model last",
    )
    parser.add_argument("file", help="prompts in any form that datamodules.PromptData reads (docs/data.md)")
    parser.add_argument("out", type=Path, help="file to write; it appears complete or not at all")
    parser.add_argument("--model", default="last", help="hub id, folder, GGUF, checkpoint, run, last (default)")
    parser.add_argument("--samples", type=int, default=1, help="replies to each prompt (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token each time")
    parser.add_argument("--top_p", type=float, default=1.0, help="likeliest tokens up to this share (default: all)")
    parser.add_argument("--max_tokens", type=int, default=256, help="most tokens of a reply (default: 256)")
    parser.add_argument("--max_rows", type=int, help="prompts to answer (default: all)")
    parser.add_argument("--system", help="a system message before every prompt")
    parser.add_argument("--template", default="auto", choices=("auto", "chat", "plain", "raw"), help="docs/data.md")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same replies (default: 0)")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder that holds `runs` (default: here)")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    return parser


def replies(
    loaded: Ready, groups: Sequence[Group], sampling: SamplingConfig, samples: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Rows in the order of the prompts, the samples of one together."""
    from alignment.rewards.protocol import Texts

    sampler = loaded.sampler()
    for first in range(0, len(groups), PROMPTS_AT_ONCE):
        part = [groups[i] for i in range(first, min(first + PROMPTS_AT_ONCE, len(groups)))]
        # One step number for all: a reply depends on its prompt, not on its place in the file.
        rollout = sampler.generate(part, samples, sampling, seed=seed, step=0)
        batch, texts = rollout.batch, Texts.decode(rollout.batch, loaded.tokenizer)
        for row, group in enumerate(batch.group_of.tolist()):
            yield {
                **batch.columns[group],
                "index": int(batch.group_index[group]),
                "prompt": texts.prompts[group],
                "completion": texts.completions[row],
                "tokens": int(batch.completion_lengths[row]),
                "truncated": bool(rollout.truncated[row]),
            }


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Returns how many."""
    count = 0
    with appearing_file(path) as file:
        for row in rows:
            count += 1
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace"))
    return count
