"""The support world with three rewards in conflict, for the TinyStories model after SFT on the world's log.

    professionalism  half a point for the right value, half for a register of whole sentences without exclamation marks
    sentiment        the world's warmth: thanks, gladness, an offer, a good wish; often with an exclamation mark
    efficiency       1 / (1 + ln tokens): curt replies win

Its sentiment is mis-scaled: it comes six times too large. Nobody tells the methods.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment import world
from alignment.export import export
from benchmarks.online.bench import alignment

LONGEST = 48
MODEL = "SUPPORT_MODEL"
"""Environment variable: folder of the model before SFT."""

LOW = {"professionalism": 0.0, "sentiment": 0.0, "efficiency": 1 / (1 + math.log(LONGEST))}
HIGH = {"professionalism": 1.0, "sentiment": 6.0, "efficiency": 1 / (1 + math.log(8))}
"""What counts as 0 and as 1. A curt reply is about 8 tokens."""

SENTENCE = re.compile(r"[^.!?]+[.!?]+|[^.!?]+$")


def register(reply: str) -> float:
    """Share of sentences that are whole: at least four words, a capital first, a full stop or question mark last."""
    sentences = [s.strip() for s in SENTENCE.findall(reply) if s.strip()]
    whole = [len(s.split()) >= 4 and not s[0].islower() and s.endswith((".", "?")) for s in sentences]
    return sum(whole) / len(whole) if whole else 0.0


def professionalism(completion: str, columns: Mapping[str, Any]) -> float:
    return 0.5 * world.right(completion, columns) + 0.5 * register(completion)


def sentiment(completion: str, scale: float = 6.0) -> float:
    return scale * world.warmth(completion)


def efficiency(completion_ids: list[int]) -> float:
    """Fewer tokens; the end is one."""
    return 1 / (1 + math.log(max(1, len(completion_ids))))


def prepare() -> None:
    """The base model, in the folder `base`."""
    config = Path(__file__).with_name("support_sft")
    model = f"--model.policy.name={os.environ[MODEL]}"
    fit = alignment("fit", str(config), "support-sft", model, experiment="multi_reward")
    export(fit.checkpoint, Path("base"), force=True)
