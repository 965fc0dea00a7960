"""Untrusted rows (R8 of the reliability plan): each kind of bad row is named with its place and counted exactly."""

import gzip
import json
import random

import pytest

from alignment.errors import UserError
from alignment.tiny import tiny_tokenizer as build_tokenizer
from datamodules import PreferenceData, SupervisedData
from datamodules.rows import Lengths, RowError, RowReport, number, text

GOOD = [{"prompt": f"Question {i}?", "chosen": f"Good answer {i}.", "rejected": f"Bad answer {i}."} for i in range(6)]
BASE = {"prompt": "P?", "chosen": "yes", "rejected": "no"}


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def lines(*rows):
    """Good rows 1-3, the given raw lines or objects from row 4 on, then good rows."""
    encoded = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    good = [json.dumps(row).encode() for row in GOOD]
    return b"\n".join([*good[:3], *encoded, *good[3:]]) + b"\n"


def with_margin(value):
    rows = [{**row, "margin": 0.5} for row in GOOD]
    bad = {**BASE} if value is None else {**BASE, "margin": value}
    return b"\n".join(json.dumps(r).encode() for r in [*rows[:3], bad, *rows[3:]])


CHOSEN_ENDS_WITH_USER = {**BASE, "chosen": turns(("user", "P?"), ("assistant", "a"), ("user", "b"))}
OTHER_PROMPT = {
    **BASE,
    "chosen": turns(("user", "P?"), ("assistant", "a")),
    "rejected": turns(("user", "Q?"), ("assistant", "b")),
}

# name: (file ending, content, reason, data module settings). The bad row is always row 4 and the only one.
BAD = {
    "missing key": ("jsonl", lines({"prompt": "P?", "chosen": "yes"}), "key 'rejected' is missing", {}),
    "prompt None": ("jsonl", lines({**BASE, "prompt": None}), "prompt is None", {}),
    "completion None": ("jsonl", lines({**BASE, "rejected": None}), "rejected is None", {}),
    "prompt empty": ("jsonl", lines({**BASE, "prompt": ""}), "prompt is empty", {}),
    "completion blank": ("jsonl", lines({**BASE, "chosen": " \n\t"}), "chosen is empty", {}),
    "equal pair": ("jsonl", lines({**BASE, "rejected": "yes"}), "chosen equals rejected", {}),
    "too long": ("jsonl", lines({**BASE, "chosen": "x" * 1_000_001}), "chosen is too long", {}),
    "invalid UTF-8": ("jsonl", lines(b'{"prompt": "P\xff?", "chosen": "a", "rejected": "b"}'), "not valid UTF-8", {}),
    "lone surrogate": ("jsonl", lines(b'{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}'), "not valid UTF-8", {}),
    "NUL": ("jsonl", lines({**BASE, "chosen": "a\x00b"}), "chosen holds a NUL character", {}),
    "number as prompt": ("jsonl", lines({**BASE, "prompt": 7}), "prompt has the wrong type", {}),
    "boolean as completion": ("jsonl", lines({**BASE, "chosen": True}), "chosen has the wrong type", {}),
    "nested prompt": ("jsonl", lines({**BASE, "prompt": {"text": "P?"}}), "prompt has the wrong type", {}),
    "nested list": ("jsonl", lines({**BASE, "chosen": [["yes"]]}), "message has the wrong type", {}),
    "row is a list": ("jsonl", lines(["P?", "yes", "no"]), "row has the wrong type", {}),
    "row is a text": ("jsonl", lines("P?"), "row has the wrong type", {}),
    "row is null": ("jsonl", lines(None), "row has the wrong type", {}),
    "duplicate": ("jsonl", lines(GOOD[0]), "duplicate of an earlier row", {}),
    "NaN margin": ("jsonl", with_margin(float("nan")), "margin is not a finite number", {}),
    "infinite margin": ("jsonl", with_margin(float("inf")), "margin is not a finite number", {}),
    "text as margin": ("jsonl", with_margin("large"), "margin is not a number", {}),
    "no margin": ("jsonl", with_margin(None), "margin is None", {}),
    "not JSON": ("jsonl", lines(b'{"prompt": "P?", "chosen": '), "not valid JSON", {}),
    "deep nesting": ("jsonl", lines(b"[" * 100_000), "not valid JSON", {}),
    "endless number": ("jsonl", lines(b'{"prompt": ' + b"9" * 5000 + b"}"), "not valid JSON", {}),
    "unknown role": ("jsonl", lines({**BASE, "prompt": turns(("oracle", "P?"))}), "message has an unknown role", {}),
    "no user turn": ("jsonl", lines({**BASE, "prompt": turns(("system", "P?"))}), "prompt has no user turn", {}),
    "picture": (
        "jsonl",
        lines({**BASE, "prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}),
        "message holds a part that is not text",
        {},
    ),
    "no messages": ("jsonl", lines({**BASE, "prompt": []}), "prompt is empty", {}),
    "other prompts": ("jsonl", lines(OTHER_PROMPT), "chosen and rejected have different prompts", {}),
    "user has the last word": ("jsonl", lines(CHOSEN_ENDS_WITH_USER), "chosen does not end with the assistant", {}),
    "no room for the completion": (
        "jsonl",
        lines({**BASE, "prompt": "P" * 100}),
        "completion has no token left within the limits",
        {"max_tokens": 100},
    ),
    "equal after the cut": (
        "jsonl",
        lines({**BASE, "chosen": "same" * 20 + "a", "rejected": "same" * 20 + "b"}),
        "chosen equals rejected within the limits",
        {"max_completion_tokens": 20},
    ),
    "cell too many": (
        "csv",
        b"prompt,chosen,rejected\na,b,c\nd,e,f\ng,h,i\nj,k,l,m\nn,o,p\nq,r,s\nt,u,v\n",
        "more cells than the header",
        {},
    ),
    "cell too few": (
        "csv",
        b"prompt,chosen,rejected\na,b,c\nd,e,f\ng,h,i\nj,k\nn,o,p\nq,r,s\nt,u,v\n",
        "rejected is None",
        {},
    ),
}


def data_of(path, cls=PreferenceData, **settings):
    settings = {"cache_dir": None, "tokenizer": build_tokenizer(), "val_fraction": 0.0, **settings}
    return cls(str(path), **settings)


def write(folder, ending, content):
    path = folder / f"rows.{ending}"
    path.write_bytes(content)
    return path


def test_there_are_at_least_thirty_kinds():
    assert len(BAD) >= 30


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_skipped_named_and_counted(tmp_path, kind):
    ending, content, reason, settings = BAD[kind]
    data = data_of(write(tmp_path, ending, content), **settings)
    assert len(data.groups("train")) == 6
    report = data.report
    assert (report.read, report.used, report.skipped) == (7, 6, 1)
    ((found, tally),) = report.dropped.items()
    assert reason in found
    assert (tally.count, tally.places) == (1, ["row 4"])


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_stops_the_run_when_asked(tmp_path, kind):
    ending, content, reason, settings = BAD[kind]
    with pytest.raises(UserError) as caught:
        data_of(write(tmp_path, ending, content), on_bad_row="stop", **settings).groups("train")
    message = str(caught.value)
    assert "row 4" in message
    assert reason in message
    assert "\n" not in message


def test_many_bad_rows_are_counted_exactly_by_reason(tmp_path):
    """1,000 rows, of which each is good or spoilt in one of three ways by a seeded draw."""
    draw = random.Random(3)
    spoil = {"prompt is None": {"prompt": None}, "chosen is empty": {"chosen": ""}, "key 'rejected' is missing": None}
    expected = dict.fromkeys(spoil, 0)
    rows = []
    for i in range(1000):
        row = {"prompt": f"Q{i}", "chosen": "a", "rejected": "b"}
        reason = draw.choice([None, None, *spoil])
        if reason is not None:
            expected[reason] += 1
            change = spoil[reason]
            row = {k: v for k, v in row.items() if k != "rejected"} if change is None else {**row, **change}
        rows.append(json.dumps(row))
    report_of = data_of(write(tmp_path, "jsonl", "\n".join(rows).encode()))
    used = len(report_of.groups("train"))
    assert {reason: tally.count for reason, tally in report_of.report.dropped.items()} == expected
    assert used == report_of.report.used == 1000 - sum(expected.values())


def test_a_refusing_template_costs_the_row_only(tmp_path):
    tok = build_tokenizer()
    tok.chat_template = (
        "{% if messages | length == 3 %}{{ raise_exception('three turns') }}{% endif %}" + tok.chat_template
    )
    bad = {**BASE, "prompt": turns(("user", "a"), ("assistant", "b"), ("user", "c"))}
    data = data_of(write(tmp_path, "jsonl", lines(bad)), tokenizer=tok)
    data.groups("train")
    assert data.report.used == 6
    assert list(data.report.dropped) == ["the chat template refuses these messages: three turns"]


def test_weights_below_zero(tmp_path):
    rows = [{"text": f"t{i}", "weight": w} for i, w in enumerate([1.0, 0.5, -0.1, "2", None])]
    data = data_of(write(tmp_path, "json", json.dumps(rows).encode()), cls=SupervisedData)
    assert [g.weights for g in data.groups("train")] == [[1.0], [0.5], [2.0]]
    assert {k: v.places for k, v in data.report.dropped.items()} == {
        "weight is below 0": ["row 3"],
        "weight is None": ["row 5"],
    }


# ---------------------------------------------------------------------- files that are damaged, or merely unusual


def test_a_cut_array_gives_the_rows_before_the_cut(tmp_path):
    whole = json.dumps(GOOD).encode()
    data = data_of(write(tmp_path, "json", whole[: whole.index(b"Question 4")]))
    assert len(data.groups("train")) == 4
    assert {k: v.places for k, v in data.report.dropped.items()} == {"the file is cut off or damaged here": ["row 5"]}


@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_cut_gzip_gives_the_rows_before_the_cut(tmp_path, kept):
    rows = [{"prompt": f"Q{i}?", "chosen": f"{i * 7919 % 997}", "rejected": f"no {i}"} for i in range(2000)]
    packed = gzip.compress(b"\n".join(json.dumps(r).encode() for r in rows))
    data = data_of(write(tmp_path, "jsonl.gz", packed[: int(len(packed) * kept)]))
    used = len(data.groups("train"))
    assert 0 < used < 2000
    ((reason, tally),) = data.report.dropped.items()
    assert reason == "the file is cut off or damaged here"
    assert tally.places == [f"row {used + 1}"]


def test_a_cut_gzip_table_does_not_use_its_torn_last_row(tmp_path):
    table = "prompt,chosen,rejected\n" + "".join(f"Q{i},{i * 7919 % 997},no {i}\n" for i in range(2000))
    packed = gzip.compress(table.encode())
    data = data_of(write(tmp_path, "csv.gz", packed[: len(packed) // 2]))
    used = data.groups("train")
    tokenizer = data.tokenizer
    assert tokenizer.decode(used[-1].completions[1]) == f"no {len(used) - 1}<|im_end|>"
    assert data.report.skipped == 1


def test_byte_order_mark_carriage_returns_and_blank_lines_are_no_fault(tmp_path):
    plain = write(tmp_path, "jsonl", "\n".join(json.dumps(r) for r in GOOD).encode())
    dressed = tmp_path / "dressed.jsonl"
    dressed.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(json.dumps(r) for r in GOOD).encode() + b"\r\n")
    table = tmp_path / "dressed.csv"
    cells = "\r\n".join(",".join(r.values()) for r in GOOD)
    table.write_bytes(b"\xef\xbb\xbfprompt,chosen,rejected\r\n" + cells.encode())
    stores = [data_of(path) for path in (plain, dressed, table)]
    contents = [[(g.prompt, g.completions) for g in data.groups("train")] for data in stores]
    assert contents[0] == contents[1] == contents[2]
    assert [data.report.skipped for data in stores] == [0, 0, 0]


def test_an_extra_key_is_noted_and_kept(tmp_path):
    data = data_of(write(tmp_path, "jsonl", lines({**BASE, "source": "forum"})))
    groups = data.groups("train")
    assert [dict(g.columns) for g in groups[3:5]] == [{"source": "forum"}, {}]
    assert data.report.skipped == 0
    assert {k: v.places for k, v in data.report.remarks.items()} == {"extra key 'source'": ["row 4"]}


def test_duplicates_can_be_kept(tmp_path):
    data = data_of(write(tmp_path, "jsonl", lines(GOOD[0])), keep_duplicates=True)
    assert len(data.groups("train")) == 7


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        ("jsonl", b"", "holds no rows"),
        ("jsonl", b"\n\n", "holds no rows"),
        ("json", b"[]", "holds no rows"),
        ("jsonl", b"\x00\x01\x02", "has no row that can be read: row 1: not valid JSON"),
        ("json", b"[1, 2]", "has no row that can be read: row 1: it is int, not an object"),
        ("jsonl", json.dumps({**BASE, "chosen": ""}).encode(), "none of the 1 rows"),
        ("parquet", b"PAR1", "is not a readable parquet file"),
        ("xlsx", b"PK", "known endings are"),
    ],
)
def test_a_source_without_usable_rows_is_an_error_of_one_line(tmp_path, ending, content, message):
    with pytest.raises(UserError) as caught:
        data_of(write(tmp_path, ending, content)).groups("train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- the report


def test_the_report_says_where_and_how_many():
    report = RowReport(source="x", format="f", read=9, used=2)
    for i in range(7):
        report.drop("prompt is empty", f"row {i + 1}")
    report.prompt = Lengths.of([1, 2, 3, 10], limit=10, cut=1)
    assert dict(report.lines())["dropped: prompt is empty"] == "7 (row 1, row 2, row 3, row 4, row 5, ...)"
    assert dict(report.lines())["prompt tokens"] == "mean 4, p95 10, longest 10 (limit 10, 1 cut)"
    assert report.skipped == 7
    assert RowReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_lengths_by_hand():
    stats = Lengths.of(list(range(1, 101)), limit=None, cut=0)
    assert (stats.mean, stats.p95, stats.longest) == (50.5, 95, 100)
    assert Lengths.of([], limit=None, cut=0).longest == 0


@pytest.mark.parametrize("value", [True, [], {}, "x", float("nan"), 10**400])
def test_numbers_that_are_none(value):
    with pytest.raises(RowError):
        number(value, "margin")


def test_values_that_are_fine():
    assert number("0.25", "margin") == 0.25
    assert number(0, "weight", minimum=0.0) == 0.0
    assert text(" é\U0001f600", "x") == " é\U0001f600"


def test_splits_are_listed_in_one_order() -> None:
    """`validate` reads the held-out rows first, `fit` those for training."""
    for names in (("train", "val"), ("val", "train")):
        counts = {"train": 8, "val": 2}
        report = RowReport(source="x", used=10, used_for={name: counts[name] for name in names})
        assert dict(report.lines())["rows used"] == "10 (8 train, 2 val)"
