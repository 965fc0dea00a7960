"""Tasks that read log-probs: nothing is sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.chat import ChatEncoder
from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject, by_category, mean_interval, share_interval

MICRO_BATCH_TOKENS = 4096
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@torch.no_grad()
def completion_logps(subject: Subject, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """[N] summed log-probs of scored tokens, and [N] how many, of completions in their order."""
    batch = GroupBatch.from_groups(groups).to(subject.policy.model.device)
    sums, counts = [], []
    for micro in batch.split(MICRO_BATCH_TOKENS):
        logps = subject.engine(micro).logps
        assert logps is not None
        sums.append(micro.sum_tokens(logps).double().cpu())
        counts.append(micro.scored_lengths().double().cpu())
    return torch.cat(sums), torch.cat(counts)


def _groups(data: Any) -> Sequence[Group]:
    """All rows of a DataModule that holds nothing back."""
    data.prepare_data()
    data.setup("fit")
    found: Sequence[Group] = data.groups("train")
    return found


class Perplexity:
    """exp of the mean negative log-prob of a token, over the completions (or whole texts) of rows.

    Metrics: `perplexity`, `loss` (nats per token), `tokens`; the interval is that of rows.

    Args:
        path: rows as datamodules.SupervisedData reads them. split: of a data set with several.
        max_rows: null: all. settings: more arguments of the DataModule.
    """

    def __init__(self, path: str, split: str = "train", max_rows: int | None = None, **settings: Any) -> None:
        self.settings = {"path": path, "split": split, "max_rows": max_rows, **settings}

    def run(self, subject: Subject) -> Result:
        from datamodules import SupervisedData

        data = SupervisedData(**self.settings, val_fraction=0, tokenizer=subject.policy.tokenizer)
        sums, counts = completion_logps(subject, list(_groups(data)))
        loss = float(-sums.sum() / counts.sum())
        rows = [-s / n for s, n in zip(sums.tolist(), counts.tolist(), strict=True) if n]
        low, high = mean_interval(rows)
        return Result(
            metrics={"perplexity": math.exp(loss), "loss": loss, "tokens": float(counts.sum())},
            intervals={"loss": (low, high)},
        )


class MultipleChoice:
    """Questions with choices: the choice of the largest log-prob is the answer.

    Rows have `question` (or `prompt`), `choices` (texts) and `answer` (number from 0, letter, or the text itself), and
    may have a category. Metrics: `accuracy`, and for each category `<category>/accuracy` with their mean.

    Args:
        path: json, jsonl, csv, parquet, a folder or a hub id. split: of a data set with several.
        category: column of the category. max_rows: null: all.
        normalise: "tokens": the mean log-prob of a choice's tokens. "none": their sum.
        template: how a question becomes a prompt (docs/data.md).
    """

    def __init__(
        self,
        path: str,
        split: str = "test",
        category: str = "category",
        max_rows: int | None = None,
        normalise: Literal["tokens", "none"] = "tokens",
        template: Literal["auto", "chat", "plain", "raw"] = "auto",
    ) -> None:
        if normalise not in ("tokens", "none"):
            raise UserError(f"normalise is '{normalise}'; use tokens or none")
        self.path, self.split, self.category, self.max_rows = path, split, category, max_rows
        self.normalise, self.template = normalise, template

    def run(self, subject: Subject) -> Result:
        encoder = ChatEncoder(tokenizer=subject.policy.tokenizer, template=self.template)
        rows = list(read(self.path, self.split, self.max_rows))
        groups, answers = [], []
        for place, row in rows:
            question, choices, answer = _question(place, row)
            completions = [encoder.completion(choice, end=False) for choice in choices]
            groups.append(Group(prompt=encoder.prompt(question), completions=completions))
            answers.append(answer)
        sums, counts = completion_logps(subject, groups)
        scores = sums / counts if self.normalise == "tokens" else sums
        hits, first = [], 0
        for group, answer in zip(groups, answers, strict=True):
            own = scores[first : first + len(group.completions)]
            hits.append(float(int(own.argmax()) == answer))
            first += len(group.completions)
        categories = [None if row.get(self.category) is None else str(row[self.category]) for _, row in rows]
        more, table = by_category(hits, categories)
        return Result(
            metrics={"accuracy": sum(hits) / len(hits), **more},
            intervals={"accuracy": share_interval(sum(hits), len(hits))},
            table=table,
        )


def _question(place: str, row: Mapping[str, Any]) -> tuple[str, Sequence[str], int]:
    """(question, choices, number of the right one)."""
    question = row.get("question", row.get("prompt"))
    choices = row.get("choices")
    if isinstance(choices, Mapping):  # {"text": [...], "label": [...]}, as some data sets have them
        labels, choices = list(choices.get("label") or []), choices.get("text")
    else:
        labels = list(LETTERS)
    if not isinstance(question, str) or not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f"{place}: a question needs question, two or more choices, and answer")
    texts, answer = [str(choice) for choice in choices], row.get("answer", row.get("answerKey"))
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return question, texts, answer
    if isinstance(answer, str) and answer in labels[: len(texts)]:
        return question, texts, labels.index(answer)
    if isinstance(answer, str) and texts.count(answer) == 1:
        return question, texts, texts.index(answer)
    raise UserError(f"{place}: answer {answer!r} is no number, letter or text of its {len(texts)} choices")


class PreferenceAccuracy:
    """Share of pairs whose chosen reply scores above the rejected one (ties half), for example RewardBench's files.

    A reward model scores by itself. A policy scores by its log-probs: minus the reference's with `reference` (the
    implicit reward of DPO, arXiv 2305.18290), else by their mean over tokens.
    Metrics: `accuracy`, `margin` (mean difference of scores), and per category.

    Args:
        path: rows as datamodules.PreferenceData reads them. split: of a data set with several.
        category: column of the category (RewardBench: subset). max_rows: null: all.
        reference: name of the policy's reference model. settings: more arguments of the DataModule.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        category: str = "subset",
        max_rows: int | None = None,
        reference: str | None = None,
        **settings: Any,
    ) -> None:
        self.settings = {"path": path, "split": split, "max_rows": max_rows, **settings}
        self.category, self.reference = category, reference

    def run(self, subject: Subject) -> Result:
        from datamodules import PreferenceData

        tokenizer = self._tokenizer(subject)
        groups = list(_groups(PreferenceData(**self.settings, val_fraction=0, tokenizer=tokenizer)))
        scores = self._scores(subject, groups).view(-1, 2)
        margins = (scores[:, 0] - scores[:, 1]).tolist()
        hits = [1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins]
        columns = [group.columns.get(self.category) for group in groups]
        more, table = by_category(hits, [None if c is None else str(c) for c in columns])
        return Result(
            metrics={"accuracy": sum(hits) / len(hits), "margin": sum(margins) / len(margins), **more},
            intervals={"accuracy": share_interval(sum(hits), len(hits)), "margin": mean_interval(margins)},
            table=table,
        )

    def _tokenizer(self, subject: Subject) -> Any:
        if not subject.is_reward_model:
            return subject.policy.tokenizer
        return subject.reward_model.members[0].tokenizer

    def _scores(self, subject: Subject, groups: Sequence[Group]) -> Tensor:
        """[2 x pairs], chosen and rejected in turn."""
        if subject.is_reward_model:
            if self.reference is not None:
                raise UserError("reference is for a policy; a reward model scores by itself")
            rows = [(list(g.prompt), list(c)) for g in groups for c in g.completions]
            prompts, completions = [p for p, _ in rows], [c for _, c in rows]
            empty = [""] * len(rows)
            found = subject.reward_model(empty, empty, prompts, completions)
            return torch.tensor([math.nan if v is None else v for v in found], dtype=torch.float64)
        sums, counts = completion_logps(subject, groups)
        if self.reference is None:
            return sums / counts
        other = Subject(self.reference, root=subject.root, device=subject.device)
        return sums - completion_logps(other, groups)[0]


def read(path: str, split: str, max_rows: int | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where it stands, values) of rows of any form. Raises UserError for one that cannot be read, and for none."""
    from datamodules.reading import open_source

    count = 0
    for record in open_source(path, split=split, config=None, kind="prompts", size=max_rows).records():
        if max_rows is not None and count == max_rows:
            return
        if record.error is not None or not isinstance(record.values, Mapping):
            raise UserError(f"{path} {record.place}: {record.error or 'no mapping of columns to values'}")
        count += 1
        yield f"{path} {record.place}", record.values
    if not count:
        raise UserError(f"'{path}' holds no rows")
