"""Rows that say the same twice, and rows of one split that are in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from alignment.quality.findings import Faults, Finding, percent, share
from alignment.quality.reading import Corpus, Example, normal
from alignment.quality.settings import Settings
from alignment.quality.shingles import near, shingles


def duplicates(corpus: Corpus, settings: Settings) -> Finding:
    """Rows equal to an earlier one of their split but for case and white space. Two annotators of one pair are none."""
    fault = Faults(what="equal to an earlier row", show=settings.show)
    for example, first in zip(corpus.examples, corpus.repeats, strict=True):
        if first is not None:
            fault.add(f"{example.place} = {first.place}")
    rows = len(corpus.examples)
    return Finding(
        check="duplicates",
        limit=settings.limit("duplicates"),
        value=share(fault.count, rows),
        measured=f"{fault.count:,} of {rows:,} rows are repeated ({percent(share(fault.count, rows))})",
        advice="remove them: they weigh one opinion several times (a run leaves out exact repetitions by itself)",
        figures={"rows": rows, "repeated": fault.count},
        faults=[fault],
    )


def near_duplicates(corpus: Corpus, settings: Settings) -> Finding:
    """Rows whose prompt and whose completions are nearly those of an earlier row of their split, exact repetitions left
    out. Rows that compare other completions of the same prompt are none."""
    fault = Faults(what=f"similar to an earlier row (Jaccard ≥ {settings.similarity:g})", show=settings.show)
    for split in corpus.splits:
        new = [e for e, first in zip(corpus.examples, corpus.repeats, strict=True) if first is None]
        rows = _of_one_annotator([e for e in new if e.split == split], settings)
        parts = [_parts(example, settings.shingle) for example in rows]
        for example, earlier in zip(rows, near(parts, settings.similarity, "near_duplicates"), strict=True):
            if earlier is not None:
                fault.add(f"{example.place} ~ {rows[earlier].place}")
    count = len(corpus.examples)
    return Finding(
        check="near_duplicates",
        limit=settings.limit("near_duplicates"),
        value=share(fault.count, count),
        measured=f"{fault.count:,} of {count:,} rows nearly repeat another ({percent(share(fault.count, count))})",
        advice="keep one of each group, or make what differs between them what they are about",
        figures={"rows": count, "similar": fault.count, "similarity": settings.similarity, "shingle": settings.shingle},
        faults=[fault],
    )


def _of_one_annotator(rows: Sequence[Example], settings: Settings) -> list[Example]:
    """Rows without those that judge a pair again which somebody else has judged."""
    seen: set[tuple[object, ...]] = set()
    out = []
    for example in rows:
        pair = (example.key, *sorted(map(normal, example.completions)))
        if settings.annotator_column not in example.columns or pair not in seen:
            out.append(example)
        seen.add(pair)
    return out


def _parts(example: Example, size: int) -> list[np.ndarray]:
    return [shingles(text, size, tag) for tag, text in enumerate((example.prompt, *example.completions))]


def leakage(corpus: Corpus, settings: Settings) -> Finding:
    """Rows of a split whose prompt is, or nearly is, one of a split before it (training comes first).

    Value: their share of the rows of all splits but the first.
    """
    limit, splits = settings.limit("leakage"), corpus.splits
    if len(splits) < 2:
        only = splits[0] if splits else "none"
        return Finding(
            check="leakage",
            limit=limit,
            measured=f"not measurable: one split ({only})",
            advice=f"give the files of several splits, or a column {settings.split_column}",
        )
    order = {name: i for i, name in enumerate(splits)}
    rows = sorted(corpus.examples, key=lambda e: order[e.split])
    alike = f"prompt like one of an earlier split (Jaccard ≥ {settings.similarity:g})"
    exact = Faults(what="prompt of an earlier split", show=settings.show)
    similar = Faults(what=alike, show=settings.show)
    first: dict[int, Example] = {}
    rest: list[Example] = []
    for example in rows:
        source = first.setdefault(example.key, example)
        if order[source.split] < order[example.split]:
            exact.add(f"{_where(example)} = {_where(source)}")
        else:
            rest.append(example)
    _near_leaks(rest, order, similar, settings)
    later = sum(order[e.split] > 0 for e in rows)
    between = " before ".join(splits)
    return Finding(
        check="leakage",
        limit=limit,
        value=share(exact.count + similar.count, later),
        measured=f"{exact.count:,} rows with a prompt of an earlier split, {similar.count:,} with one like it, of "
        f"{later:,} ({between})",
        advice="remove them from one side: what is seen in training measures memory (a run drops equal prompts from "
        "the training rows, not similar ones)",
        figures={"splits": splits, "exact": exact.count, "near": similar.count, "held_out_rows": later},
        faults=[exact, similar],
    )


def _near_leaks(rows: Sequence[Example], order: Mapping[str, int], similar: Faults, settings: Settings) -> None:
    """Add the rows whose prompt is like one of an earlier split. Each prompt is compared once in each split, so that a
    prompt's many rows do not hide those of another split."""
    for split in list(order)[1:]:
        before = _first_rows([e for e in rows if order[e.split] < order[split]])
        texts = [*before, *_first_rows([e for e in rows if e.split == split])]
        parts = [[shingles(example.asked, settings.shingle)] for example in texts]
        found = near(parts, settings.similarity, "leakage", known=len(before))
        of_prompt = {e.key: texts[first] for e, first in zip(texts, found, strict=True) if first is not None}
        for example in rows:
            if example.split == split and example.key in of_prompt:
                source = of_prompt[example.key]
                similar.add(f"{_where(example)} ~ {_where(source)}")


def _where(example: Example) -> str:
    """A row and its split, which is in the row's name where files are splits."""
    return example.place if example.place.startswith(f"{example.split} ") else f"{example.place} ({example.split})"


def _first_rows(rows: Sequence[Example]) -> list[Example]:
    """The first row of each prompt."""
    found: dict[int, Example] = {}
    for example in rows:
        found.setdefault(example.key, example)
    return list(found.values())
