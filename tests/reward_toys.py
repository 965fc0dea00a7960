"""Sound rewards for tests. Imported by reward workers: no torch here."""

from __future__ import annotations

import random

import numpy as np


def everything(prompts, completions, *, prompt_ids, completion_ids, truncated, columns):
    """What arrived, as one number a completion: digits of its parts."""
    rows = zip(prompts, completions, prompt_ids, completion_ids, truncated, columns, strict=True)
    seen = {
        ("P", "x", (1, 2), (3,), False, "a"): 1.0,
        ("P", "y", (1, 2), (4, 5), True, "a"): 2.0,
        ("Q", "", (6,), (), False, "b"): 3.0,
        ("Q", "z", (6,), (7, 8, 9), False, "b"): 4.0,
    }
    return [seen[p, c, tuple(pi), tuple(ci), t, row["answer"]] for p, c, pi, ci, t, row in rows]


def one(prompt, completion, prompt_ids, completion_ids, truncated, columns, answer):
    assert columns["answer"] == answer
    return everything(
        *([prompt], [completion]),
        prompt_ids=[prompt_ids],
        completion_ids=[completion_ids],
        truncated=[truncated],
        columns=[columns],
    )[0]


def noisy(completion: str) -> float:
    return random.random()


def noisy_numpy(completion: str) -> float:
    return float(np.random.random())


def greedy(completion: str, prompt_ids: list[int], completion_ids: list[int], columns: dict) -> float:
    """How many ids and columns it was given; it keeps them for itself."""
    found = len(prompt_ids) + len(completion_ids) + len(columns)
    for given in (prompt_ids, completion_ids, columns):
        given.clear()
    return float(found)


def greedy_batch(
    completions: list[str], prompt_ids: list[list[int]], completion_ids: list[list[int]], columns: list[dict]
) -> list[float]:
    """The same, all at once."""
    return [greedy(*given) for given in zip(completions, prompt_ids, completion_ids, columns, strict=True)]
