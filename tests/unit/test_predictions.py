"""The prediction writer on its own: order, duplicates, text that contains line separators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import Predictions
from tests.toys import trainer


class Rows(L.LightningModule):
    def __init__(self, rows: list[list[dict[str, Any]]]) -> None:
        super().__init__()
        self.rows = rows

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> list[dict[str, Any]]:
        return self.rows[batch_idx]


def predict(folder: Path, rows: list[list[dict[str, Any]]], path: str = "out/p.jsonl") -> list[dict[str, Any]]:
    t = trainer(folder, callbacks=[Predictions(path)])
    t.predict(Rows(rows), DataLoader(range(len(rows)), batch_size=None), return_predictions=False)  # type: ignore[arg-type]
    assert [p.name for p in (folder / path).parent.iterdir() if p.name.startswith("p.jsonl")] == ["p.jsonl"]
    return [json.loads(line) for line in (folder / path).read_text(encoding="utf-8").split("\n") if line]


def test_rows_are_written_in_data_order_once(tmp_path: Path) -> None:
    rows = [[{"index": 2, "x": "c"}, {"index": 0, "x": "a"}], [{"index": 1, "x": "b"}, {"index": 0, "x": "a"}]]
    assert [row["x"] for row in predict(tmp_path, rows)] == ["a", "b", "c"]


def test_several_completions_of_one_prompt_are_kept(tmp_path: Path) -> None:
    prompts = [[{"index": 1, "x": "c"}, {"index": 1, "x": "d"}], [{"index": 0, "x": "a"}, {"index": 0, "x": "a"}]]
    again = [{"index": 1, "x": "c"}, {"index": 1, "x": "d"}]
    assert [row["x"] for row in predict(tmp_path, [*prompts, again])] == ["a", "a", "c", "d"]


def test_rows_without_a_number_keep_their_order(tmp_path: Path) -> None:
    rows = [[{"index": -1, "x": "b"}, {"x": "a"}], [{"index": -1, "x": "b"}]]
    assert [row["x"] for row in predict(tmp_path, rows)] == ["b", "a", "b"]


@pytest.mark.parametrize("text", ["two\nlines", "line\u2028separator", "\x85", "语言 🙂"])
def test_any_text_survives(text: str, tmp_path: Path) -> None:
    assert predict(tmp_path, [[{"index": 0, "x": text}]]) == [{"index": 0, "x": text}]


def test_says_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict(tmp_path, [[{"index": 0}]])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("predictions: ")]
    assert Path(line.removeprefix("predictions: ")).is_file()


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    predict(tmp_path, [[{"index": 0, "x": 1}, {"index": 1, "x": 1}]])
    assert predict(tmp_path, [[{"index": 0, "x": 2}]]) == [{"index": 0, "x": 2}]


def test_numbers_are_as_short_as_their_type_allows(tmp_path: Path) -> None:
    """0.1 in float32 is 0.100000001490116...; in float64 it is 0.1, and a third is no float32."""
    single = torch.tensor([0.1, 1 / 3, 2.0**-140]).tolist()
    predict(tmp_path, [[{"index": 0, "r": single, "d": {"x": 0.1, "y": 1 / 3}, "big": 1e300, "n": 3, "none": None}]])
    text = (tmp_path / "out" / "p.jsonl").read_text()
    assert '"r": [0.1, 0.33333334, 7.17e-43], "d": {"x": 0.1, "y": 0.3333333333333333}, "big": 1e+300, "n": 3' in text
