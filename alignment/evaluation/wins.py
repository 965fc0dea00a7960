"""Tasks that count: solved programs and won comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alignment.batches import Group
from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject, by_category, share_interval
from alignment.evaluation.replies import prompts_of, sampled
from alignment.rewards import RewardSuite
from alignment.rewards.protocol import Texts
from alignment.rollout import SamplingConfig

REFERENCE = "reference"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of k of these samples is right, without bias: Chen et al. 2021, arXiv 2107.03374."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


class PassAtK:
    """pass@k: a prompt counts as solved where at least one of k replies reaches a reward's threshold.

    Metrics: `pass@<k>` for each k (mean over prompts), `unknown` (share of replies on which the reward abstained; a
    prompt with one is left out).

    Args:
        path: prompts. reward: as one of `model.rewards`, for example `UnitTests` for programs with hidden tests.
        k: sizes. samples: replies to each prompt, as many as the largest k at least. threshold: of a right reply.
        temperature, top_p, max_tokens: of the replies. max_rows: null: all. settings: of datamodules.PromptData.
    """

    def __init__(
        self,
        path: str,
        reward: Any,
        k: Sequence[int] = (1, 5),
        samples: int = 10,
        threshold: float = 1.0,
        temperature: float = 0.8,
        top_p: float = 0.95,
        max_tokens: int = 512,
        max_rows: int | None = None,
        **settings: Any,
    ) -> None:
        if not k or min(k) < 1 or max(k) > samples:
            raise UserError(f"k is {list(k)} and samples {samples}; each k is at least 1 and at most that many")
        self.suite = RewardSuite({"right": reward})
        self.k, self.samples, self.threshold = sorted(k), samples, threshold
        self.sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        self.settings = {"path": path, "max_rows": max_rows, **settings}

    def run(self, subject: Subject) -> Result:
        values: list[float] = []
        with self.suite:
            for rollout in sampled(subject, prompts_of(subject, self.settings), self.samples, self.sampling):
                read = Texts.decode(rollout.batch, subject.policy.tokenizer)
                values += self.suite.score(rollout, read, learn=False).values[:, 0].tolist()
        of_prompts = [values[i : i + self.samples] for i in range(0, len(values), self.samples)]
        known = [own for own in of_prompts if all(v == v for v in own)]
        metrics = {"unknown": statistics.fmean(v != v for v in values)}
        if not known:
            raise UserError("the reward gave no value for any prompt; what it needs is in docs/rewards.md")
        right = [sum(v >= self.threshold for v in own) for own in known]
        metrics |= {f"pass@{k}": statistics.fmean(pass_at_k(self.samples, n, k) for n in right) for k in self.k}
        return Result(metrics=metrics)


class WinRate:
    """How often a judge prefers the model's reply to a reference reply, asked in both orders.

    Metrics: `win_rate` (ties count half, with its interval), `wins`, `ties`, `losses` (shares of judged prompts),
    `contradictory` (share where the judge preferred a place and not a reply: its position bias), `faults` (share
    without an answer), and the win rate of each category.

    Args:
        path: prompts; with `against` null each row has the reference reply in the column `reference`.
        judge: arguments of `alignment.rewards.PairJudge`: endpoint and criteria (docs/rewards.md).
        against: any name of another model, whose replies are the references.
        category: column of the category. temperature, top_p, max_tokens: of the replies.
        max_rows: null: all. timeout_s: seconds one call of the judge may take. settings: of datamodules.PromptData.
    """

    def __init__(
        self,
        path: str,
        judge: dict[str, Any],
        against: str | None = None,
        category: str = "category",
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        max_rows: int | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        arguments = {"call_s": timeout_s - 5, **judge, "reference": REFERENCE}
        self.suite = RewardSuite({"win": {"reward": "PairJudge", "args": arguments, "timeout_s": timeout_s}})
        self.against, self.category = against, category
        self.sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        self.settings = {"path": path, "max_rows": max_rows, **settings}

    def run(self, subject: Subject) -> Result:
        groups = prompts_of(subject, self.settings)
        if self.against is not None:
            other = Subject(self.against, root=subject.root, device=subject.device, seed=subject.seed)
            groups = self._answered(groups, other)
        elif missing := [group.index for group in groups if group.columns.get(REFERENCE) is None]:
            raise UserError(f"row {missing[0]} has no column '{REFERENCE}'; add it, or name a model with against")
        values: list[float] = []
        categories: list[str | None] = []
        faults, count = 0, 0
        with self.suite:
            for rollout in sampled(subject, groups, 1, self.sampling):
                read = Texts.decode(rollout.batch, subject.policy.tokenizer)
                matrix = self.suite.score(rollout, read, learn=False)
                values += matrix.values[:, 0].tolist()
                faults += matrix.faults["win"].total()
                columns = [rollout.batch.columns[g].get(self.category) for g in rollout.batch.group_of.tolist()]
                categories += [None if c is None else str(c) for c in columns]
                count += len(columns)
        return counted(values, categories, faults / count)

    def _answered(self, groups: Sequence[Group], other: Subject) -> list[Group]:
        """The prompts with another model's replies as references."""
        own = prompts_of(other, self.settings)
        texts: list[str] = []
        for rollout in sampled(other, own, 1, self.sampling):
            texts += Texts.decode(rollout.batch, other.policy.tokenizer).completions
        replies: Mapping[int, str] = {group.index: text for group, text in zip(own, texts, strict=True)}
        return [
            replace(group, columns={**group.columns, REFERENCE: replies[group.index]})
            for group in groups
            if group.index in replies
        ]


def counted(values: Sequence[float], categories: Sequence[str | None], faults: float) -> Result:
    """From 1 (preferred in both orders) to 0; NaN where the orders contradict each other or the judge failed."""
    known = [(v, c) for v, c in zip(values, categories, strict=True) if v == v]
    metrics = {"faults": faults, "contradictory": 1 - len(known) / len(values) - faults}
    if not known:
        raise UserError("the judge decided no comparison; its answers are in the run's log")
    won = [v for v, _ in known]
    metrics |= {
        "win_rate": statistics.fmean(won),
        "wins": statistics.fmean(v > 0.5 for v in won),
        "ties": statistics.fmean(v == 0.5 for v in won),
        "losses": statistics.fmean(v < 0.5 for v in won),
    }
    more, table = by_category(won, [c for _, c in known])
    metrics |= {f"{key.removesuffix('/accuracy')}/win_rate": value for key, value in more.items()}
    return Result(metrics=metrics, intervals={"win_rate": share_interval(sum(won), len(won))}, table=table)
