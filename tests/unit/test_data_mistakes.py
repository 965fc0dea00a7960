"""Mistakes about a whole source or its settings: one line that says what to do, before anything is trained."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path
from typing import Any

import pytest

from alignment.chat import ChatEncoder
from alignment.errors import UserError
from alignment.policy import LoRAConfig, PolicyConfig, load_policy, load_tokenizer
from alignment.tiny import tiny_tokenizer
from datamodules import SupervisedData

TABLE = b"prompt,completion\na,b\nc,d\ne,f\n"
LINES = b"".join(b'{"prompt": "q%d", "completion": "a"}\n' % i for i in range(4))


def data(path: Path | str, **settings: Any) -> SupervisedData:
    return SupervisedData(str(path), **{"cache_dir": None, "tokenizer": tiny_tokenizer(), **settings})


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", LINES.decode().encode("utf-16"), "is in UTF-16; save it as UTF-8"),
        ("rows.csv", TABLE.decode().encode("utf-16"), "is in UTF-16; save it as UTF-8"),
        ("rows.jsonl.gz", LINES, r"is not compressed; rename it to 'rows\.jsonl'"),
        ("rows.jsonl", gzip.compress(LINES), r"is compressed; rename it to 'rows\.jsonl\.gz'"),
        ("rows.csv", b"prompt,prompt,completion\na,b,c\n", "has two columns called 'prompt'; rename one"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=expected):
        data(tmp_path / name).groups("train")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"max_eval_rows": -1}, "max_eval_rows must be at least 1, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must not be negative, got -1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, int], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        SupervisedData(**settings)  # type: ignore[arg-type]


def test_dropping_the_only_batch(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    with pytest.raises(UserError, match="3 training rows make no batch of 8, and drop_last leaves out a short one"):
        data(tmp_path / "rows.jsonl", batch_size=8, drop_last=True).train_dataloader()


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        source = data(tmp_path / "rows.jsonl", cache_dir=str(tmp_path / "cache"))
        assert len(source.groups("train")) == 3
    assert f"Tokenised rows are not kept in cache_dir '{tmp_path / 'cache'}'" in caplog.text
    assert (tmp_path / "cache").read_text() == "a file"


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "return_dict"])
def test_template_kwargs_are_for_the_template(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' is set by the data"):
        ChatEncoder(tokenizer=tiny_tokenizer(), template_kwargs={name: True})


def test_layers_that_the_model_has_not() -> None:
    with pytest.raises(UserError, match="cannot load LoRA on 'tiny': Target modules"):
        load_policy(PolicyConfig(name="tiny", lora=LoRAConfig(target_modules=["zzz"])))


def test_names_without_a_tokenizer_behind_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.name is empty"):
        load_tokenizer(PolicyConfig(name=""))
    with pytest.raises(UserError, match="holds no tokenizer: none of"):
        load_tokenizer(PolicyConfig(name=str(tmp_path)))
