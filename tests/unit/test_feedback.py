"""Feedback that arrives in files and tables: each row once, whatever happens to the files; and the writer's side."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from alignment.errors import UserError
from alignment.feedback import (
    Feedback,
    Place,
    Places,
    Rounds,
    Row,
    Standing,
    as_state,
    described,
    from_state,
    open_feedback,
    under_way,
)
from alignment.feedback_files import FeedbackFiles
from alignment.feedback_table import FeedbackTable
from alignment.feedback_writer import append_row

HOUR = 3600.0


def write(path: Path, text: str, mode: str = "a") -> Path:
    with path.open(mode, encoding="utf-8") as file:
        file.write(text)
    return path


def take(source: Feedback, places: Places = (), count: int = 100) -> tuple[list[Row], Places]:
    """A look, and all of its rows."""
    places, _ = source.look(places)
    rows: list[Row] = []
    while under_way(places):
        before = places
        more, places = source.read(places, count)
        rows += more
        assert places != before
    return rows, places


def texts(rows: list[Row]) -> list[str]:
    return [text for _, text in rows]


def numbers(place: Place) -> tuple[int, int, int, int]:
    return place.position, place.row, place.end, place.last


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


# ---------------------------------------------------------------------- files


def test_lines_by_hand(tmp_path: Path) -> None:
    """Bytes and lines; a blank line is no row, and one without its end has not arrived."""
    path = tmp_path / "rows.jsonl"
    source = FeedbackFiles(path)
    assert source.look(()) == ((), 0)
    write(path, "a\nb\n\nc\nhalf a li")
    places, count = source.look(())
    assert (numbers(places[0]), count) == ((0, 0, 7, 4), 4)
    write(path, "ne\n")  # of the next round
    rows, places = source.read(places, 2)
    assert (rows, numbers(places[0])) == ([("row 1", "a"), ("row 2", "b")], (4, 2, 7, 4))
    rows, places = source.read(places, 2)
    assert (rows, numbers(places[0])) == ([("row 4", "c")], (7, 4, 7, 4))
    assert source.read(places, 2) == ([], places)
    places, count = source.look(from_state(as_state(places)))
    assert (numbers(places[0]), count) == ((7, 4, 19, 5), 1)
    assert source.read(places, 9)[0] == [("row 5", "half a line")]


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    """By name at first; new files come behind those that are known; other files are none of ours."""
    for name, text in (("b.jsonl", "b1\n"), ("a.jsonl", "a1\na2\n"), ("notes.txt", "x\n"), (".hidden.jsonl", "x\n")):
        write(tmp_path / name, text)
    source = FeedbackFiles(tmp_path)
    places, count = source.look(())
    assert count == 3
    assert described(source, places) == f"rows 1 to 2 of {tmp_path}/a.jsonl, row 1 of {tmp_path}/b.jsonl"
    rows, places = take(source)
    assert rows == [("a.jsonl row 1", "a1"), ("a.jsonl row 2", "a2"), ("b.jsonl row 1", "b1")]
    write(tmp_path / "0.jsonl", "new\n")
    write(tmp_path / "b.jsonl", "b2\n")
    write(tmp_path / "a.jsonl", "torn")
    assert take(source, places)[0] == [("b.jsonl row 2", "b2"), ("0.jsonl row 1", "new")]


def test_a_file_that_is_cut_is_read_from_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Shorter, or longer but with other content where reading stopped."""
    path = write(tmp_path / "rows.jsonl", "a\nb\nc\n")
    source = FeedbackFiles(path)
    _, places = take(source)
    write(path, "x\n", mode="w")
    rows, places = take(source, places)
    assert rows == [("row 1", "x")]
    write(path, "one\ntwo\n", mode="w")
    assert take(source, places)[0] == [("row 1", "one"), ("row 2", "two")]
    lines = told(caplog)
    assert [line.partition(" had been")[0] for line in lines] == [
        f"{path} was cut or overwritten after row 3",
        f"{path} was cut or overwritten after row 1",
    ]
    assert all("read from its start" in line and "\n" not in line for line in lines)


def test_a_file_that_is_cut_inside_a_round(tmp_path: Path) -> None:
    """What is left of the round is gone; the next look begins anew."""
    path = write(tmp_path / "rows.jsonl", "a\nb\nc\n")
    source = FeedbackFiles(path)
    places, _ = source.look(())
    _, places = source.read(places, 2)
    write(path, "x\n", mode="w")
    rows, places = source.read(places, 9)
    assert (rows, under_way(places)) == ([], False)
    assert take(source, places)[0] == [("row 1", "x")]


@pytest.mark.parametrize("alone", [True, False])
def test_rotation_by_name(alone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Renamed while a round is under way, and a new file in its place: the old one to its end, then the new one."""
    path = write(tmp_path / "rows.jsonl", "a\nb\nc\n")
    source = FeedbackFiles(path if alone else tmp_path)
    places, _ = source.look(())
    rows, places = source.read(places, 1)
    write(path, "late\n")
    path.rename(tmp_path / "rows.jsonl.1")
    write(path, "new\n")
    more, places = source.read(places, 9)
    assert texts(rows + more) == ["a", "b", "c"]
    write(tmp_path / "rows.jsonl.1", "last\n")  # its writer had it open still
    rows, places = take(source, places)
    assert texts(rows) == ["late", "last", "new"]
    assert rows[0][0] == "rows.jsonl.1 row 4"
    (line,) = told(caplog)
    assert line == f"{path} is rows.jsonl.1 now, and is read on behind row 1"
    (tmp_path / "rows.jsonl.1").rename(tmp_path / "rows.jsonl.2")
    path.rename(tmp_path / "rows.jsonl.1")
    write(path, "newest\n")
    assert texts(take(source, places)[0]) == ["newest"]


@pytest.mark.parametrize("alone", [True, False])
def test_rotation_between_a_look_and_its_first_row(alone: bool, tmp_path: Path) -> None:
    """The file of the look has another name by then, and its old name is a new file's."""
    path = write(tmp_path / "rows.jsonl", '{"n": 1}\n{"n": 2}\n')
    source = FeedbackFiles(path if alone else tmp_path)
    places, count = source.look(())
    assert count == 2
    path.rename(tmp_path / "rows-1.jsonl")
    write(path, '{"n": 3, "longer": true}\n')
    rows, places = source.read(places, 5)
    assert texts(rows) == ['{"n": 1}', '{"n": 2}']
    more, places = take(source, places)
    assert texts(more) == ['{"n": 3, "longer": true}']
    assert take(source, places)[0] == []


def test_rotation_by_copy(tmp_path: Path) -> None:
    """Copied, then cut: what the copy holds is not read twice, and its end not lost."""
    path = write(tmp_path / "rows.jsonl", "a\nb\n")
    source = FeedbackFiles(tmp_path)
    _, places = take(source)
    write(path, "c\n")
    shutil.copy(path, tmp_path / "rows-1.jsonl")
    write(path, "d\n", mode="w")
    rows, places = take(source, places)
    assert rows == [("rows-1.jsonl row 3", "c"), ("rows.jsonl row 1", "d")]
    assert take(source, places)[0] == []


def test_a_file_that_was_written_anew_with_the_same_rows(tmp_path: Path) -> None:
    """An editor's save, a restored backup, another machine: another inode, the same bytes."""
    path = write(tmp_path / "rows.jsonl", "a\nb\n")
    source = FeedbackFiles(path)
    _, places = take(source)
    write(tmp_path / "new", "a\nb\nc\n").replace(path)
    assert take(source, places)[0] == [("row 3", "c")]


def test_a_file_that_was_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "rows.jsonl", "a\nb\n")
    source = FeedbackFiles(path)
    _, places = take(source)
    write(tmp_path / "new", "x\ny\nz\n").replace(path)
    assert texts(take(source, places)[0]) == ["x", "y", "z"]
    (line,) = told(caplog)
    assert line.startswith(f"{path} was replaced after row 2 had been read: it is read from its start")


def test_a_file_that_is_gone_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "rows.jsonl", "a\nb\n")
    source = FeedbackFiles(path)
    _, places = take(source)
    path.unlink()
    for _ in range(2):
        rows, places = take(source, places)
        assert rows == []
    assert told(caplog) == [f"{path} is gone; row 2 is the last one read of it"]
    write(path, "a\nb\nc\n")
    assert take(source, places)[0] == [("row 3", "c")]


def test_another_file_with_a_known_inode(tmp_path: Path) -> None:
    """A file system gives an inode again: what was read tells them apart."""
    path = write(tmp_path / "rows.jsonl", "a\n")
    source = FeedbackFiles(tmp_path)
    _, (place,) = take(source)
    write(tmp_path / "other.txt", "x\ny\n")
    path.unlink()
    taken = Place(**{**as_state((place,))[0], "inode": (tmp_path / "other.txt").stat().st_ino})
    unread = Place(name="rows.jsonl", inode=taken.inode)
    assert take(source, (taken,))[0] == take(source, (unread,))[0] == []


def test_a_disk_that_cannot_be_read_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And tried again: nothing is lost."""
    path = write(tmp_path / "rows.jsonl", "a\n")
    source = FeedbackFiles(path)
    places, _ = source.look(())
    path.unlink()
    path.mkdir()
    assert source.read(places, 1) == source.read(places, 1) == ([], places)
    assert len([line for line in told(caplog) if line.startswith("feedback cannot be read")]) == 1
    path.rmdir()
    write(path, "a\n")
    assert source.read(places, 1)[0] == [("row 1", "a")]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """They arrive as lone surrogates, which the reader of rows finds."""
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\n")
    assert take(FeedbackFiles(tmp_path))[0] == [("rows.jsonl row 1", "\udcff")]


# ---------------------------------------------------------------------- rounds


def test_rounds_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = FeedbackFiles(path)
    rounds = Rounds(source, HOUR)
    standing = rounds.begin(Standing(), 0.0)
    assert standing == Standing(due=HOUR)  # no file: the next look is in an hour
    write(path, "a\nb\n")
    assert rounds.begin(standing, 10.0) == standing
    standing = rounds.begin(standing, HOUR)
    assert (under_way(standing.places), standing.due) == (True, 2 * HOUR)
    assert rounds.begin(standing, 3 * HOUR) == standing  # a round under way goes on
    standing = Standing(places=source.read(standing.places, 9)[1], due=standing.due)
    write(path, "c\n")
    standing = rounds.begin(Standing.of_state(standing.state_dict()), 2 * HOUR + 1)
    assert (source.read(standing.places, 9)[0], standing.due) == ([("row 3", "c")], 3 * HOUR + 1)
    assert under_way(rounds.begin(Standing(due=1e9), 0.0).places)  # the clock was put back


def test_rounds_wait_for_enough_rows_or_for_quiet(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "a\n")
    rounds = Rounds(FeedbackFiles(path), every=1.0, rows=3, quiet=10.0)
    standing = rounds.begin(Standing(), 0.0)
    assert not under_way(standing.places)
    write(path, "b\n")
    standing = rounds.begin(standing, 9.0)
    assert not under_way(standing.places)
    standing = rounds.begin(standing, 18.0)  # the last one came 9 s ago
    assert not rounds.silence.over(18.0)
    assert not under_way(standing.places)
    standing = rounds.begin(standing, 19.0)
    assert [place.last for place in standing.places] == [2]
    write(path, "c\nd\n")
    assert [p.last for p in rounds.begin(Standing(places=(Place(name=path.name),)), 20.0).places] == [4]


def test_a_state_of_an_earlier_version() -> None:
    with pytest.raises(UserError, match="form of an earlier version"):
        Standing.of_state({"position": 3, "row": 1, "end": 3, "last": 1, "due": None})


# ---------------------------------------------------------------------- tables


def database(path: Path, sql: str, *values: str) -> None:
    with closing(sqlite3.connect(path)) as opened, opened:
        opened.execute(sql, values)


def test_a_table_is_read_as_a_folder_is(tmp_path: Path) -> None:
    """The same rows through append_row: equal JSON in equal order, also of what comes later."""
    folder, path = tmp_path / "folder", tmp_path / "rows.db"
    folder.mkdir()
    sources: list[Feedback] = [FeedbackFiles(folder), FeedbackTable(path)]
    standing: list[Places] = [(), ()]
    for first in (0, 3, 6):
        for n in range(first, first + 3):
            for target in (folder, path):
                append_row(target, {"prompt": f"Grüße {n}?", "chosen": "ja", "rejected": ["no", {"n": n}]})
        found = [take(source, places, count=2) for source, places in zip(sources, standing, strict=True)]
        standing = [places for _, places in found]
        assert texts(found[0][0]) == texts(found[1][0])
        assert [json.loads(text)["rejected"][1]["n"] for text in texts(found[0][0])] == [*range(first, first + 3)]
    assert [place for place, _ in found[1][0]] == ["row 7", "row 8", "row 9"]


def test_columns_are_the_row(tmp_path: Path) -> None:
    """Without those that are NULL; keys may have gaps."""
    path = tmp_path / "rows.db"
    database(path, "CREATE TABLE votes (n INTEGER PRIMARY KEY, prompt TEXT, weight REAL, raw BLOB)")
    database(path, "INSERT INTO votes VALUES (3, 'Why?', 0.5, NULL), (9, 'How?', NULL, x'41ff')")
    source = FeedbackTable(path, "votes")
    places, count = source.look(())
    assert (numbers(places[0]), count) == ((0, 0, 9, 9), 2)
    rows, places = take(source)
    assert [(place, json.loads(text)) for place, text in rows] == [
        ("row 3", {"n": 3, "prompt": "Why?", "weight": 0.5}),
        ("row 9", {"n": 9, "prompt": "How?", "raw": "A\udcff"}),
    ]
    database(path, "DELETE FROM votes")
    assert take(source, places) == ([], places)
    database(path, "INSERT INTO votes VALUES (10, 'Who?', NULL, NULL)")
    assert [place for place, _ in take(source, places)[0]] == ["row 10"]


def test_a_writer_and_a_reader_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """In WAL mode: a transaction under way is not seen and does not keep us; a reader does not keep the writer."""
    path = tmp_path / "rows.db"
    append_row(path, {"n": 1})
    source = FeedbackTable(path)
    with closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute('INSERT INTO feedback ("row") VALUES (\'{"n": 2}\')')
        rows, places = take(source)
        assert texts(rows) == ['{"n": 1}']
        with closing(source._connect()) as reader:
            reading = reader.execute("SELECT * FROM feedback")
            reading.fetchone()
            writer.execute("COMMIT")
        assert texts(take(source, places)[0]) == ['{"n": 2}']
    with closing(source._connect()) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM feedback")


def test_a_locked_file_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without WAL a writer may lock all of it: we give up soon, and find the rows later."""
    monkeypatch.setattr("alignment.feedback_table.PATIENCE", 0.01)
    path = tmp_path / "rows.db"
    database(path, 'CREATE TABLE feedback (id INTEGER PRIMARY KEY, "row" TEXT)')
    database(path, "INSERT INTO feedback VALUES (1, '{}')")
    source = FeedbackTable(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        source.check()  # it may be all right later
        for _ in range(2):
            assert source.look(())[1] == 0
        writer.execute("COMMIT")
    assert told(caplog) == ["feedback cannot be read: database is locked"]
    assert texts(take(source)[0]) == ["{}"]


def test_a_table_that_was_emptied_or_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.db"
    database(path, 'CREATE TABLE feedback (id INTEGER PRIMARY KEY, "row" TEXT)')
    database(path, "INSERT INTO feedback (\"row\") VALUES ('1'), ('2'), ('3')")
    source = FeedbackTable(path)
    _, places = take(source)
    database(path, "DELETE FROM feedback")
    database(path, "INSERT INTO feedback (\"row\") VALUES ('4')")  # its key is 1 again
    rows, places = take(source, places)
    assert texts(rows) == ["4"]
    database(tmp_path / "new.db", 'CREATE TABLE feedback (id INTEGER PRIMARY KEY, "row" TEXT)')
    database(tmp_path / "new.db", "INSERT INTO feedback (\"row\") VALUES ('5'), ('6')")
    (tmp_path / "new.db").replace(path)
    rows, places = take(source, places)
    assert texts(rows) == ["5", "6"]
    assert [line.partition(" had been")[0] for line in told(caplog)] == [
        f"{path} was emptied or replaced after row 3",
        f"{path} was emptied or replaced after row 1",
    ]
    shutil.copy(path, tmp_path / "new.db")
    (tmp_path / "new.db").replace(path)  # a copy of the same
    rows, places = take(source, places)
    assert rows == []
    database(path, "UPDATE feedback SET \"row\" = '7'")
    for _ in range(2):
        rows, places = take(source, places)
        assert rows == []
    (line,) = told(caplog)
    assert "row 2 is not what was read there" in line


def test_the_last_rows_are_deleted(tmp_path: Path) -> None:
    """With AUTOINCREMENT no key comes again, and what is left is not read again."""
    path = tmp_path / "rows.db"
    for n in range(3):
        append_row(path, {"n": n})
    source = FeedbackTable(path)
    _, places = take(source)
    database(path, "DELETE FROM feedback WHERE id > 1")
    rows, places = take(source, places)
    assert rows == []
    append_row(path, {"n": 3})
    assert take(source, places)[0] == [("row 4", '{"n": 3}')]


def test_a_table_that_gets_a_column(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one with a default, which old rows have then too, and though the file is another one since: a migration
    that writes a new file repeats nothing. Another value in a known column does."""
    path = tmp_path / "rows.db"
    database(path, "CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT, prompt TEXT, note TEXT)")
    database(path, "INSERT INTO t (prompt) VALUES ('a')")
    source = FeedbackTable(path)
    rows, places = take(source)
    assert texts(rows) == ['{"id": 1, "prompt": "a"}']
    database(path, "ALTER TABLE t ADD COLUMN weight REAL DEFAULT 2.0")
    shutil.copy(path, tmp_path / "new.db")
    (tmp_path / "new.db").replace(path)
    database(path, "INSERT INTO t (prompt) VALUES ('b')")
    rows, places = take(source, places)
    assert texts(rows) == ['{"id": 2, "prompt": "b", "weight": 2.0}']
    assert told(caplog) == []
    shutil.copy(path, tmp_path / "new.db")
    (tmp_path / "new.db").replace(path)
    database(path, "UPDATE t SET prompt = 'c' WHERE id = 2")
    assert len(take(source, places)[0]) == 2
    assert "was emptied or replaced after row 2" in told(caplog)[0]


def test_a_place_of_an_earlier_version_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its mark is the digest of all columns alone."""
    path = tmp_path / "rows.db"
    database(path, "CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT, prompt TEXT)")
    database(path, "INSERT INTO t (prompt) VALUES ('a')")
    (place,) = take(FeedbackTable(path))[1]
    digest = hashlib.blake2b(b'{"id": 1, "prompt": "a"}', digest_size=8).hexdigest()
    assert place.mark.startswith(f"{digest} ")
    assert take(FeedbackTable(path), (replace(place, mark=digest),))[0] == []
    assert told(caplog) == []


def test_a_table_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    source = open_feedback(str(path), None, "here")
    source.check()
    assert take(source)[0] == []
    database(path, "PRAGMA user_version = 1")
    places = take(source)[1]
    append_row(path, {"n": 1})
    assert texts(take(source, places)[0]) == ['{"n": 1}']


# ---------------------------------------------------------------------- mistakes


def test_paths_that_cannot_be_followed(tmp_path: Path) -> None:
    for path, table, said in (
        ("", None, "here: the path is empty; give a folder of .jsonl files"),
        (tmp_path / "rows.csv", None, "'.*rows.csv' cannot be followed; rows arrive in .jsonl files or"),
        (tmp_path / "none", None, "here: there is no folder '.*none'; make it first"),
        (tmp_path / "none" / "rows.jsonl", None, "there is no folder '.*none'"),
        (tmp_path / "rows.jsonl", "votes", "a table is of an sqlite file, and '.*rows.jsonl' is none"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            open_feedback(str(path), table, "here")
        assert "\n" not in str(caught.value)


def test_tables_that_cannot_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    path.write_text("not sqlite, and long enough to be told from an empty file" * 9)
    with pytest.raises(UserError, match="is not an sqlite file that can be read"):
        FeedbackTable(path).check()
    path.unlink()
    database(path, "CREATE TABLE a (prompt TEXT)")
    with pytest.raises(UserError, match="has no column INTEGER PRIMARY KEY"):
        FeedbackTable(path).check()
    database(path, "CREATE TABLE b (id INTEGER PRIMARY KEY)")
    with pytest.raises(UserError, match="has the tables a, b; say which one with table"):
        FeedbackTable(path).check()
    with pytest.raises(UserError, match="has no table 'c'; it has a, b"):
        FeedbackTable(path, "c").check()
    FeedbackTable(path, "b").check()
    renamed = path.rename(tmp_path / "rows.jsonl")  # known by its first bytes
    assert isinstance(open_feedback(str(renamed), "b", "here"), FeedbackTable)


def test_what_goes_wrong_later_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.db"
    append_row(path, {"n": 1})
    source = FeedbackTable(path)
    _, places = take(source)
    database(path, "CREATE TABLE another (n INTEGER PRIMARY KEY)")
    for _ in range(2):
        assert source.look(places) == (places, 0)
    (line,) = told(caplog)
    assert "has the tables another, feedback" in line


# ---------------------------------------------------------------------- the writer


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """Into one file at the same time, while it is read: every row once, whole, each writer's in its order."""
    path = tmp_path / "rows.jsonl"
    source, places, found = FeedbackFiles(path), (), []

    def writes(writer: int) -> None:
        for n in range(30):
            append_row(path, {"writer": writer, "n": n, "text": "x" * 500})

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(writes, writer) for writer in range(2)]
        while not all(task.done() for task in running):
            rows, places = take(source, places)
            found += rows
        for task in running:
            task.result()
    rows, places = take(source, places)
    found += rows
    assert [place for place, _ in found] == [f"row {n + 1}" for n in range(60)]
    read = [(row["writer"], row["n"]) for row in map(json.loads, texts(found))]
    assert [[n for writer, n in read if writer == w] for w in range(2)] == [[*range(30)]] * 2


def test_a_line_that_a_killed_writer_left(tmp_path: Path) -> None:
    """It is no row of its own until the next writer closes it off, and damages no other row."""
    path = write(tmp_path / "rows.jsonl", '{"n": 1}\n{"n": 2, "te')
    source = FeedbackFiles(path)
    rows, places = take(source)
    assert texts(rows) == ['{"n": 1}']
    append_row(path, {"n": 3})
    assert texts(take(source, places)[0]) == ['{"n": 2, "te', '{"n": 3}']


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"n": 1})
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(file, data[:4])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append_row(path, {"n": 2})
    monkeypatch.undo()
    assert path.read_text() == '{"n": 1}\n'


@pytest.mark.parametrize("row", [{"n": float("nan")}, {"n": {1}}, {"n": "\ud800"}])
def test_rows_that_json_cannot_hold(row: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be what JSON can hold"):
        append_row(tmp_path / "rows.jsonl", row)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_row_for_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty setting is no folder: not the one that the service runs in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the path of feedback is empty"):
        append_row("", {"n": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_gets_a_file_for_this_machine(tmp_path: Path) -> None:
    append_row(tmp_path, {"n": 1})
    append_row(tmp_path, {"n": 2})
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".jsonl"
    assert file.read_text() == '{"n": 1}\n{"n": 2}\n'
