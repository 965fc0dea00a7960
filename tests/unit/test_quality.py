"""`alignment data check`: what it reads, its verdicts, what it writes, and how it says no."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from alignment.cli import main
from alignment.errors import UserError
from alignment.quality.findings import Faults, Finding, bars, percent, wilson
from alignment.quality.page import html
from alignment.quality.reading import read
from alignment.quality.report import Report
from alignment.quality.rows import comparisons, rows
from alignment.quality.settings import LIMITS, Limit, Settings, limits_of
from tests.quality_toys import corpus, pair, write

QUIET = ["--no_tracking", "--json"]
GOOD = [
    pair(f"What colour is thing {word}?", f"Thing {word} is {colour}.", f"No idea what {word} may be.")
    for word, colour in (("one", "red"), ("two", "blue"), ("three", "green"), ("four", "grey"))
]


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """(exit status, the JSON report by check) of a command."""
    capsys.readouterr()
    code = main(["data", "check", *words, *QUIET])
    content = json.loads(capsys.readouterr().out)
    return code, content | {finding["check"]: finding for finding in content["checks"]}


# ---------------------------------------------------------------------- limits and verdicts


def test_verdicts() -> None:
    above, below, warns = Limit(0.1, 0.3), Limit(0.7, 0.667, below=True), Limit(0.0)
    assert [above.verdict(v) for v in (None, 0.1, 0.2, 0.3, 0.4)] == ["n/a", "ok", "warn", "warn", "fail"]
    assert [below.verdict(v) for v in (0.71, 0.7, 0.667, -0.2)] == ["ok", "warn", "fail", "fail"]
    assert [warns.verdict(v) for v in (0.0, 1.0)] == ["ok", "warn"]
    assert [str(limit) for limit in (above, below, warns, Limit(0.2, 0.2))] == [
        "warn > 0.1, fail > 0.3",
        "warn ≤ 0.7, fail ≤ 0.667",
        "warn > 0",
        "fail > 0.2",
    ]


def test_limits_from_the_command_line() -> None:
    assert limits_of(["leakage=0,0.02", "agreement=0.8", "tokens=0.5,none"]) == {
        "leakage": Limit(0.0, 0.02),
        "agreement": Limit(0.8, 0.8, below=True),
        "tokens": Limit(0.5, None),
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("leakage", "give NAME=WARN,FAIL"),
        ("leakage=a", "give NAME=WARN,FAIL"),
        ("leakage=nan", "give NAME=WARN,FAIL"),
        ("leakage=0,inf", "give NAME=WARN,FAIL"),
        ("leakage=0,1,2", "give NAME=WARN,FAIL"),
        ("leakage=none", "give NAME=WARN,FAIL"),
        ("leekage=0", "did you mean 'leakage'"),
        ("leakage=0.2,0.1", "fail before it warns"),
        ("agreement=0.6,0.7", "fail before it warns"),
    ],
)
def test_limits_that_are_none(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        limits_of([text])


def test_wilson_interval() -> None:
    """8 of 10 and 80 of 100: centre (p + z²/2n) / (1 + z²/n), as in Wilson's paper of 1927."""
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-4)
    assert wilson(80, 100) == pytest.approx((0.71117, 0.86663), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_numbers_for_people() -> None:
    assert [percent(v) for v in (0.0, 0.0004, 0.25, 0.9996, 1.0)] == ["0.0%", "<0.1%", "25.0%", ">99.9%", "100.0%"]
    assert bars([1, 3, 1, 10, 40]) == {"1": 2, "3": 1, "10 or more": 2}
    fault = Faults(what="bad", show=2)
    for place in ("row 1", "row 2", "row 3"):
        fault.add(place)
    assert str(fault) == "bad: 3 (row 1, row 2, ...)"
    assert fault.count == 3


def test_the_worst_finding_is_the_verdict() -> None:
    def report(*values: float | None) -> Report:
        found = [Finding(check="rows", measured="", limit=Limit(1.0, 2.0), value=value) for value in values]
        return Report(files=["a"], command="", findings=found)

    assert report(None, None).verdict == "ok"
    assert report(0.0, None, 1.5).verdict == "warn"
    assert report(0.0, 3.0, 1.5).verdict == "fail"
    assert report(0.0, 3.0, 1.5, None).summary() == "1 fail, 1 warn, 1 ok, 1 not measurable"


# ---------------------------------------------------------------------- reading


def test_every_kind_of_rows_is_told_by_its_columns(tmp_path: Path) -> None:
    kinds = {
        "preference": pair("Why?", "Because.", "No."),
        "unpaired": {"prompt": "Why?", "completion": "Because.", "label": True},
        "supervised": {"instruction": "Say it.", "input": "", "output": "It."},
        "prompts": {"prompt": "Why?", "answer": "because"},
    }
    for kind, row in kinds.items():
        (example,) = corpus(tmp_path, [row]).examples
        assert example.kind == kind
    example = corpus(tmp_path, [{"text": "Once upon a time."}]).examples[0]
    assert (example.kind, example.prompt, example.asked) == ("supervised", "", "Once upon a time.")


def test_what_is_learned_and_what_is_not(tmp_path: Path) -> None:
    (both,) = corpus(tmp_path, [pair("Why?", "Because.", "No.")]).examples
    assert (both.pair, both.learned, both.negatives) == (("Because.", "No."), ("Because.",), ("No.",))
    labelled = [{"prompt": "Why?", "completion": c, "label": good} for c, good in (("Because.", True), ("No.", False))]
    good, bad = corpus(tmp_path, labelled).examples
    assert (good.pair, good.learned, good.negatives) == (None, ("Because.",), ())
    assert (bad.learned, bad.negatives) == ((), ("No.",))


def test_splits_are_files_or_a_column(tmp_path: Path) -> None:
    for name in ("valid", "train"):
        write(tmp_path / f"{name}.jsonl", GOOD[:1])
    found = read([str(tmp_path / "valid.jsonl"), str(tmp_path / "train.jsonl")], Settings())
    assert found.splits == ["train", "valid"]
    assert [e.place for e in found.examples] == ["valid row 1", "train row 1"]
    column = corpus(tmp_path, [{**GOOD[0], "split": "test"}, {**GOOD[1], "split": "train"}, GOOD[2]])
    assert [e.split for e in column.examples] == ["test", "train", "rows"]
    world = read(["world:support"], Settings(splits=("train", "test"), max_rows=4))
    assert world.splits == ["train", "test"]
    assert len(world.examples) == 8


def test_two_files_of_one_name_keep_their_folders(tmp_path: Path) -> None:
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "rows.jsonl", GOOD[:1]))
    assert read(files, Settings()).splits == files


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    bad = [pair("Why?", "Same.", "Same."), {"prompt": "Why?", "chosen": None, "rejected": "No."}]
    found = rows(corpus(tmp_path, [*GOOD, *bad, bad[0]]), Settings())
    assert found.value == pytest.approx(3 / 7)
    assert {f.what: (f.count, f.places) for f in found.faults} == {
        "chosen equals rejected": (2, ["row 5", "row 7"]),
        "chosen is None": (1, ["row 6"]),
    }
    assert found.verdict == "fail"


def test_real_rows(shared: Path) -> None:
    """The data's own README says that six rows have chosen == rejected."""
    found = read([str(shared / "data" / "rasbt_instruction-data-with-preference.json")], Settings())
    report = rows(found, Settings())
    assert (report.figures["read"], report.figures["unusable"]) == (1100, 6)
    assert [(f.what, f.count) for f in report.faults] == [("chosen equals rejected", 6)]
    other = read([str(shared / "data" / "llamafactory_v1_dpo_demo.jsonl")], Settings())
    assert (other.sources[0].report.format.split(" (")[0], len(other.examples)) == ("message lists", 10)


def test_a_word_that_no_terminal_takes_is_said_as_an_escape(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"error_type": "od\ud800d", "votes": {"\udc80": ["a"], "b": "\ud83d"}}
    (workdir / "rows.jsonl").write_text("".join(json.dumps({**g, **row}) + "\n" for g in GOOD))
    words = ["data", "check", "rows.jsonl", "--skip", "near_duplicates,agreement", "--no_tracking", "--out", "quality"]
    assert main(words) == 0
    assert "od_ud800d" in capsys.readouterr().out  # a kind is letters, digits and underscores
    assert "od_ud800d" in (workdir / "quality" / "data_quality.html").read_text()
    example = read(["rows.jsonl"], Settings()).examples[0]
    assert example.columns["votes"] == {r"\udc80": ["a"], "b": r"\ud83d"}


# ---------------------------------------------------------------------- comparisons


def test_comparisons_for_each_prompt(tmp_path: Path) -> None:
    """Three pairs of one prompt (in another case); one pair of another prompt, judged by two annotators."""
    found = comparisons(
        corpus(
            tmp_path,
            [
                pair("Why?", "a b", "c d"),
                pair("why?", "a b", "e f"),
                pair("Why?", "c d", "e f"),
                pair("How?", "a b", "c d", annotator="ann"),
                pair("How?", "c d", "a b", annotator="bob"),
            ],
        ),
        Settings(),
    )
    assert found.figures == {"prompts": 2, "mean": 2.0, "median": 2.0, "fewer": 1, "wanted": 3}
    assert found.value == 0.5
    assert found.histogram == {"1": 1, "3": 1}
    assert found.faults[0].places == ["row 4"]
    assert comparisons(corpus(tmp_path, [{"prompt": "Why?"}]), Settings()).verdict == "n/a"


# ---------------------------------------------------------------------- the command


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    lean = [file, "--skip", "near_duplicates,leakage"]
    code, report = checked(capsys, *lean)
    assert code == 0
    assert report["comparisons"]["verdict"] == "warn"
    assert report["verdict"] == "warn"
    assert "leakage" not in report
    assert checked(capsys, *lean, "--strict")[0] == 1
    code, report = checked(capsys, *lean, "--limit", "comparisons=0.1,0.9")
    assert (code, report["comparisons"]["verdict"], report["comparisons"]["fail"]) == (1, "fail", 0.9)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.jsonl"], "there is no file or folder 'nothing.jsonl'"),
        (["rows.jsonl", "--skip", "leekage"], "no check 'leekage'; did you mean 'leakage'?"),
        (["rows.jsonl", "--limit", "leakage"], "give NAME=WARN,FAIL"),
        (["rows.jsonl", "--columns", "prompt"], "'prompt' is no mapping"),
        (["rows.jsonl", "--columns", "{prompt: nothing}"], "has no column 'nothing'"),
        (["rows.jsonl", "--columns", "{prompd: prompt}"], "did you mean 'prompt'?"),
        (["rows.jsonl", "--votes_column", "nothing"], "has the column 'nothing'"),
        (["rows.jsonl", "--max_tokens", "many"], "'many' is no number of tokens"),
        (["rows.jsonl", "--similarity", "2"], "--similarity is a share"),
        (["rows.jsonl", "--shingle", "0"], "--shingle must be at least 1"),
        (["rows.jsonl", "--kind", "pairs"], "invalid choice: 'pairs'"),
        (["rows.jsonl", "--out", "rows.jsonl"], "is a file; give a folder"),
        (["rows.jsonl", "--tokenizer", "./nothing", "--skip", "near_duplicates"], "no model folder './nothing'"),
        (["odd.jsonl"], "has the columns a, which is no known format"),
        (["bad.jsonl"], "none of the 2 rows of"),
        (["empty.jsonl"], "holds no rows"),
        (["rows.jsonl", "rows.jsonl"], "'rows.jsonl' is given twice"),
        ([""], "the name of a data file is empty"),
        (["rows.jsonl", "--out", "rows.jsonl/x"], "--out: 'rows.jsonl/x' cannot be written to (Not a directory)"),
        (["rows.jsonl", "--out", "/proc/x"], "--out: '/proc/x' cannot be written to"),
        ([], "required: FILE"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], told: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(workdir / "rows.jsonl", GOOD)
    write(workdir / "odd.jsonl", [{"a": 1}])
    write(workdir / "bad.jsonl", [pair("Why?", "Same.", "Same.")] * 2)
    write(workdir / "empty.jsonl", [])
    assert main(["data", "check", *words, "--no_tracking"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


def test_a_place_for_runs_that_is_none(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(workdir / "rows.jsonl", GOOD)
    assert main(["data", "check", "rows.jsonl", "--root", "rows.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("alignment: error: --root: 'rows.jsonl' cannot be written to")


def test_names_in_two_flags_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    words = ["--skip", "near_duplicates,leakage", "--skip", "tokens", "--skip=leakage"]
    _, report = checked(capsys, file, *words)
    assert not {"near_duplicates", "leakage", "tokens"} & report.keys()


def test_a_report_that_cannot_be_written_is_one_line(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk; the earlier report is kept."""

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = write(workdir / "rows.jsonl", GOOD)
    words = ["data", "check", file, "--skip", "near_duplicates,leakage", "--no_tracking", "--out", "quality"]
    assert main(words) == 0
    before = (workdir / "quality" / "data_quality.html").read_bytes()
    capsys.readouterr()
    monkeypatch.setattr("alignment.whole_file.os.fsync", full)
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("data_quality.html' cannot be written: No space left on device\n")
    assert (workdir / "quality" / "data_quality.html").read_bytes() == before
    assert len(list((workdir / "quality").iterdir())) == 2


def test_names_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "chek"]) == 2
    assert "did you mean 'check'?" in capsys.readouterr().err
    assert main(["data"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:4]} == {"check", "augment"}


def test_a_split_may_be_called_like_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = checked(capsys, "world:support", "--splits", "test", "--max_rows", "8", "--skip", "near_duplicates")
    assert report["rows"]["figures"]["splits"] == {"test": 8}


def test_a_package_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    file = write(tmp_path / "rows.jsonl", GOOD)
    assert main(["data", "check", file, "--no_tracking"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'lightning-alignment[rewards]'" in error
    assert "--skip near_duplicates" in error


def test_a_run_with_page_and_figures(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers, limits, digest of the file and both files are in MLflow; the page and the JSON are in two folders."""
    pytest.importorskip("datasketch")
    write(workdir / "pairs.jsonl", [*GOOD, pair("Why?", "Same.", "Same.")])
    assert main(["data", "check", "pairs.jsonl", "--out", "quality", "--limit", "rows=0.1,0.15"]) == 1
    out = capsys.readouterr().out
    assert "rows" in out
    assert "chosen equals rejected: 1 (row 5)" in out
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    experiment = client.get_experiment_by_name("data")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["data/rows/value"] == pytest.approx(0.2)
    assert run.data.metrics["data/rows/unusable"] == 1.0
    assert run.data.metrics["data/rows/at_fault"] == 1.0
    assert run.data.params["verdict/rows"] == "fail"
    assert run.data.params["limit/rows"] == "warn > 0.1, fail > 0.15"
    assert {a.path for a in client.list_artifacts(run.info.run_id)} >= {"data_quality.html", "data_quality.json"}
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name.endswith("pairs.jsonl")
    (folder,) = (workdir / "runs" / "data").iterdir()
    for place in (folder, workdir / "quality"):
        report = json.loads((place / "data_quality.json").read_text())
        assert [finding["check"] for finding in report["checks"]] == list(LIMITS)
        page = (place / "data_quality.html").read_text()
        assert "chosen equals rejected" in page
        assert not re.search(r"<script|<link|<img|src=|url\(|@import", page)


def test_what_a_page_shows_stays_text() -> None:
    fault = Faults(what="<b>bold</b>", show=1)
    fault.add("<script>alert(1)</script> row 1")
    fault.add("row 2")
    found = Finding(
        check="rows",
        measured="3 < 4 & more",
        limit=Limit(0.0, 0.5),
        value=0.2,
        advice="see <i>there</i>",
        figures={"n": 1, "none": None},
        histogram={"<1>": 3, "2": 6},
        faults=[fault],
    )
    unknown = Finding(check="tokens", measured="not measurable", limit=Limit(0.0), advice="name it")
    page = html(Report(files=["a<b>.jsonl"], command="alignment data check 'a<b>.jsonl'", findings=[found, unknown]))
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "3 &lt; 4 &amp; more" in page
    assert 'style="width: 50.0%"' in page
    assert page.count('class="verdict warn"') == 3  # of the whole, in the table, above the details
    assert page.count('class="verdict na"') == 2
    assert "row 1</li>" in page
    assert "and 1 more" in page
