"""Tasks that sample replies and judge them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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


class Replies:
    """Replies to prompts under any rewards, as training uses them: harmful replies by a classifier, refusals, a judge.

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
        groups = prompts_of(subject, self.settings)
        values: dict[str, list[float]] = {name: [] for name in self.suite.names}
        lengths: list[int] = []
        cut: list[bool] = []
        texts: list[tuple[str, str]] = []
        categories: list[str | None] = []
        with self.suite:
            for rollout in sampled(subject, groups, self.samples, self.sampling):
                batch, read = rollout.batch, Texts.decode(rollout.batch, subject.policy.tokenizer)
                matrix = self.suite.score(rollout, read, learn=False)
                for k, name in enumerate(matrix.names):
                    values[name] += matrix.values[:, k].tolist()
                lengths += batch.completion_lengths.tolist()
                cut += rollout.truncated.tolist()
                owners = batch.group_of.tolist()
                texts += [(read.prompts[g], read.completions[row]) for row, g in enumerate(owners)]
                columns = [batch.columns[g].get(self.category) for g in owners]
                categories += [None if c is None else str(c) for c in columns]
        metrics = {"length": statistics.fmean(lengths), "truncated": statistics.fmean(cut)}
        intervals: dict[str, tuple[float, float]] = {}
        for name, found in values.items():
            more, between = self._of(name, found, categories)
            metrics |= more
            intervals |= between
        table = [
            {"prompt": prompt, "reply": reply, **{n: _shown(v[i]) for n, v in values.items()}}
            for i, (prompt, reply) in enumerate(texts[: self.shown])
        ]
        return Result(metrics=metrics, intervals=intervals, table=table)

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
