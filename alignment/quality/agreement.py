"""Whether annotators agree beyond chance: Krippendorff's alpha over all of them, Cohen's kappa of each two.

alpha = 1 - D_observed / D_expected over all pairs of votes on a unit (Krippendorff, Computing Krippendorff's
Alpha-Reliability, 2011), with the distance of the scale: nominal, ordinal or interval. Votes may be missing. A unit is
a row with several votes, or a pair (a labelled completion) that several rows judge.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alignment.errors import UserError
from alignment.quality.findings import Faults, Finding, needed, percent, share
from alignment.quality.reading import Corpus, Example, normal
from alignment.quality.settings import Level, Settings

_COMMON = 5
"""Units that two annotators must share for their kappa to be told."""
_LARGEST = 50_000_000
"""Entries of the largest array that krippendorff makes: units x values x values."""
_WEIGHTS = {"nominal": None, "ordinal": "linear", "interval": "quadratic"}
_LEVELS: tuple[Level, ...] = ("nominal", "ordinal", "interval")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is judged: annotator -> vote, and where it stands first."""

    votes: Mapping[str, Any]
    place: str


def agreement(corpus: Corpus, settings: Settings) -> Finding:
    """Value: alpha at the level of the votes."""
    units, named = _units(corpus.examples, settings)
    several = [unit for unit in units if len(unit.votes) > 1]
    if not several:
        why = "one vote a row" if not units else f"none of {len(units):,} judged pairs has a second vote"
        return _unknown(
            settings,
            f"not measurable: {why}",
            f"have some rows judged twice: a column {settings.votes_column} with all votes, or a row for each vote "
            f"with a column {settings.annotator_column}",
        )
    several, domain = _numbered(several)
    level = _level(settings.level, domain)
    if len(domain) == 1:
        return _unknown(settings, f"not measurable: all votes on {len(several):,} units are {domain[0]}", "")
    if len(several) * len(domain) ** 2 > _LARGEST:
        return _unknown(settings, f"not measurable: votes have {len(domain):,} different values", "round the votes")
    counts = np.zeros((len(several), len(domain)), dtype=np.int64)  # [units, values]
    code = {value: i for i, value in enumerate(domain)}
    for row, unit in zip(counts, several, strict=True):
        for vote in unit.votes.values():
            row[code[vote]] += 1
    numeric = not isinstance(domain[0], str)
    levels: Sequence[Level] = _LEVELS if numeric else ("nominal",)
    alphas = {name: _alpha(counts, domain, name) for name in levels}
    kappas = _kappas(several, code, level) if named else {}
    return _finding(settings, several, level, alphas, kappas, named, counts)


def _finding(
    settings: Settings,
    units: Sequence[Unit],
    level: Level,
    alphas: Mapping[Level, float],
    kappas: Mapping[tuple[str, str], tuple[float, int]],
    named: bool,
    counts: np.ndarray,
) -> Finding:
    limit = settings.limit("agreement")
    votes = int(counts.sum())
    total = (counts.sum(axis=1) * (counts.sum(axis=1) - 1)).sum()
    same = float((counts * (counts - 1)).sum() / total)
    differ = Faults(what="units whose votes differ, by their first row", show=settings.show)
    for unit in units:
        if len(set(unit.votes.values())) > 1:
            differ.add(unit.place)
    apart = Faults(what=f"pairs of annotators with kappa at most {limit.warn:g}", show=settings.show)
    for (a, b), (kappa, common) in sorted(kappas.items(), key=lambda item: item[1][0]):
        if kappa <= limit.warn:
            apart.add(f"{a} and {b}: {kappa:.2f} over {common}")
    shared = sum(common for _, common in kappas.values())
    mean = sum(kappa * common for kappa, common in kappas.values()) / shared if shared else None
    kappa_text = (
        f", kappa {mean:.2f} ({min(k for k, _ in kappas.values()):.2f} to {max(k for k, _ in kappas.values()):.2f})"
        if mean is not None
        else ""
    )
    return Finding(
        check="agreement",
        limit=limit,
        value=alphas[level],
        measured=f"alpha {alphas[level]:.3f} ({level}){kappa_text} over {len(units):,} units, {votes:,} votes; "
        f"{percent(same)} of vote pairs agree",
        advice="sharpen the guideline with the rows below, drop annotators who stand apart, or weigh rows by their "
        "votes (columns weight, margin)",
        figures={
            "level": level,
            **{f"alpha_{name}": value for name, value in alphas.items()},
            "kappa_mean": mean,
            "kappa": {f"{a} | {b}": kappa for (a, b), (kappa, _) in kappas.items()},
            "annotators": len({name for unit in units for name in unit.votes}) if named else None,
            "units": len(units),
            "votes": votes,
            "agreeing_vote_pairs": same,
            "units_with_dissent": differ.count,
            "dissent": share(differ.count, len(units)),
        },
        faults=[differ, apart],
    )


def _unknown(settings: Settings, why: str, advice: str) -> Finding:
    return Finding(check="agreement", limit=settings.limit("agreement"), measured=why, advice=advice)


def _alpha(counts: np.ndarray, domain: Sequence[Any], level: Level) -> float:
    krippendorff = needed("krippendorff", "agreement")
    values = np.arange(len(domain)) if isinstance(domain[0], str) else np.asarray(domain, dtype=np.float64)
    return float(krippendorff.alpha(value_counts=counts, value_domain=values, level_of_measurement=level))


def _kappas(units: Sequence[Unit], code: Mapping[Any, int], level: Level) -> dict[tuple[str, str], tuple[float, int]]:
    """(annotator, annotator) -> (kappa, units both judged). Weighted for scales: linearly for ordinal, by squares for
    interval ones. Two who both gave one and the same vote throughout have none."""
    metrics = needed("sklearn.metrics", "agreement")
    both: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for unit in units:
        for a, b in itertools.combinations(sorted(unit.votes), 2):
            both.setdefault((a, b), []).append((code[unit.votes[a]], code[unit.votes[b]]))
    out = {}
    for pair, votes in both.items():
        if len(votes) >= _COMMON and len({vote for two in votes for vote in two}) > 1:
            left, right = zip(*votes, strict=True)
            labels, weights = list(range(len(code))), _WEIGHTS[level]
            out[pair] = float(metrics.cohen_kappa_score(left, right, labels=labels, weights=weights)), len(votes)
    return out


# ---------------------------------------------------------------------- votes


def _units(examples: Sequence[Example], settings: Settings) -> tuple[list[Unit], bool]:
    """(what is judged, whether an annotator's name means one person throughout)."""
    column = settings.votes_column
    if any(column in example.columns for example in examples):
        cast = [(_votes(e.columns[column]), e) for e in examples if column in e.columns]
        units = [Unit(votes=votes, place=e.place) for votes, e in cast if votes]
        # Positions in a list are people only where all lists are equally long.
        positions = {len(_listed(e.columns[column])) for _, e in cast if not isinstance(_read(e.columns[column]), dict)}
        return units, len(positions) <= 1
    grouped: dict[tuple[Any, ...], tuple[dict[str, Any], str]] = {}
    for example in examples:
        name = example.columns.get(settings.annotator_column)
        texts = sorted(set(map(normal, example.completions)))
        if name is None or len(texts) != len(example.completions) or not texts:
            continue
        votes, _ = grouped.setdefault((example.key, *texts), ({}, example.place))
        votes.setdefault(str(name), _judgement(example, texts))
    return [Unit(votes=votes, place=place) for votes, place in grouped.values()], True


def _judgement(example: Example, texts: Sequence[str]) -> str:
    if example.labels is not None:
        return "good" if example.labels[0] else "bad"
    return f"completion {texts.index(normal(example.completions[0])) + 1}"


def _read(value: Any) -> Any:
    """A cell of a table as the list or mapping that it spells."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return [part for part in re.split(r"[,;|\s]+", value) if part]


def _listed(value: Any) -> list[Any]:
    found = _read(value)
    return list(found) if isinstance(found, list | tuple) else [found]


def _votes(value: Any) -> dict[str, Any]:
    """annotator -> vote; missing ones (null, empty, NaN) are left out."""
    found = _read(value)
    items = found.items() if isinstance(found, dict) else enumerate(_listed(value), start=1)
    named = {str(name): _vote(vote) for name, vote in items}
    return {name: vote for name, vote in named.items() if vote is not None}


def _vote(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        try:
            return None if math.isnan(value) else float(value)
        except OverflowError:  # a whole number beyond all floats, which JSON may hold: a word
            return "inf" if value > 0 else "-inf"
    text = normal(str(value)) if value is not None else ""
    return text or None


def _numbered(units: Sequence[Unit]) -> tuple[list[Unit], list[Any]]:
    """(units whose votes are all numbers, or all words; the different votes in their order)."""
    numbers: dict[Any, Any] = {vote: _number(vote) for unit in units for vote in unit.votes.values()}
    numeric = all(number is not None for number in numbers.values())
    words: dict[Any, Any] = {vote: f"{vote:g}" if isinstance(vote, float) else vote for vote in numbers}
    changed = numbers if numeric else words
    out = [Unit(votes={name: changed[vote] for name, vote in unit.votes.items()}, place=unit.place) for unit in units]
    return out, sorted(set(changed.values()))


def _number(vote: Any) -> float | None:
    try:
        number = float(vote)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _level(asked: Level, domain: Sequence[Any]) -> Level:
    words = isinstance(domain[0], str)
    if asked == "auto":
        return "nominal" if words or len(domain) <= 2 else "ordinal"
    if words and asked != "nominal":
        raise UserError(f"--level {asked} needs votes that are numbers; there is '{domain[0]}'")
    return asked
