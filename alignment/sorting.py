"""A task that a model of 250,000 parameters learns in minutes: put six letters in order.

    sort gbafce -> abcefg

SFT on worked answers takes it part of the way, a reward for right answers the rest. `write_rows` makes three files of
rows without a common prompt; nothing in them is downloaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

LETTERS, LENGTH = "abcdefgh", 6
HELD_OUT, PROMPTS, WORKED = 250, 4000, 9000


def write_rows(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write `worked.jsonl` (prompt, completion), `prompts.jsonl` and `held_out.jsonl` (prompt, answer); the same for
    the same seed. Returns their paths by name."""
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < HELD_OUT + PROMPTS + WORKED:
        words["".join(draw.choice(LETTERS) for _ in range(LENGTH))] = None
    rows = [(f"sort {word}", "".join(sorted(word))) for word in words]
    held_out, rest = rows[:HELD_OUT], rows[HELD_OUT:]
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "held_out": [{"prompt": prompt, "answer": answer} for prompt, answer in held_out],
        "prompts": [{"prompt": prompt, "answer": answer} for prompt, answer in rest[:PROMPTS]],
        "worked": [{"prompt": prompt, "completion": answer} for prompt, answer in rest[PROMPTS:]],
    }
    paths = {name: folder / f"{name}.jsonl" for name in parts}
    for name, part in parts.items():
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return paths
