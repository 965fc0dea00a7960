"""Word error rates counted by hand; CLIPScore against the towers of a small CLIP model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from alignment.errors import UserError
from alignment.rewards import CLIPScore, WordErrorRate
from alignment.rewards.calls import call_batch
from tests.reward_models import LONGEST, clip_cosine, save_clip, save_pictures

TRANSCRIPT = "The quick brown fox jumps."


@pytest.mark.parametrize(
    ("completion", "transcript", "value"),
    [
        ("the quick brown fox jumps", TRANSCRIPT, 1.0),
        ("The quick brown dog jumps!", TRANSCRIPT, 4 / 5),  # one substitution of five words
        ("The brown fox", TRANSCRIPT, 3 / 5),  # two deletions
        ("The very quick brown fox jumps", TRANSCRIPT, 4 / 5),  # one insertion
        ("", TRANSCRIPT, 0.0),
        ("a b c d e f g h i j", TRANSCRIPT, 0.0),  # ten errors of five words: not below 0
        ("It's here", "it's here", 1.0),
        ("here", None, None),
        ("here", "...", None),
    ],
)
def test_word_error_rate(completion: str, transcript: Any, value: float | None) -> None:
    pytest.importorskip("jiwer")
    found = WordErrorRate()(completion, {"transcript": transcript})
    assert found == (value if value is None else pytest.approx(value, abs=1e-9))


def test_case_and_punctuation_may_count() -> None:
    pytest.importorskip("jiwer")
    reward = WordErrorRate(column="said", plain=False)
    assert reward.needs_columns == ("said",)
    assert reward("the quick brown fox jumps.", {"said": TRANSCRIPT}) == pytest.approx(4 / 5)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With two pictures beside it."""
    folder = tmp_path_factory.mktemp("clip")
    save_pictures(folder)
    return save_clip(folder)


def test_the_score_of_a_caption(clip: str) -> None:
    reward = CLIPScore(clip, folder=clip, device="cpu")
    captions = [["a", "red", "square"], ["a", "green", "square"], ["red"], ["green"]]
    colours = ["red", "green", "green", "red"]
    found = reward([" ".join(c) for c in captions], [{"image": f"{colour}.png"} for colour in colours])
    expected = [clip_cosine(clip, c, colour) for c, colour in zip(captions, colours, strict=True)]
    assert found == pytest.approx([max(0.0, e) for e in expected], abs=1e-5)
    assert len({round(e, 3) for e in expected}) == 4
    assert max(expected) > 0


def test_a_long_caption_keeps_its_end_of_text(clip: str) -> None:
    (found,) = CLIPScore(clip, folder=clip, device="cpu")(["a " * 50], [{"image": "red.png"}])
    expected = clip_cosine(clip, ["a"] * (LONGEST - 2), "red")
    assert found == pytest.approx(max(0.0, expected), abs=1e-5)


def test_pictures_of_rows_are_not_trusted(clip: str, tmp_path: Path) -> None:
    """A row without a picture abstains; one with a bad picture is a fault, alone."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "red.png").write_bytes((Path(clip) / "red.png").read_bytes())
    (folder / "broken.png").write_bytes((Path(clip) / "red.png").read_bytes()[:40])
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    packed = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(packed, format="PNG")
    reward = CLIPScore(clip, folder=str(folder), device="cpu")
    rows: list[Any] = ["red.png", {"bytes": packed.getvalue(), "path": "x"}, {"path": "red.png"}, None]
    rows += ["../secret.png", "link.png", str(tmp_path / "secret.png"), "broken.png", "none.png", 7]
    texts = ["a red square"] * len(rows) + [" "]
    outcomes = call_batch(
        reward, {"completions": texts, "columns": [{"image": r} for r in [*rows, "red.png"]]}, 11, in_worker=True
    )
    assert [o.kind for o in outcomes] == [None] * 4 + ["raise"] * 6 + [None]
    assert outcomes[0].value == outcomes[1].value == outcomes[2].value is not None
    assert [o.value for o in outcomes[3:]] == [None] * 8
    assert all("names a file outside of" in o.message for o in outcomes[4:7])


def test_what_cannot_work(clip: str, tiny_model_dir: Path) -> None:
    with pytest.raises(UserError, match="no folder 'nowhere' with pictures"):
        CLIPScore(clip, folder="nowhere")
    with pytest.raises(UserError, match=r"no model folder '\./nowhere'"):
        CLIPScore("./nowhere")
    with pytest.raises(UserError, match=r"CLIP model"):
        CLIPScore(str(tiny_model_dir))
