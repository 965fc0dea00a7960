"""Match with a FAQ: BM25 worked out by hand, cosines of word counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.rewards import FaqMatch
from alignment.rewards.calls import wanted
from tests.reward_models import save_counts

pytest.importorskip("rank_bm25")

FAQ = "The price is 29 dollars.\nThe weight is 280 grams.\n\nThe colour is red.\n"


def matched(reward: FaqMatch, reply: str, entry: Any) -> float | None:
    (value,) = reward([reply], [{"answer": entry}])
    return value


@pytest.mark.parametrize(
    ("reply", "entry", "value"),
    [
        ("It has a warranty of 3 years.", "3 years", 1.0),
        ("3 Years!", "The warranty is 3 years.", 2 / 5),  # of five words that weigh the same
        ("years years years 3 3", "The warranty is 3 years.", 2 / 5),  # again and again is no more
        ("Thirty-six months, I think.", "The warranty is 3 years.", 0.0),
        ("36", ["3 years", "36 months"], 1 / 2),  # the best of two
        ("36 months", ("3 years", None, "36 months"), 1.0),
        ("", "3 years", 0.0),
        # "no" stands twice: 2 * 2.5 / (2 + 1.5) = 10/7 against 2.5 / 2.5 = 1 of "refund".
        ("No!", "no, no refund", (10 / 7) / (10 / 7 + 1)),
        ("Die Garantie beträgt drei Jahre.", "DIE GARANTIE", 1.0),
        ("3 years", None, None),
        ("3 years", "", None),
        ("3 years", [], None),
        ("3 years", "...", None),
    ],
)
def test_words_of_an_entry(reply: str, entry: Any, value: float | None) -> None:
    assert matched(FaqMatch(), reply, entry) == (value if value is None else pytest.approx(value, abs=1e-9))


def test_rare_words_weigh_more(tmp_path: Path) -> None:
    """Of three entries all hold "the" and "is": ln(4/3); one holds "price", "29", "dollars": ln 4. An entry that is not
    in the file is a fourth: its words are all its own."""
    (tmp_path / "faq.txt").write_text(FAQ)
    reward = FaqMatch(faq=str(tmp_path / "faq.txt"))
    common, rare = math.log(4 / 3), math.log(4)
    whole = 2 * common + 3 * rare
    entry = "the price is 29 dollars"
    assert matched(reward, "The colour is red.", entry) == pytest.approx(2 * common / whole)
    assert matched(reward, "29 dollars", entry) == pytest.approx(2 * rare / whole)
    assert matched(reward, "The price is 29 dollars!", entry) == pytest.approx(1.0)
    assert matched(reward, "30 days", "Returns within 30 days") == pytest.approx(1 / 2)
    assert matched(reward, "29 dollars", [entry, "Returns within 30 days"]) < 1


def test_the_column_is_known_before_the_first_call() -> None:
    assert wanted(FaqMatch(column="entry")).columns == ("entry",)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("sentence_transformers")
    return save_counts(tmp_path_factory.mktemp("counts"), ["refund", "within", "30", "days", "no"])


def test_cosines_of_meaning(counts: str) -> None:
    """Four words against two of them: 2 / (2 sqrt 2); one word in common of two and four: 1 / (sqrt 2 * 2)."""
    reward = FaqMatch(method="embedding", model=counts, device="cpu")
    replies = ["30 days", "No refund", "refund within 30 days", "hello", "", "no", "no"]
    entries: list[Any] = ["Refund within 30 days"] * 5 + [["days", "no refund"], None]
    found = reward(replies, [{"answer": entry} for entry in entries])
    expected = [1 / math.sqrt(2), 1 / (2 * math.sqrt(2)), 1.0, 0.0, 0.0, 1 / math.sqrt(2)]
    assert found[:6] == pytest.approx(expected, abs=1e-6)
    assert found[6] is None


def test_what_cannot_work(tmp_path: Path, counts: str) -> None:
    for settings, told in (
        ({"method": "tfidf"}, "method is 'tfidf'; use bm25 or embedding"),
        ({"method": "embedding"}, "takes a model"),
        ({"model": "x"}, "model is for method: embedding"),
        ({"faq": str(tmp_path / "none.txt")}, "cannot be read"),
        ({"method": "embedding", "model": "./nowhere"}, "no model folder './nowhere'"),
        ({"method": "embedding", "model": str(tmp_path)}, r"has no \*\.safetensors weights"),
        ({"method": "embedding", "model": counts, "device": "cuda:99"}, "reward workers see no GPU"),
        ({"method": "embedding", "model": counts, "device": "gpu"}, "device 'gpu' is not one of torch's"),
    ):
        with pytest.raises(UserError, match=told):
            FaqMatch(**settings)  # type: ignore[arg-type]
    (tmp_path / "empty.txt").write_text("...\n")
    with pytest.raises(UserError, match="no line with a word"):
        FaqMatch(faq=str(tmp_path / "empty.txt"))
