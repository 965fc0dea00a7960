"""Sentiment and toxicity: VADER's published values, classifiers whose probabilities are set, word lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.rewards import Sentiment, SequenceClassifier, Toxicity
from tests.reward_models import save_classifier


@pytest.mark.parametrize(
    ("text", "compound"),
    [  # the README of vaderSentiment
        ("VADER is smart, handsome, and funny.", 0.8316),
        ("VADER is smart, handsome, and funny!", 0.8439),
        ("VADER is not smart, handsome, nor funny.", -0.7424),
        ("The book was only kind of good.", 0.3832),
        ("Not bad at all", 0.431),
    ],
)
def test_the_sentiment_that_vader_publishes(text: str, compound: float) -> None:
    pytest.importorskip("vaderSentiment")
    assert Sentiment()([text]) == [pytest.approx((1 + compound) / 2, abs=1e-9)]


def test_support_replies_by_vader() -> None:
    pytest.importorskip("vaderSentiment")
    warm, plain, rude, blank = Sentiment()(
        [
            "Thank you for your question! I am happy to help. Have a great day!",
            "The warranty is 3 years.",
            "That is a stupid question and I hate it.",
            " \n",
        ]
    )
    assert plain == 0.5  # no word of the lexicon
    assert warm is not None
    assert rude is not None
    assert rude < 0.2 < 0.8 < warm
    assert blank is None


def test_the_sentiment_of_a_classifier(tmp_path: Path) -> None:
    """FinBERT's three labels, 60, 10 and 30 %: (1 + 0.6 - 0.1) / 2."""
    labels = {"positive": 0.6, "negative": 0.1, "neutral": 0.3}
    name = save_classifier(tmp_path, labels)
    assert Sentiment(name)(["Profits rose.", "", "Sales fell."]) == [
        pytest.approx(0.75, abs=1e-6),
        None,
        pytest.approx(0.75, abs=1e-6),
    ]
    assert Sentiment(name, positive="NEUTRAL", negative=0)(["Profits rose."]) == [pytest.approx(0.35, abs=1e-6)]
    with pytest.raises(UserError, match="has no label 'joy'; set label to one of 'negative', 'neutral', 'positive'"):
        Sentiment(name, positive="joy")


def test_labels_that_a_text_may_have_together(tmp_path: Path) -> None:
    """Each has a probability of its own; the likeliest of those named counts."""
    labels = {"toxic": 0.75, "insult": 0.9, "threat": 0.2}
    name = save_classifier(tmp_path, labels, several=True)
    assert Toxicity(name)(["You fool.", " "]) == [pytest.approx(0.25, abs=1e-6), None]
    assert Toxicity(name, label=["threat", "insult"])(["You fool."]) == [pytest.approx(0.1, abs=1e-6)]
    found = SequenceClassifier(name, label="insult", reads="completion")([""], ["You fool."])
    assert found == [pytest.approx(0.9, abs=1e-6)]
    with pytest.raises(UserError, match="words are not read"):
        Toxicity(name, words=["darn"])
    with pytest.raises(UserError, match="name at least one toxic label"):
        Toxicity(name, label=[])


def test_labels_that_exclude_each_other(tmp_path: Path) -> None:
    name = save_classifier(tmp_path, {"neutral": 0.8, "toxic": 0.2})
    assert Toxicity(name)(["You fool."]) == [pytest.approx(0.8, abs=1e-6)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The warranty is 3 years.", 1.0),
        ("Darn! The darn warranty...", 1 / 3),
        ("d@rn", 1 / 2),  # @ for a
        ("Darning socks", 1.0),  # another word
        ("drat \n it, and DRAT-IT", 1 / 3),
        ("It costs 455 dollars.", 1.0),  # 4 and 5 stand for letters, but a number is a number
        ("an a55", 1 / 2),
        ("  ", None),
    ],
)
def test_a_word_list(text: str, value: float | None) -> None:
    assert Toxicity(words=["darn", "Drat it", "ass"])([text]) == [value]


def test_a_word_list_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("darn\n\n")
    assert Toxicity(words=str(tmp_path / "words.txt"))(["darn it"]) == [0.5]
    (tmp_path / "words.txt").write_text("\n")
    with pytest.raises(UserError, match="words holds no word"):
        Toxicity(words=str(tmp_path / "words.txt"))
    with pytest.raises(UserError, match="cannot be read"):
        Toxicity(words=str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match="device and max_tokens are for a classifier"):
        Toxicity(words=["darn"], device="cpu")


def test_the_list_that_comes_with_a_package() -> None:
    pytest.importorskip("better_profanity")
    found = Toxicity()(["Thank you, the warranty is 3 years.", "You bastard, read the FAQ."])
    assert found == [1.0, 0.5]


def test_a_worker_with_word_lists_needs_no_torch() -> None:
    pytest.importorskip("vaderSentiment")
    pytest.importorskip("rank_bm25")
    code = (
        "import sys; from alignment.rewards import FaqMatch, Sentiment, Toxicity, WordErrorRate; "
        "Sentiment(); Toxicity(words=['a']); FaqMatch(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
