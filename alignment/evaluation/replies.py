"""Tasks that sample replies and judge them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.batches import Group
from alignment.diversity import distinct, self_bleu
from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject, by_category, mean_interval, share_interval
from alignment.rewards import RewardSuite
from alignment.rewards.protocol import Texts
from alignment.rollout import Rollout, SamplingConfig

PROMPTS_AT_ONCE = 32


def prompts_of(subject: Subject, settings: Mapping[str, Any]) -> Sequence[Group]:
    """All prompts that datamodules.PromptData reads with these settings."""
    from datamodules import PromptData

    data = PromptData(**settings, val_fraction=0, tokenizer=subject.policy.tokenizer)
    data.prepare_data()
    data.setup("fit")
    found = data.groups("train")
    return [found[i] for i in range(len(found))]


def sampled(subject: Subject, groups: Sequence[Group], count: int, sampling: SamplingConfig) -> list[Rollout]:
    """`count` completions of each prompt, some prompts at a time."""
    sampler = subject.policy.sampler()
    return [
        sampler.generate(groups[first : first + PROMPTS_AT_ONCE], count, sampling, seed=subject.seed, step=0)
        for first in range(0, len(groups), PROMPTS_AT_ONCE)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Replies with their rewards, N of each.

    Args:
        prompts, replies: texts. columns: of the rows, that of the prompt for each reply.
        values: reward -> a number for each reply, NaN where it abstained.
        lengths: the metrics `length` (mean, tokens) and `truncated` (share).
    """

    prompts: Sequence[str]
    replies: Sequence[str]
    columns: Sequence[Mapping[str, Any]]
    values: Mapping[str, Sequence[float]]
    lengths: Mapping[str, float]

    def column(self, name: str) -> list[str | None]:
        """Of each reply, as text; None where its row has none."""
        return [None if row.get(name) is None else str(row[name]) for row in self.columns]

    def table(self, shown: int) -> list[dict[str, Any]]:
        """The first `shown` for people."""
        texts = zip(self.prompts[:shown], self.replies[:shown], strict=True)
        return [
            {"prompt": prompt, "reply": reply, **{name: _shown(v[i]) for name, v in self.values.items()}}
            for i, (prompt, reply) in enumerate(texts)
        ]


def scored(
    subject: Subject, settings: Mapping[str, Any], samples: int, sampling: SamplingConfig, suite: RewardSuite
) -> Scored:
    """`samples` replies to each prompt, under all rewards of a suite, whose workers are ended afterwards."""
    groups = prompts_of(subject, settings)
    values: dict[str, list[float]] = {name: [] for name in suite.names}
    prompts: list[str] = []
    replies: list[str] = []
    columns: list[Mapping[str, Any]] = []
    lengths: list[int] = []
    cut: list[bool] = []
    with suite:
        for rollout in sampled(subject, groups, samples, sampling):
            batch, read = rollout.batch, Texts.decode(rollout.batch, subject.policy.tokenizer)
            matrix = suite.score(rollout, read, learn=False)
            for k, name in enumerate(matrix.names):
                values[name] += matrix.values[:, k].tolist()
            owners = batch.group_of.tolist()
            prompts += [read.prompts[g] for g in owners]
            replies += read.completions
            columns += [batch.columns[g] for g in owners]
            lengths += batch.completion_lengths.tolist()
            cut += rollout.truncated.tolist()
    means = {"length": statistics.fmean(lengths), "truncated": statistics.fmean(cut)}
    return Scored(prompts=prompts, replies=replies, columns=columns, values=values, lengths=means)


class Replies:
    """Replies to prompts under any rewards, as training uses them.

    Metrics, for each reward: `<reward>` (mean over replies), `<reward>/abstained` (share without a value), with a
    threshold `<reward>/share` (of replies that reach it) and for each category that share; `length` (tokens) and
    `truncated` (share).

    Args:
        path: prompts. rewards: name -> reward, as `model.rewards` of a run (docs/rewards.md).
        threshold: name -> value from which a reply counts.
        category: column of the category. samples, temperature, top_p, max_tokens: of the replies.
        max_rows: null: all. shown: rows of the table. settings: more arguments of datamodules.PromptData.
    """

    def __init__(
        self,
        path: str,
        rewards: dict[str, Any],
        threshold: dict[str, float] | None = None,
        category: str = "category",
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 256,
        max_rows: int | None = None,
        shown: int = 20,
        **settings: Any,
    ) -> None:
        if unknown := sorted(set(threshold or {}) - set(rewards)):
            raise UserError(f"threshold names '{unknown[0]}', which is none of the rewards {', '.join(rewards)}")
        self.suite = RewardSuite(rewards)
        self.threshold, self.category, self.samples, self.shown = threshold or {}, category, samples, shown
        self.sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        self.settings = {"path": path, "max_rows": max_rows, **settings}

    def run(self, subject: Subject) -> Result:
        found = scored(subject, self.settings, self.samples, self.sampling, self.suite)
        categories = found.column(self.category)
        metrics, intervals = dict(found.lengths), dict[str, tuple[float, float]]()
        for name, values in found.values.items():
            more, between = self._of(name, values, categories)
            metrics |= more
            intervals |= between
        return Result(metrics=metrics, intervals=intervals, table=found.table(self.shown))

    def _of(
        self, name: str, found: Sequence[float], categories: Sequence[str | None]
    ) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        known = [(v, c) for v, c in zip(found, categories, strict=True) if v == v]
        metrics = {f"{name}/abstained": 1 - len(known) / len(found)}
        if not known:
            return metrics, {}
        values = [v for v, _ in known]
        metrics[name] = statistics.fmean(values)
        intervals = {name: mean_interval(values)}
        if name in self.threshold:
            hits = [float(v >= self.threshold[name]) for v in values]
            metrics[f"{name}/share"] = statistics.fmean(hits)
            intervals[f"{name}/share"] = share_interval(sum(hits), len(hits))
            more, _ = by_category(hits, [c for _, c in known])
            metrics |= {f"{name}/{key.removesuffix('/accuracy')}/share": value for key, value in more.items()}
        return metrics, intervals


def _shown(value: float) -> float | str:
    return round(value, 4) if value == value else "abstained"


class Diversity:
    """How different sampled replies to one prompt are.

    Metrics: `distinct_1`, `distinct_2` (mean over prompts), `self_bleu` (less is more diverse), `length`.

    Args:
        path: prompts. samples: replies to each, two at least. temperature, top_p, max_tokens: of the replies.
        max_rows: null: all. settings: more arguments of datamodules.PromptData.
    """

    def __init__(
        self,
        path: str,
        samples: int = 4,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 256,
        max_rows: int | None = None,
        **settings: Any,
    ) -> None:
        if samples < 2 or temperature == 0:
            raise UserError("diversity is that of two or more samples at a temperature above 0")
        self.samples = samples
        self.sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        self.settings = {"path": path, "max_rows": max_rows, **settings}

    def run(self, subject: Subject) -> Result:
        said: list[list[str]] = []
        lengths: list[int] = []
        for rollout in sampled(subject, prompts_of(subject, self.settings), self.samples, self.sampling):
            texts = list(Texts.decode(rollout.batch, subject.policy.tokenizer).completions)
            said += [texts[i : i + self.samples] for i in range(0, len(texts), self.samples)]
            lengths += rollout.batch.completion_lengths.tolist()
        metrics = {f"distinct_{n}": statistics.fmean(distinct(replies, n) for replies in said) for n in (1, 2)}
        return Result(metrics={**metrics, "self_bleu": self_bleu(said), "length": statistics.fmean(lengths)})
