"""Repeated rows and rows of one split in another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alignment.quality.duplicates import duplicates, leakage, near_duplicates
from alignment.quality.reading import read
from alignment.quality.settings import Settings
from alignment.quality.shingles import bands, jaccard, near, shingles, words
from tests.quality_toys import corpus, pair, write

pytest.importorskip("datasketch")
# 25 words: 23 runs of three; another last word changes one of them, so 22 of 24 are shared.
LONG = (
    "Please write a short and friendly letter to all of our customers that explains why the shop will be closed for "
    "two weeks in {}"
)


def test_words_and_shingles() -> None:
    assert words("1 + 5 = Six!") == ["1", "+", "5", "=", "six", "!"]
    assert words("今日はABC") == ["今", "日", "は", "abc"]
    assert len(shingles("one two three four", 3)) == 2
    assert len(shingles("one", 3)) == len(shingles("", 3)) == 1
    assert not set(shingles("one two", 3, tag=1)) & set(shingles("one two", 3, tag=2))
    a, b = (np.array(x, dtype=np.uint32) for x in ([1, 2, 3], [2, 3, 4, 5]))
    assert jaccard(a, b) == pytest.approx(2 / 5)


def test_bands_find_99_of_100_pairs_at_the_threshold() -> None:
    """1 - (1 - 0.8^6)^21 = 0.998, while 18 bands of 7 rows find 1 - (1 - 0.8^7)^18 = 0.986."""
    assert bands(0.8) == (21, 6)
    assert bands(1.0) == (2, 64)


def test_near_texts_are_compared_exactly() -> None:
    texts = [LONG.format(month) for month in ("August", "May")] + ["Something else altogether, quite short."]
    parts = [[shingles(text, 3)] for text in texts]
    assert jaccard(*(part[0] for part in parts[:2])) == pytest.approx(22 / 24)
    assert near(parts, 0.9, "leakage") == [None, 0, None]
    assert near(parts, 0.92, "leakage") == [None, None, None]
    assert near(parts, 0.9, "leakage", known=2) == [None, None, None]  # the known ones are not compared


def test_duplicates(tmp_path: Path) -> None:
    rows = [
        pair("Why is that?", "Because it is.", "No."),
        pair("why  is that?", "Because it is.", "no."),  # case and white space
        pair("Why is that?", "No.", "Because it is."),  # the opposite judgement
        pair("Why is that?", "Because it is.", "Never."),
        pair("Why is it?", "It is.", "No.", annotator="ann"),
        pair("Why is it?", "It is.", "No.", annotator="bob"),  # somebody else
        pair("Why is it?", "It is.", "No.", annotator="ann"),
    ]
    found = duplicates(corpus(tmp_path, rows), Settings())
    assert found.faults[0].places == ["row 2 = row 1", "row 7 = row 5"]
    assert found.value == pytest.approx(2 / 7)
    prompts = duplicates(corpus(tmp_path, [{"prompt": "Why?"}, {"prompt": "How?"}, {"prompt": "WHY?"}]), Settings())
    assert prompts.faults[0].places == ["row 3 = row 1"]


def test_repetitions_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    rows = corpus(tmp_path, [pair("Why?", "Because.", "No."), pair("why?", "Because.", "No.")])
    monkeypatch.setattr("alignment.quality.reading.normal", lambda text: asked.append(text) or text.casefold())
    assert duplicates(rows, Settings()).value == 0.5
    assert near_duplicates(rows, Settings()).value == 0.0
    assert asked == ["Because.", "No."] * 2


def test_near_duplicates(tmp_path: Path) -> None:
    rows = [
        pair(LONG.format("August"), "Dear customers, we are closed.", "No."),
        pair(LONG.format("May"), "Dear customers, we are closed.", "No."),  # the prompt is nearly the same
        pair(LONG.format("August"), "We shall be away, dear all.", "Never ask."),  # another comparison of one prompt
        pair(LONG.format("August"), "Dear customers, we are closed.", "No."),  # exactly the first: no near one
        pair(LONG.format("June"), "Dear customers, we are closed.", "No.", annotator="ann"),
        pair(LONG.format("June"), "Dear customers, we are closed.", "No.", annotator="bob"),  # the same, judged again
    ]
    found = near_duplicates(corpus(tmp_path, rows), Settings())
    assert found.faults[0].places == ["row 2 ~ row 1", "row 5 ~ row 1"]
    assert found.value == pytest.approx(2 / 6)
    assert near_duplicates(corpus(tmp_path, rows), Settings(similarity=0.95)).value == 0.0


def test_leakage_between_files(tmp_path: Path) -> None:
    """Of four test rows one prompt is in training, one (with two rows) is like one of training, one is new."""
    train = [pair("What is two and two?", "Four.", "Five."), pair(LONG.format("August"), "Dear all.", "No.")]
    test = [
        pair("what is two and TWO?", "4", "5"),
        pair(LONG.format("May"), "Hello.", "No."),
        pair(LONG.format("May"), "Hello.", "Go away."),
        pair("Where is Rome?", "In Italy.", "In France."),
    ]
    files = [write(tmp_path / "test.jsonl", test), write(tmp_path / "train.jsonl", train)]
    found = leakage(read(files, Settings()), Settings())
    exact, similar = found.faults
    assert exact.places == ["test row 1 = train row 1"]
    assert similar.places == ["test row 2 ~ train row 2", "test row 3 ~ train row 2"]
    assert found.value == 0.75
    assert found.verdict == "fail"
    alone = leakage(read(files[:1], Settings()), Settings())
    assert (alone.verdict, alone.measured) == ("n/a", "not measurable: one split (test)")


def test_leakage_between_values_of_a_column(tmp_path: Path) -> None:
    rows = [
        {"text": "Once upon a time there was a king.", "part": "train"},
        {"text": "Once upon a time there was a king.", "part": "val"},
        {"text": "A dog ran home.", "part": "val"},
    ]
    settings = Settings(split_column="part")
    found = leakage(corpus(tmp_path, rows, settings), settings)
    assert found.faults[0].places == ["row 2 (val) = row 1 (train)"]
    assert found.value == 0.5
