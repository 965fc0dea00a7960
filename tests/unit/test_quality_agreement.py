"""Agreement of annotators: published values of alpha and kappa, from both ways to write votes down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.quality.agreement import agreement
from alignment.quality.settings import Settings
from tests.quality_toys import corpus, pair

pytest.importorskip("krippendorff")

# Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section C to E: four observers, twelve units.
OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
    (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
)
PUBLISHED = {"nominal": 0.743, "ordinal": 0.815, "interval": 0.849}
UNITS = [list(votes) for votes in zip(*OBSERVERS, strict=True)]


def voted(votes: Any) -> list[dict[str, Any]]:
    return [pair(f"Question {i}?", f"Reply {i}.", f"No {i}.", votes=v) for i, v in enumerate(votes)]


def judged(counts: dict[tuple[int, int], int]) -> list[dict[str, Any]]:
    """Pairs that ann and bob judge: (which of two replies ann prefers, which bob does) -> how many pairs."""
    out = []
    for (ann, bob), count in counts.items():
        for _ in range(count):
            number = len(out) // 2
            replies = (f"alpha {number}", f"beta {number}")
            for name, best in (("ann", ann), ("bob", bob)):
                out.append(pair(f"Question {number}?", replies[best], replies[1 - best], annotator=name))
    return out


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
def test_alpha_as_published(level: Any, tmp_path: Path) -> None:
    found = agreement(corpus(tmp_path, voted(UNITS)), Settings(level=level))
    assert found.value == pytest.approx(PUBLISHED[level], abs=5e-4)
    for name, value in PUBLISHED.items():
        assert found.figures[f"alpha_{name}"] == pytest.approx(value, abs=5e-4)
    # The twelfth unit has one vote: nothing to agree with.
    assert (found.figures["units"], found.figures["votes"], found.figures["annotators"]) == (11, 40, 4)
    assert found.verdict == "ok"


def test_five_grades_are_ordinal_unless_told_otherwise(tmp_path: Path) -> None:
    found = agreement(corpus(tmp_path, voted(UNITS)), Settings())
    assert (found.figures["level"], round(found.value or 0, 3)) == ("ordinal", 0.815)


def test_votes_as_mappings_texts_and_cells_of_a_table(tmp_path: Path) -> None:
    """The same votes in other writings give the same alpha; words have no other level than nominal."""
    names = ("a", "b", "c", "d")
    mappings = [{n: v for n, v in zip(names, unit, strict=True) if v is not None} for unit in UNITS]
    words = [{n: f"grade {v}" for n, v in m.items()} for m in mappings]
    for votes in (mappings, words, [json.dumps(unit) for unit in UNITS]):
        found = agreement(corpus(tmp_path, voted(votes)), Settings(level="nominal"))
        assert found.value == pytest.approx(0.743, abs=5e-4)
    with pytest.raises(UserError, match="--level ordinal needs votes that are numbers; there is 'grade 1'"):
        agreement(corpus(tmp_path, voted(words)), Settings(level="ordinal"))


def test_kappa_of_two_who_repeat_each_other(tmp_path: Path) -> None:
    """20 and 15 of 50 alike: kappa = (0.7 - 0.5) / (1 - 0.5). Of the 100 votes 55 are for one side: alpha is
    1 - 0.3 / (2 * 55 * 45 / (100 * 99)) = 0.4 as well."""
    found = agreement(corpus(tmp_path, judged({(0, 0): 20, (0, 1): 5, (1, 0): 10, (1, 1): 15})), Settings())
    assert found.figures["kappa"] == {"ann | bob": pytest.approx(0.4)}
    assert found.figures["kappa_mean"] == pytest.approx(0.4)
    assert found.value == pytest.approx(0.4)
    assert found.figures["agreeing_vote_pairs"] == pytest.approx(0.7)
    assert found.verdict == "fail"
    differ, apart = found.faults
    assert (differ.count, differ.places[0]) == (15, "row 41")  # the first pair on which they differ is the 21st
    assert apart.places == ["ann and bob: 0.40 over 50"]


def test_labels_of_completions_are_votes_too(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Question {i}?", "completion": "Yes.", "label": good, "annotator": name}
        for i, votes in enumerate([(True, True), (False, False), (True, True), (False, False)])
        for name, good in zip(("ann", "bob"), votes, strict=True)
    ]
    found = agreement(corpus(tmp_path, rows), Settings())
    assert (found.value, found.verdict) == (1.0, "ok")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (voted([None, None]), "one vote a row"),
        (voted([[1], [0]]), "none of 2 judged pairs has a second vote"),
        (voted([[1, 1], [1, 1]]), "all votes on 2 units are 1"),
        ([pair("Why?", "a", "b", annotator="ann")], "none of 1 judged pairs has a second vote"),
    ],
)
def test_not_measurable(rows: list[dict[str, Any]], told: str, tmp_path: Path) -> None:
    found = agreement(corpus(tmp_path, rows), Settings())
    assert found.verdict == "n/a"
    assert told in found.measured


def test_lists_of_different_lengths_name_nobody(tmp_path: Path) -> None:
    """Alpha does not ask who voted; kappa does."""
    found = agreement(corpus(tmp_path, voted([[1, 1, 1], [0, 0], [1, 1], [0, 0, 0], [1, 1], [0, 0]])), Settings())
    assert found.value == 1.0
    assert found.figures["kappa"] == {}
    assert found.figures["annotators"] is None


def test_votes_that_are_no_numbers_of_this_world(tmp_path: Path) -> None:
    """Whole numbers beyond all floats, which JSON holds, and a text that never ends its brackets: words, no crash."""
    votes = [[10**400, 10**400], [-(10**400), -(10**400)], ["[" * 5000, "[" * 5000], "[" * 50_000]
    found = agreement(corpus(tmp_path, voted(votes)), Settings())
    assert (found.value, found.figures["level"], found.figures["units"]) == (1.0, "nominal", 3)
