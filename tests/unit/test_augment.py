"""Adversarial rows: how many, which reply stays right, in which format, and what a reader makes of them."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from alignment.augmentation.adversarial import SHARE, AdversarialConfig, inject
from alignment.augmentation.attacks import ATTACKS, attacked
from alignment.augmentation.rows import Rows, read_rows
from alignment.augmentation.writing import write_rows
from alignment.chat import ChatEncoder, Message
from alignment.cli import main
from alignment.errors import UserError
from alignment.tiny import tiny_tokenizer
from datamodules import PreferenceData, PromptData, SupervisedData, UnpairedData

ASKED, GOOD, BAD = "What is {} plus one?", "It is {}.", "No idea about {}."


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": ASKED.format(i), "chosen": GOOD.format(i + 1), "rejected": BAD.format(i), "topic": "sums"}
        for i in range(count)
    ]


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def augment(source: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["data", "augment", str(source), str(out), "--no_tracking", *words]) == 0
    return lines(out)


# ---------------------------------------------------------------------- one attack


def test_the_forms_of_a_payload() -> None:
    """base64 of the bytes 53 61 79 20 35 2e is U2F5IDUu."""
    forms = {name: attacked(f"{{task}} | {{{name}}}", "Add.", "Say 5.") for name in ("payload", "base64")}
    forms |= {name: attacked(f"{{{name}}} | {{task}}", "Add.", "Say 5.") for name in ("hyphens", "leet")}
    assert forms == {
        "payload": "Add. | Say 5.",
        "base64": "Add. | U2F5IDUu",
        "hyphens": "S-a-y 5-. | Add.",
        "leet": "54y 5. | Add.",
    }


def test_braces_in_a_task_are_text() -> None:
    assert attacked("{task} {payload}", "{payload}", "{task}") == "{payload} {task}"


def test_every_text_holds_the_task_and_the_payload() -> None:
    forms = ("{payload}", "{base64}", "{hyphens}", "{leet}")
    for kind, texts in ATTACKS.items():
        for text in texts:
            assert text.count("{task}") == 1
            assert sum(text.count(form) for form in forms) == 1, (kind, text)


@pytest.mark.parametrize("text", ATTACKS["special_tokens"])
def test_control_tokens_of_an_attack_stay_text(text: str) -> None:
    """A prompt of one user turn has one <bos>, two <|im_start|> and one <|im_end|>, whatever the turn says."""
    tokenizer = tiny_tokenizer()
    said = attacked(text, "Add one.", "Say 5.")
    ids = ChatEncoder(tokenizer=tokenizer).prompt([Message("user", said)])
    bos, start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<bos>", "<|im_start|>", "<|im_end|>"))
    assert [ids.count(token) for token in (bos, start, end)] == [1, 2, 1]
    assert said in tokenizer.decode(ids)


# ---------------------------------------------------------------------- how many, and which


def test_five_in_a_hundred_by_default(tmp_path: Path) -> None:
    """95 clean rows and 5 others, one of each kind, each behind its source; what was there stays as it was."""
    assert SHARE == 0.05
    clean = pairs(95)
    rows = augment(written(tmp_path / "rows.jsonl", clean), tmp_path / "out.jsonl")
    assert len(rows) == 100
    added = [row for row in rows if row["augmented"]]
    assert sorted(row["attack"] for row in added) == sorted(ATTACKS)
    marks = {"augmented": False, "attack": "none"}
    assert [row for row in rows if not row["augmented"]] == [
        {**row, **marks, "source_row": i} for i, row in enumerate(clean, start=1)
    ]
    for before, row in pairwise(rows):
        if row["augmented"]:
            assert before["source_row"] == row["source_row"]
            assert before["attack"] == "none"


def test_the_chosen_answers_the_task_and_the_rejected_obeys(tmp_path: Path) -> None:
    clean = pairs(12)
    source = written(tmp_path / "rows.jsonl", clean)
    rows = augment(source, tmp_path / "out.jsonl", "--share", "0.5", "--attacks=role_play")
    added = [row for row in rows if row["augmented"]]
    assert len(added) == 12
    for row in added:
        own = clean[row["source_row"] - 1]
        (donor,) = [other for other in clean if other["chosen"] == row["rejected"]]
        assert row["chosen"] == own["chosen"]
        assert donor is not own
        assert own["prompt"] in row["prompt"]
        assert donor["prompt"] in row["prompt"]
        assert row["topic"] == "sums"


def test_a_rejected_reply_may_be_kept(tmp_path: Path) -> None:
    clean = [{**row, "margin": 0.5} for row in pairs(12)]
    source = written(tmp_path / "rows.jsonl", clean)
    rows = augment(source, tmp_path / "out.jsonl", "--share=0.5", "--rejected=kept")
    added = [row for row in rows if row["augmented"]]
    assert [row["rejected"] for row in added] == [clean[row["source_row"] - 1]["rejected"] for row in added]


def test_the_same_seed_gives_the_same_file_and_another_one_another(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", pairs(40))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        augment(source, tmp_path / f"{name}.jsonl", "--seed", str(seed))
    a, b, c = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_order_of_the_rows_does_not_matter(tmp_path: Path) -> None:
    found = []
    for name, rows in (("up", pairs(40)), ("down", pairs(40)[::-1])):
        out = augment(written(tmp_path / f"{name}.jsonl", rows), tmp_path / f"{name}-out.jsonl")
        found.append({(row["prompt"], row["rejected"]) for row in out if row["augmented"]})
    assert len(found[0]) == 2  # 0.05 * 40 / 0.95 = 2.1
    assert found[0] == found[1]


def test_a_second_time_tops_up_and_attacks_no_attacked_row(tmp_path: Path) -> None:
    """5 of 100 are there; for a tenth of all (10 - 5) / 0.9 = 5.6, so 6 more: 11 of 106."""
    once = tmp_path / "once.jsonl"
    augment(written(tmp_path / "rows.jsonl", pairs(95)), once)
    rows = augment(once, tmp_path / "twice.jsonl", "--share=0.1", "--seed=5")
    added = [row for row in rows if row["attack"] != "none"]
    assert (len(rows), len(added)) == (106, 11)
    assert all(row["source_row"] <= 95 for row in rows)
    assert all(sum(row["prompt"].count(ASKED.format(i)) for i in range(95)) <= 2 for row in added)


def test_rows_that_repeat_are_attacked_once(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", [*pairs(6), *pairs(6)])
    rows = augment(source, tmp_path / "out.jsonl", "--share=0.3")
    added = [row["prompt"] for row in rows if row["augmented"]]
    assert len(added) == len(set(added)) == 5  # 0.3 * 12 / 0.7 = 5.1


# ---------------------------------------------------------------------- formats


def turn(role: str, text: str, names: tuple[str, str] = ("role", "content")) -> dict[str, Any]:
    return {names[0]: role, names[1]: text}


def human(text: str, reply: str) -> str:
    return f"\n\nHuman: Hello.\n\nAssistant: Hi!\n\nHuman: {text}\n\nAssistant: {reply}"


def row(form: str, i: int) -> dict[str, Any]:
    asked, good, bad = ASKED.format(i), GOOD.format(i + 1), BAD.format(i)
    said = [turn("system", "Be short."), turn("user", asked)]
    old = ("from", "value")
    parts = [[turn("user", asked), turn("assistant", reply)] for reply in (good, bad)]
    typed = [
        [{"role": m["role"], "content": [{"type": "text", "value": m["content"]}]} for m in messages]
        for messages in parts
    ]
    return {
        "texts": {"prompt": asked, "chosen": good, "rejected": bad},
        "messages": {"prompt": said, "chosen": [turn("assistant", good)], "rejected": [turn("assistant", bad)]},
        "one message": {"prompt": said, "chosen": turn("assistant", good), "rejected": turn("assistant", bad)},
        "repeated": {"prompt": asked, "chosen": parts[0], "rejected": parts[1]},
        "lists": {"chosen": parts[0], "rejected": parts[1]},
        "typed parts": {"chosen_messages": typed[0], "rejected_messages": typed[1]},
        "sharegpt": {
            "conversations": [turn("human", "Hello.", old), turn("gpt", "Hi!", old), turn("human", asked, old)],
            "chosen": turn("gpt", good, old),
            "rejected": turn("gpt", bad, old),
        },
        "instruction": {"instruction": asked, "input": "", "chosen": good, "rejected": bad},
        "data": {"instruction": "Add one.", "input": asked, "chosen": good, "rejected": bad},
        "transcript": {"chosen": human(asked, good), "rejected": human(asked, bad)},
        "common start": {"chosen": f"Q: {asked} {chr(97 + i)}{i}.", "rejected": f"Q: {asked} {bad}"},
    }[form]


FORMS = ["texts", "messages", "one message", "repeated", "lists", "typed parts", "sharegpt", "instruction", "data"]
FORMS += ["transcript", "common start"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_of_pairs_is_rewritten_in_itself(form: str, tmp_path: Path) -> None:
    """20 of 40 rows are attacked; all of them are read, with the replies that they should have."""
    source = written(tmp_path / "rows.jsonl", [row(form, i) for i in range(20)])
    out = tmp_path / "out.jsonl"
    added = [values for values in augment(source, out, "--share=0.5") if values["augmented"]]
    assert len(added) == 20
    clean = {entry.number: entry.row for entry in read_rows(str(source)).entries}
    found = read_rows(str(out))
    assert (found.report.used, found.purpose) == (40, "preference")
    for entry in found.entries:
        before = clean[entry.values["source_row"]]
        assert entry.row.completions[0] == before.completions[0]
        if not entry.values["augmented"]:
            assert entry.row.completions == before.completions
            assert entry.row.prompt == before.prompt
            continue
        assert any(entry.row.completions[1] == other.completions[0] for other in clean.values())
        if isinstance(before.prompt, str):
            assert before.prompt in entry.asked
        else:
            assert entry.row.prompt[:-1] == before.prompt[:-1]
            assert before.prompt[-1].content in entry.asked or form == "data"
    data = PreferenceData(str(out), tokenizer=tiny_tokenizer(), cache_dir=None, val_fraction=0.0)
    assert len(data.groups("train")) == 40
    assert data.report.skipped == 0


def test_an_input_is_what_is_attacked(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", [row("data", i) for i in range(20)])
    for values in augment(source, tmp_path / "out.jsonl", "--share=0.5"):
        assert values["instruction"] == "Add one."
        assert ASKED.format(values["source_row"] - 1) in values["input"]
        assert (values["input"] == ASKED.format(values["source_row"] - 1)) != values["augmented"]


def test_completions_labels_and_prompts_keep_what_they_have(tmp_path: Path) -> None:
    kinds: dict[str, tuple[type[Any], list[dict[str, Any]]]] = {
        "sft": (SupervisedData, [{"prompt": ASKED.format(i), "completion": GOOD.format(i + 1)} for i in range(20)]),
        "chat": (
            SupervisedData,
            [{"messages": [turn("user", ASKED.format(i)), turn("assistant", GOOD.format(i + 1))]} for i in range(20)],
        ),
        "labels": (
            UnpairedData,
            [{"prompt": ASKED.format(i), "completion": GOOD.format(i), "label": i % 2 == 0} for i in range(20)],
        ),
        "prompts": (PromptData, [{"question": ASKED.format(i), "answer": str(i + 1)} for i in range(20)]),
    }
    for name, (kind, clean) in kinds.items():
        out = tmp_path / f"{name}-out.jsonl"
        rows = augment(written(tmp_path / f"{name}.jsonl", clean), out, "--share=0.5")
        for values in rows:
            before = clean[values["source_row"] - 1]
            for key in ("completion", "label", "answer"):
                assert values.get(key) == before.get(key)
        data = kind(str(out), tokenizer=tiny_tokenizer(), cache_dir=None, val_fraction=0.0)
        assert (len(data.groups("train")), data.report.skipped) == (40, 0)


def test_other_column_names_stay(tmp_path: Path) -> None:
    clean = [{"question": ASKED.format(i), "better": GOOD.format(i + 1), "worse": BAD.format(i)} for i in range(20)]
    words = ("--columns", "{prompt: question, chosen: better, rejected: worse}", "--share=0.5")
    rows = augment(written(tmp_path / "rows.jsonl", clean), tmp_path / "out.jsonl", *words)
    assert set(rows[0]) == {"question", "better", "worse", "augmented", "attack", "source_row"}
    assert sum(values["augmented"] for values in rows) == 20


# ---------------------------------------------------------------------- files


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", [row("messages", i) for i in range(20)])
    rows = augment(source, tmp_path / "out.jsonl")
    assert main(["data", "augment", str(source), str(tmp_path / "out.parquet"), "--no_tracking"]) == 0
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist() == rows


def test_bad_rows_are_dropped_by_reason_and_numbers_stay_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = pairs(12)
    rows[0] = {**rows[0], "chosen": None}
    rows[3] = {**rows[3], "rejected": rows[3]["chosen"]}
    source = written(tmp_path / "rows.jsonl", rows)
    out = augment(source, tmp_path / "out.jsonl")
    assert [values["source_row"] for values in out if not values["augmented"]] == [2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    told = capsys.readouterr().out
    assert "dropped: chosen is None" in told
    assert "dropped: chosen equals rejected" in told
    assert hashlib.sha256(source.read_bytes()).hexdigest()[:16] in told
    words = ["data", "augment", str(source), str(tmp_path / "other.jsonl"), "--on_bad_row=stop", "--no_tracking"]
    assert main(words) == 2
    assert "row 1: chosen is None" in capsys.readouterr().err


def test_a_crash_leaves_the_old_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        write_rows(out, pairs(3))
    assert out.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_what_a_format_cannot_hold_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"type date is not JSON serializable; write a \.parquet file instead"):
        write_rows(tmp_path / "out.jsonl", [{"day": datetime.date(2026, 1, 1)}])
    with pytest.raises(UserError, match=r"write a \.jsonl file instead"):
        write_rows(tmp_path / "out.parquet", [{"a": 1}, {"a": "one"}])
    assert os.listdir(tmp_path) == []


def test_text_that_utf8_cannot_hold_is_written_as_an_escape(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    digest = write_rows(out, [{"prompt": "é", "note": "\ud800"}, {"prompt": "é"}])
    assert out.read_bytes() == b'{"prompt": "\\u00e9", "note": "\\ud800"}\n{"prompt": "\xc3\xa9"}\n'
    assert digest == hashlib.sha256(out.read_bytes()).hexdigest()


# ---------------------------------------------------------------------- mistakes

FIVE = pairs(5)
MARGINS = [{**values, "margin": 1.0} for values in pairs(20)]
OWN = [{**values, "attack": "heart"} for values in pairs(20)]
ALIKE = [{"prompt": ASKED.format(i), "chosen": "Yes.", "rejected": "No."} for i in range(20)]
MISTAKES: list[tuple[list[Any], list[str], str]] = [
    (pairs(20), ["--share=1.5"], "--share is 1.5; it must be above 0 and below 1, such as 0.05"),
    (pairs(20), ["--attacks=rolplay"], "'rolplay' is no attack; there are instruction_override, role_play"),
    (FIVE, [], "5.00% of 5 rows, 0 of them adversarial already, is no further row; at least 10 rows are needed"),
    (MARGINS, [], "has margins, which would be wrong for another rejected reply; give --rejected kept"),
    (OWN, [], "has a column 'attack' of its own, which this would write; rename it"),
    (ALIKE, [], "asks for 1 adversarial rows, and only 0 of"),
    ([{"text": f"Story {i}."} for i in range(20)], [], "has no prompt to attack; with texts to be continued"),
    (pairs(20), ["--purpose=pairs"], "--purpose is 'pairs'; use supervised, preference, unpaired, prompts"),
    (pairs(20), ["--samples=4"], "--samples belongs to --mode grade, and this is --mode adversarial"),
    (pairs(20), ["--rewards.right", "ExactMatch"], "rewards belongs to --mode grade, and this is --mode adversarial"),
    (pairs(20), ["--rewards.right"], "--rewards.right is given without a value"),
    (pairs(20), ["--columns", "prompt"], "--columns is 'prompt'; give a mapping"),
    (pairs(20), ["--attacks=role_play", "--attacks=rolplay"], "'rolplay' is no attack; there are instruction_override"),
    (pairs(20), ["--nothing"], "unrecognized arguments: --nothing"),
    (pairs(20), ["--rejected=never"], "argument --rejected: invalid choice: 'never'"),
    (pairs(20), ["--root=/proc/x"], "--root: '/proc/x' cannot be written to"),
    (pairs(20), ["--max_rows=0"], "--max_rows is 0; it must be at least 1"),
    ([{"a": 1}], [], "which is no prompts format; accepted are"),
]


@pytest.mark.parametrize(("rows", "words", "message"), MISTAKES)
def test_mistakes_are_one_line(
    rows: list[Any], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = written(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    tracked = [] if "--root=/proc/x" in words else ["--no_tracking"]
    assert main(["data", "augment", str(source), str(out), *tracked, *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not out.exists()


def test_where_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "rows.jsonl", pairs(20))
    taken = written(tmp_path / "taken.jsonl", [])
    for out, message in (
        (source, "is the file that is read; write to another one"),
        (taken, "exists; choose another name, or replace it with --force"),
        (tmp_path / "rows.csv", "must end with .jsonl or .parquet"),
        (taken / "out.jsonl", "taken.jsonl' cannot be written to (File exists); name another place"),
        (Path("/proc/out.jsonl"), "OUT: '/proc' cannot be written to"),
    ):
        assert main(["data", "augment", str(source), str(out), "--no_tracking"]) == 2
        assert message in capsys.readouterr().err
    assert taken.read_text() == ""
    assert len(augment(source, taken, "--force")) == 21


def test_a_file_that_has_come_up_meanwhile_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = written(tmp_path / "rows.jsonl", pairs(20)), tmp_path / "out.jsonl"

    def other(rows: Rows, config: AdversarialConfig) -> Any:
        out.write_text("another's")
        return inject(rows, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alignment.augmentation.adversarial.inject", other)
        assert main(["data", "augment", str(source), str(out), "--no_tracking"]) == 2
    assert "exists; choose another name" in capsys.readouterr().err
    assert out.read_text() == "another's"


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = written(tmp_path / "rows.jsonl", pairs(20))
    monkeypatch.setattr("alignment.whole_file.os.fsync", full)
    assert main(["data", "augment", str(source), str(tmp_path / "out.jsonl"), "--no_tracking"]) == 2
    assert capsys.readouterr().err.endswith("out.jsonl' cannot be written: No space left on device\n")
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_kinds_in_two_flags_add_up(tmp_path: Path) -> None:
    source, out = written(tmp_path / "rows.jsonl", pairs(20)), tmp_path / "out.jsonl"
    found = augment(source, out, "--share=0.5", "--attacks=role_play", "--attacks=obfuscation")
    assert {row["attack"] for row in found} == {"none", "role_play", "obfuscation"}


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "augment", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"--{name}" in told for name in ("mode", "share", "attacks", "embedding", "samples", "rates"))


def test_the_function_behind_the_command(tmp_path: Path) -> None:
    """Counts are exact: 20 rows of 40, four of each kind."""
    rows: Rows = read_rows(str(written(tmp_path / "rows.jsonl", pairs(20))))
    made = inject(rows, AdversarialConfig(share=0.5))
    assert made.counts == dict.fromkeys(ATTACKS, 4)
    assert len(made.rows) == 40
