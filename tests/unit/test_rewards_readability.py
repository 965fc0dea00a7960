"""Readability formulas, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.rewards import Readability

pytest.importorskip("textstat")

CAT = "The cat sat on the mat today."
"""7 words, 23 characters, 8 syllables. ARI: 4.71 * 23 / 7 + 0.5 * 7 - 21.43 = -2.454286."""


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"target": (-3, -2)}, 1.0),
        ({"target": (0, 5), "falloff": 5}, 1 - 2.454286 / 5),
        ({"target": (-10, -4)}, 1 - 1.545714 / 6),  # as wide as the target
        ({"target": [0, 0], "falloff": 1}, 0.0),
        # LIX: 7 words / 1 sentence + 100 * 0 long words / 7
        ({"target": (7, 7), "formula": "lix", "falloff": 1}, 1.0),
        ({"target": (-3, -2), "minimum_words": 8}, None),
    ],
)
def test_inside_and_outside_of_a_target(settings: dict[str, Any], value: float | None) -> None:
    found = Readability(**settings)(CAT)
    assert found == (value if value is None else pytest.approx(value, abs=1e-5))


@pytest.mark.parametrize("text", ["", "Yes, of course.", "... --- ... !!! ??? ---"])
def test_too_few_words_to_tell(text: str) -> None:
    assert Readability(target=(5, 9))(text) is None


def test_each_reward_has_its_language() -> None:
    """Amstad's constants for German: 180 - words per sentence - 58.5 syllables per word; 8 words, 9 syllables."""
    german = Readability(target=(0, 100), formula="flesch_reading_ease", falloff=10, language="de")
    Readability(target=(0, 1), language="es")
    outside = 180 - 8 - 58.5 * 9 / 8 - 100
    assert german("Der Hund und die Katze sind im Haus.") == pytest.approx(1 - outside / 10, abs=1e-6)


def test_syllables_of_english_need_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched in its place. Flesch-Kincaid: 0.39 * 7 + 11.8 * 8 / 7 - 15.59 = 0.625714."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("the network was asked"))
    settings: dict[str, Any] = {"target": (1, 2), "formula": "flesch_kincaid_grade", "falloff": 1}
    with pytest.raises(UserError, match=r"nltk\.downloader cmudict` once, or use automated_readability_index"):
        Readability(**settings)
    words = {"THE": "DH AH0", "CAT": "K AE1 T", "SAT": "S AE1 T", "ON": "AA1 N", "MAT": "M AE1 T"}
    words["TODAY"] = "T AH0 D EY1"
    folder = tmp_path / "corpora" / "cmudict"
    folder.mkdir(parents=True)
    (folder / "cmudict").write_text("".join(f"{word} 1 {sounds}\n" for word, sounds in words.items()))
    assert Readability(**settings)(CAT) == pytest.approx(0.625714, abs=1e-5)


def test_what_cannot_work() -> None:
    for settings, told in (
        ({"target": (9, 5)}, r"target is \[9, 5\]; it is \[lowest, highest\]"),
        ({"target": (5,)}, "both finite"),
        ({"target": (5, float("nan"))}, "both finite"),
        ({"target": (5, 5)}, "falloff must be positive"),
        ({"target": (5, 9), "formula": "fog"}, "formula is 'fog'; use automated_readability_index"),
        ({"target": (5, 9), "formula": "flesch_reading_ease", "language": "xx"}, "does not know the language 'xx'"),
    ):
        with pytest.raises(UserError, match=told):
            Readability(**settings)  # type: ignore[arg-type]
