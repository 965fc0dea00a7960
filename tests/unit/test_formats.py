"""Every public format, on rows written here and on the real files beside the repository."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from alignment.chat import Message
from alignment.errors import UserError
from datamodules import PreferenceData, SupervisedData
from datamodules.formats import common_keys, detect
from datamodules.reading import open_source
from datamodules.rows import RowError

U, A, S = (lambda text, role=role: Message(role, text) for role in ("user", "assistant", "system"))
ASK = (U("Hi?"),)


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def shared_gpt(*pairs):
    return [{"from": role, "value": content} for role, content in pairs]


def parts(text):
    return [{"type": "text", "value": text[:2]}, {"type": "text", "text": text[2:]}]


def parse(row, purpose, columns=None):
    keys = common_keys([row])
    return detect(keys, purpose, columns or {}, "here").parse(row, purpose, keys)


SUPERVISED = {
    "plain text": ({"text": "Once."}, "", "Once."),
    "prompt, completion": ({"prompt": "Hi?", "completion": "Yes."}, ASK, "Yes."),
    "prompt messages": ({"prompt": said(("user", "Hi?")), "completion": said(("assistant", "Yes."))}, ASK, "Yes."),
    "instruction": ({"instruction": "Hi?", "output": "Yes."}, ASK, "Yes."),
    "instruction, no input": ({"instruction": "Hi?", "input": "", "output": "Yes."}, ASK, "Yes."),
    "instruction, input": ({"instruction": "Hi?", "input": "x", "output": "Yes."}, (U("Hi?\n\nx"),), "Yes."),
    "instruction, system": ({"instruction": "Hi?", "output": "Yes.", "system": "s"}, (S("s"), *ASK), "Yes."),
    "messages": (
        {"messages": said(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))},
        (S("s"), U("a"), A("b"), U("c")),
        "d",
    ),
    "messages, empty system": ({"messages": said(("system", ""), ("user", "Hi?"), ("assistant", "Yes."))}, ASK, "Yes."),
    "ShareGPT": (
        {"conversations": shared_gpt(("system", "s"), ("human", "Hi?"), ("gpt", "Yes."))},
        (S("s"), *ASK),
        "Yes.",
    ),
    "ShareGPT, system column": (
        {"conversations": shared_gpt(("human", "Hi?"), ("gpt", "Yes.")), "system": "s"},
        (S("s"), *ASK),
        "Yes.",
    ),
    "preference rows": ({"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}, ASK, "Yes."),
}

PREFERENCE = {
    "texts": {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."},
    "instruction": {"instruction": "Hi?", "input": "", "output": "x", "chosen": "Yes.", "rejected": "No."},
    "prompt and one message each": {
        "prompt": said(("user", "Hi?")),
        "chosen": said(("assistant", "Yes.")),
        "rejected": said(("assistant", "No.")),
    },
    "prompt and whole conversations": {  # HuggingFaceH4/ultrafeedback_binarized
        "prompt": "Hi?",
        "prompt_id": "17",
        "chosen": said(("user", "Hi?"), ("assistant", "Yes.")),
        "rejected": said(("user", "Hi?"), ("assistant", "No.")),
        "messages": said(("user", "Hi?"), ("assistant", "Yes.")),
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    },
    "message transcripts": {
        "chosen": said(("user", "Hi?"), ("assistant", "Yes.")),
        "rejected": said(("user", "Hi?"), ("assistant", "No.")),
    },
    "text transcripts": {  # Anthropic/hh-rlhf
        "chosen": "\n\nHuman: Hi?\n\nAssistant: Yes.",
        "rejected": "\n\nHuman: Hi?\n\nAssistant: No.",
    },
    "ShareGPT": {
        "conversations": shared_gpt(("human", "Hi?")),
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "nested messages": {
        "chosen_messages": [{"role": "user", "content": parts("Hi?")}, {"role": "assistant", "content": parts("Yes.")}],
        "rejected_messages": [
            {"role": "user", "content": parts("Hi?")},
            {"role": "assistant", "content": parts("No.")},
        ],
    },
}


@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_formats(name):
    values, prompt, completion = SUPERVISED[name]
    row = parse(values, "supervised")
    assert (row.prompt, row.completions, row.raw) == (prompt, (completion,), name == "plain text")


@pytest.mark.parametrize("name", PREFERENCE)
def test_preference_formats(name):
    row = parse(PREFERENCE[name], "preference")
    assert (row.prompt, row.completions, row.raw) == (ASK, ("Yes.", "No."), False)
    assert parse(PREFERENCE[name], "supervised").completions == ("Yes.",)


def test_other_columns_are_kept_when_they_are_plain_values():
    row = parse(PREFERENCE["prompt and whole conversations"] | {"tags": ["a"]}, "preference")
    assert row.columns == {"prompt_id": "17", "score_chosen": 8.0, "score_rejected": 2.0}


def test_transcripts_of_several_turns():
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c: d\nHuman things\n\nAssistant: "
    row = parse({"chosen": start + "yes\n\nsure", "rejected": start + "no"}, "preference")
    assert row.prompt == (U("a"), A("b"), U("c: d\nHuman things"))
    assert row.completions == ("yes\n\nsure", "no")


def test_texts_without_marks_split_at_their_common_start():
    row = parse({"chosen": "The sky is blue.", "rejected": "The sky is blank."}, "preference")
    assert (row.prompt, row.completions, row.raw) == ("The sky is", (" blue.", " blank."), True)
    with pytest.raises(RowError, match="no common start"):
        parse({"chosen": "Blue.", "rejected": "Black."}, "preference")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: x"}, "chosen is empty"),
        ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a\n\nAssistant: x"}, "does not end with the assistant"),
        (
            {"chosen_messages": said(("assistant", "x")), "rejected_messages": said(("assistant", "y"))},
            "have no prompt",
        ),
        (
            {"conversations": shared_gpt(("human", "a"), ("gpt", "b")), "chosen": "x", "rejected": "y"},
            "ends with the ass",
        ),
    ],
)
def test_pairs_that_cannot_be_understood(values, reason):
    with pytest.raises(RowError, match=reason):
        parse(values, "preference")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (said(("user", "a")), "does not end with the assistant"),
        (said(("assistant", "a")), "has no user turn"),
        (said(("user", ""), ("assistant", "a")), "message is empty"),
        (["a"], "message has the wrong type"),
        ("a", "messages has the wrong type"),
    ],
)
def test_conversations_that_cannot_be_understood(messages, reason):
    with pytest.raises(RowError, match=reason):
        parse({"messages": messages}, "supervised")


# ---------------------------------------------------------------------- columns


def test_columns_map_our_names_to_theirs():
    values = {"question": "Hi?", "answer_matching_behavior": "Yes.", "answer_not_matching_behavior": "No.", "p": 0.9}
    columns = {
        "prompt": "question",
        "chosen": "answer_matching_behavior",
        "rejected": "answer_not_matching_behavior",
        "margin": "p",
    }
    keys = frozenset({*values, *columns})
    row = detect(frozenset(values), "preference", columns, "here").parse(values, "preference", keys)
    assert (row.prompt, row.completions, row.margin, row.columns) == (ASK, ("Yes.", "No."), 0.9, {})


def test_a_mapping_chooses_among_formats():
    values = {"instruction": "Hi?", "output": "Long.", "chosen": "Yes.", "rejected": "No."}
    row = parse(values, "supervised", {"prompt": "instruction", "completion": "output"})
    assert row.completions == ("Long.",)


@pytest.mark.parametrize(
    ("keys", "columns", "message"),
    [
        ({"question"}, {}, "has the columns question, which is no preference format"),
        ({"question"}, {"promt": "question"}, "did you mean 'prompt'"),
        ({"question"}, {"prompt": "qestion"}, "has no column 'qestion'; it has question"),
    ],
)
def test_unknown_columns_are_explained(keys, columns, message):
    with pytest.raises(UserError) as caught:
        detect(frozenset(keys), "preference", columns, "here")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- sources

ROWS = [{"prompt": f"Q{i}", "completion": f"A{i}"} for i in range(5)]


def read(path, split="train"):
    source = open_source(str(path), split=split, config=None, kind="sft", size=None)
    return [record.values for record in source.records()]


def write_lines(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.json", lambda p: p.write_text(json.dumps(ROWS, indent=1))),
        ("lines.json", write_lines),
        ("one.json", lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))),
        ("a.jsonl", write_lines),
        ("a.csv", lambda p: p.write_text("prompt,completion\n" + "".join(f"Q{i},A{i}\n" for i in range(5)))),
        ("a.tsv", lambda p: p.write_text("prompt\tcompletion\n" + "".join(f"Q{i}\tA{i}\n" for i in range(5)))),
        ("a.parquet", lambda p: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), p)),
        ("saved", lambda p: datasets.Dataset.from_list(ROWS).save_to_disk(p)),
        ("splits", lambda p: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(p)),
    ],
)
def test_files_and_folders(tmp_path, name, write):
    write(tmp_path / name)
    assert read(tmp_path / name) == ROWS


def test_several_gzip_members_and_several_files(tmp_path):
    encoded = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(encoded[2]) + gzip.compress(b"".join(encoded[3:])))
    (tmp_path / "a.jsonl").write_bytes(b"".join(encoded[:2]))
    (tmp_path / "readme.md").write_text("not data")
    source = open_source(str(tmp_path), split="train", config=None, kind="sft", size=None)
    records = list(source.records())
    assert [record.values for record in records] == ROWS
    assert [record.place for record in records][:3] == ["a.jsonl row 1", "a.jsonl row 2", "b.jsonl.gz row 1"]


def test_plain_text_files_hold_one_row_per_line(tmp_path):
    (tmp_path / "a.txt").write_text("Once upon a time.\n\nThe end.\n")
    assert read(tmp_path / "a.txt") == [{"text": "Once upon a time."}, {"text": "The end."}]


def test_hub_ids_go_to_datasets(monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("someone/some-data", split="train_prefs") == ROWS
    assert asked == [("someone/some-data", None, "train_prefs")]


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        ("nowhere/at-all.jsonl", "train", "there is no file or folder"),
        ("./nowhere", "train", "there is no file or folder"),
        ("world:suport", "train", "the built-in world is called 'world:support'"),
        ("world:support", "validation", "has the splits train, val and test"),
        ("nobody/nothing-here", "train", "cannot be loaded from the hub"),
    ],
)
def test_sources_that_are_not_there(path, split, message):
    with pytest.raises(UserError) as caught:
        read(path, split)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- real files

PERSONA = {"prompt": "question", "chosen": "answer_matching_behavior", "rejected": "answer_not_matching_behavior"}
# (file, class, settings, rows read, dropped by reason). Counted independently of this code, by comparing raw rows.
REAL = [
    ("rasbt_instruction-data.json", SupervisedData, {}, 1100, {}),
    ("rasbt_instruction-data-with-preference.json", SupervisedData, {}, 1100, {}),
    ("rasbt_instruction-data-with-preference.json", PreferenceData, {}, 1100, {"chosen equals rejected": 6}),
    ("anthropic_persona_agreeableness.jsonl", PreferenceData, {"columns": PERSONA}, 1000, {}),
    ("llamafactory_dpo_en_demo.json", PreferenceData, {}, 299, {"duplicate of an earlier row": 5}),
    ("llamafactory_dpo_en_demo.json", SupervisedData, {"train_on": "all"}, 299, {"duplicate of an earlier row": 5}),
    ("llamafactory_v1_dpo_demo.jsonl", PreferenceData, {}, 10, {}),
]


@pytest.mark.parametrize(("name", "cls", "settings", "read", "dropped"), REAL)
def test_real_files(shared, tiny_tokenizer, name, cls, settings, read, dropped):
    data = cls(str(shared / "data" / name), tokenizer=tiny_tokenizer, cache_dir=None, **settings)
    train, val = data.groups("train"), data.groups("val")
    report = data.report
    assert {reason: tally.count for reason, tally in report.dropped.items()} == dropped
    assert report.read == read
    assert report.used == len(train) + len(val) == read - sum(dropped.values())
    assert {len(g.completions) for g in train} == {1 if cls is SupervisedData else 2}


def test_first_real_rows_read_as_they_stand(shared, tiny_tokenizer):
    path = shared / "data" / "llamafactory_dpo_en_demo.json"
    limits = {"max_prompt_tokens": None, "max_completion_tokens": None}
    data = PreferenceData(str(path), tokenizer=tiny_tokenizer, cache_dir=None, val_fraction=0.0, **limits)
    row = json.loads(path.read_text())[1]
    group = data.groups("train")[1]
    system, asked = (turn["value"] for turn in row["conversations"])
    assert tiny_tokenizer.decode(group.prompt) == (
        f"<bos><|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    )
    ended = [row[name]["value"] + "<|im_end|>" for name in ("chosen", "rejected")]
    assert [tiny_tokenizer.decode(c) for c in group.completions] == ended
