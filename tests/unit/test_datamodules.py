"""Data modules: held out by prompt, cached on disk, at home in a Trainer."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser

import datamodules.prepare
from alignment.errors import UserError
from alignment.randomness import permutation
from alignment.tiny import tiny_tokenizer as build_tokenizer
from benchmarks.ports import meeting_port
from datamodules import GroupData, PreferenceData, SupervisedData

# 40 prompts with three comparisons each, scattered, in changing case and spacing.
ROWS = [
    {
        "prompt": f"Question {i}?" if n < 2 else f" question  {i}? ",
        "chosen": f"good {i} {n}",
        "rejected": f"bad {i} {n}",
    }
    for n in range(3)
    for i in range(40)
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    return file


@pytest.fixture
def make(path, tmp_path, tiny_tokenizer):
    def build(cls=PreferenceData, where=path, **settings):
        settings = {"tokenizer": tiny_tokenizer, "cache_dir": None, **settings}
        return cls(str(where), **settings)

    return build


def numbers(groups):
    return [g.index for g in groups]


def asked(groups):
    """The number of the question each group asks, known from its row."""
    return {g.index % 40 for g in groups}


# ---------------------------------------------------------------------- splits


def test_all_comparisons_of_a_prompt_are_on_one_side(make):
    data = make(val_fraction=0.25)
    train, val = data.groups("train"), data.groups("val")
    assert len(asked(val)) == 10
    assert len(val) == 30
    assert len(train) == 90
    assert not asked(train) & asked(val)
    assert numbers(train) == sorted(numbers(train))
    assert data.report.used_for == {"train": 90, "val": 30}


def test_a_raw_template_takes_prompts_as_they_are(make, tmp_path, tiny_tokenizer):
    (tmp_path / "rows.jsonl").write_text('{"prompt": " 1+1=", "completion": "2"}')
    data = make(SupervisedData, tmp_path / "rows.jsonl", template="raw", val_fraction=0.0)
    (group,) = data.groups("train")
    spelled = {text: tiny_tokenizer(text, add_special_tokens=False).input_ids for text in (" 1+1=", "2")}
    assert group.prompt == spelled[" 1+1="]
    assert group.completions == [[*spelled["2"], tiny_tokenizer.eos_token_id]]


def test_the_split_depends_on_content_only(make, tmp_path):
    data = make(val_fraction=0.25)
    other = tmp_path / "turned.jsonl"
    other.write_text("\n".join(json.dumps(row) for row in reversed(ROWS)))
    turned = make(where=other, val_fraction=0.25, seed=99)
    assert {119 - i for i in numbers(turned.groups("val"))} == set(numbers(data.groups("val")))


@pytest.mark.parametrize(("fraction", "prompts"), [(0.0, 0), (0.001, 1), (0.5, 20), (0.999, 39)])
def test_val_fraction_counts_prompts(make, fraction, prompts):
    assert len(asked(make(val_fraction=fraction).groups("val"))) == prompts


def test_rows_given_for_validation_leave_training(make, tmp_path):
    file = tmp_path / "val.jsonl"
    file.write_text("\n".join(json.dumps({**ROWS[i], "chosen": "new"}) for i in (3, 4)))
    data = make(val_path=str(file))
    train = data.groups("train")
    assert len(train) == 114
    assert not asked(train) & {3, 4}
    assert len(data.groups("val")) == 2
    assert data.report.dropped["prompt is among the held-out rows"].count == 6
    assert data.report.read == data.report.used + data.report.skipped == 120


def test_test_and_predict_fall_back_to_the_rows_before_them(make, tmp_path):
    data = make(val_fraction=0.25)
    assert numbers(data.groups("test")) == numbers(data.groups("predict")) == numbers(data.groups("val"))
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"prompt": "Other?", "chosen": "a", "rejected": "b"}))
    data = make(val_fraction=0.25, test_path=str(file))
    assert len(data.groups("predict")) == len(data.groups("test")) == 1
    assert len(data.groups("val")) == 30


def test_the_world_keeps_its_own_splits(tiny_tokenizer):
    data = SupervisedData(tokenizer=tiny_tokenizer, cache_dir=None, max_rows=16, max_eval_rows=8)
    assert [len(data.groups(split)) for split in ("train", "val", "test", "predict")] == [16, 8, 8, 8]
    assert data.report.skipped == 0


def test_one_prompt_alone_cannot_be_held_out(make, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "P", "chosen": f"a{i}", "rejected": "b"}) for i in range(4)))
    with pytest.raises(UserError, match="all rows have one prompt"):
        make(where=file).groups("train")
    assert len(make(where=file, val_fraction=0.0).groups("train")) == 4


# ---------------------------------------------------------------------- settings


def test_limits_are_counted(make):
    data = make(max_completion_tokens=3, val_fraction=0.0, on_bad_row="skip", max_rows=10)
    free = make(val_fraction=0.0, max_rows=10)
    long = sum(len(c) > 3 for g in free.groups("train") for c in g.completions)
    groups = data.groups("train")
    assert all(len(c) <= 3 for g in groups for c in g.completions)
    kept = {g.index for g in groups}
    lost = sum(len(c) > 3 for g in free.groups("train") if g.index not in kept for c in g.completions)
    assert data.report.completion.cut == long - lost
    assert data.report.completion.longest == 3


def test_system_message_for_rows_without_one(make, tiny_tokenizer):
    group = make(system="Be kind.").groups("train")[0]
    assert tiny_tokenizer.decode(group.prompt).startswith(
        "<bos><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user"
    )


def test_margins_weights_and_columns_reach_the_batch(make, tmp_path):
    file = tmp_path / "rich.jsonl"
    rows = [{**row, "margin": 0.5 * i, "weight": 2.0, "domain": f"d{i}"} for i, row in enumerate(ROWS[:4])]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    data = make(where=file, val_fraction=0.0, shuffle=False, batch_size=4)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch.rows["margin"].tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert batch.weights.tolist() == [2.0] * 8
    assert [c["domain"] for c in batch.columns] == ["d0", "d1", "d2", "d3"]
    assert batch.group_index.tolist() == [0, 1, 2, 3]


def test_all_assistant_turns_reach_the_batch(tmp_path, make, tiny_tokenizer):
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    file = tmp_path / "talk.json"
    rows = [{"messages": [{"role": r, "content": c + str(i)} for r, c in talk]} for i in range(2)]
    rows.append({"messages": [{"role": r, "content": c} for r, c in talk[:2]]})
    file.write_text(json.dumps(rows))
    data = make(SupervisedData, file, val_fraction=0.0, shuffle=False, batch_size=3, train_on="all")
    (batch,) = data.train_dataloader()
    kept = batch.completion_ids[batch.scored]
    assert tiny_tokenizer.decode(kept) == "b0<|im_end|>d0<|im_end|>b1<|im_end|>d1<|im_end|>b<|im_end|>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"train_on": "all"}, "train_on 'all' is for supervised rows"),
    ],
)
def test_settings_that_make_no_sense(make, settings, message):
    with pytest.raises(UserError, match=message):
        make(**settings)


def test_a_tokenizer_is_needed(path):
    with pytest.raises(UserError, match="needs a tokenizer"):
        PreferenceData(str(path), cache_dir=None).groups("train")


@pytest.mark.parametrize("cls", [SupervisedData, PreferenceData])
def test_field_docs_are_the_help_text(cls):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(cls, "data")
    usage = " ".join(parser.format_help().split())
    assert "prompts per rollout; over all ranks" in usage
    assert "longer prompts are cut on the left" in usage


# ---------------------------------------------------------------------- cache


@pytest.fixture
def passes(monkeypatch):
    """How many times rows were tokenised."""
    made = []
    build = datamodules.prepare._Builder.build
    monkeypatch.setattr(datamodules.prepare._Builder, "build", lambda self: made.append(1) or build(self))
    return made


def contents(data):
    return [
        (list(g.prompt), [list(c) for c in g.completions], dict(g.rows), g.weights, dict(g.columns), g.index)
        for g in data.groups("train")
    ]


def test_cached_rows_equal_fresh_ones(make, tmp_path, passes):
    cache = str(tmp_path / "cache")
    fresh, first, second = make(), make(cache_dir=cache), make(cache_dir=cache)
    assert contents(fresh) == contents(first) == contents(second)
    assert len(passes) == 2  # the fresh one and the first
    assert second.report == first.report
    assert second.fingerprint == first.fingerprint == fresh.fingerprint


def test_whatever_shapes_rows_misses_the_cache(make, path, tmp_path, passes):
    cache = str(tmp_path / "cache")
    other = build_tokenizer()
    other.add_tokens(["good"])
    prints = set()
    for settings in (
        {},
        {"tokenizer": other},
        {"max_prompt_tokens": 9},
        {"max_completion_tokens": 9},
        {"max_tokens": 900},
        {"template": "plain"},
        {"system": "s"},
        {"keep_duplicates": True},
        {"max_rows": 50},
    ):
        data = make(cache_dir=cache, **settings)
        data.groups("train")
        prints.add(data.fingerprint)
    assert len(passes) == len(prints) == 9
    for harmless in ({"batch_size": 3}, {"seed": 4}, {"length_aware": True}, {"num_workers": 1}):
        make(cache_dir=cache, **harmless).groups("train")
    assert len(passes) == 9
    path.write_text(path.read_text().replace("good 7 1", "good 7 one"))
    make(cache_dir=cache).groups("train")
    assert len(passes) == 10


@pytest.mark.parametrize("damage", ["cut", "flip in the header", "flip in the ids", "flip in the report", "empty"])
def test_a_damaged_cache_is_noticed_and_made_anew(make, tmp_path, passes, caplog, damage):
    cache = tmp_path / "cache"
    expected = contents(make(cache_dir=str(cache)))
    (file,) = cache.iterdir()
    raw = bytearray(file.read_bytes())
    whole = bytes(raw)
    position = {
        "flip in the header": 12,
        "flip in the ids": len(raw) // 2,
        "flip in the report": raw.index(b'"report"') + 20,
    }
    if damage in position:
        raw[position[damage]] ^= 1
    file.write_bytes(b"" if damage == "empty" else raw[:-5] if damage == "cut" else raw)
    assert contents(make(cache_dir=str(cache))) == expected
    assert len(passes) == 2
    assert "Cached rows are damaged" in caplog.text
    assert file.read_bytes() == whole


# ---------------------------------------------------------------------- in a Trainer


class Recorder(L.LightningModule):
    """Writes down which rows each step was given."""

    def __init__(self, tokenizer, folder):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.tokenizer, self.folder = tokenizer, Path(folder)

    def note(self, name, batch):
        with (self.folder / f"{name}-{self.global_rank}").open("a") as file:
            file.write(json.dumps(batch.group_index.tolist()) + "\n")

    def training_step(self, batch, batch_idx):
        self.note("train", batch)
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.note("val", batch)

    def test_step(self, batch, batch_idx):
        self.note("test", batch)

    def predict_step(self, batch, batch_idx):
        return batch.group_index

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def notes(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def trainer(**settings):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(
        accelerator="cpu", **{"devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **settings}
    )


def test_fit_validate_test_predict(make, tmp_path, tiny_tokenizer, capsys):
    data = make(tokenizer=None, val_fraction=0.25, batch_size=40, cache_dir=str(tmp_path / "cache"), seed=3)
    module = Recorder(tiny_tokenizer, tmp_path)
    trainer(max_epochs=2).fit(module, data)
    train, val = numbers(data.groups("train")), numbers(data.groups("val"))
    orders = [permutation(3, epoch, 90).tolist() for epoch in (0, 1)]
    expected = [[train[i] for i in order[start : start + 40]] for order in orders for start in (0, 40, 80)]
    assert notes(tmp_path, "train-0") == expected
    assert notes(tmp_path, "val-0") == [val, val]
    trainer().test(module, data, verbose=False)
    assert notes(tmp_path, "test-0") == [val]
    assert torch.cat(trainer().predict(module, data)).tolist() == val
    assert capsys.readouterr().out.count("rows read") == 1  # the table is shown once
    infos = {info.split: info for info in data.dataset_inputs()}
    assert [infos[s].rows for s in ("train", "val", "test")] == [90, 30, 30]


def test_the_seed_of_the_run_orders_the_data(make, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    data = make(val_fraction=0.0, batch_size=120)
    (batch,) = data.train_dataloader()
    assert batch.group_index.tolist() == permutation(11, 0, 120).tolist()


def test_overfit_batches_keeps_to_the_first_rows(make, tmp_path, tiny_tokenizer):
    data = make(val_fraction=0.0, batch_size=5)
    trainer(overfit_batches=2, max_epochs=2).fit(Recorder(tiny_tokenizer, tmp_path), data)
    assert notes(tmp_path, "train-0") == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2


def test_no_validation_rows_means_no_validation(make, tmp_path, tiny_tokenizer):
    data = make(val_fraction=0.0, batch_size=120)
    trainer().fit(Recorder(tiny_tokenizer, tmp_path), data)
    assert not (tmp_path / "val-0").exists()
    with pytest.raises(UserError, match="gives no rows for test"):
        trainer().test(Recorder(tiny_tokenizer, tmp_path), make(val_fraction=0.0), verbose=False)


def test_resuming_on_other_rows_is_said(make):
    before, after = make(), make(max_prompt_tokens=9)
    for data in (before, after):
        data.groups("train")
    with pytest.warns(UserWarning, match="The data differ from those the checkpoint was trained on"):
        after.load_state_dict(before.state_dict())


def test_two_processes_share_batches_without_injection(make, tmp_path, tiny_tokenizer, monkeypatch):
    """use_distributed_sampler stays at its default, True; 90 rows in batches of 11 end with a batch of 2."""
    data = make(tokenizer=None, val_fraction=0.25, batch_size=11, cache_dir=str(tmp_path / "cache"), seed=3)
    monkeypatch.setenv("MASTER_PORT", str(meeting_port()))
    # Spawned: a fork would inherit threads (gloo's, autograd's) of earlier tests that do not run in it.
    trainer(devices=2, strategy="ddp_spawn").fit(Recorder(tiny_tokenizer, tmp_path), data)
    alone = tmp_path / "alone"
    alone.mkdir()
    trainer().fit(Recorder(tiny_tokenizer, alone), make(val_fraction=0.25, batch_size=11, seed=3))
    for split in ("train", "val"):
        shares = zip(notes(tmp_path, f"{split}-0"), notes(tmp_path, f"{split}-1"), strict=True)
        assert [sorted(a + b) for a, b in shares] == [sorted(b) for b in notes(alone, f"{split}-0")]


def test_more_ranks_than_rows(make, monkeypatch):
    data = make(val_fraction=0.0, max_rows=3, batch_size=8)
    data.trainer = trainer()
    monkeypatch.setattr(L.Trainer, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 4})
    with pytest.raises(UserError, match="4 ranks cannot share 3 training rows in batches of 8"):
        data.train_dataloader()


# ---------------------------------------------------------------------- fragments

FRAGMENTS = sorted((Path(__file__).resolve().parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda file: file.stem)
def test_fragments_parse_and_say_what_they_are(fragment):
    assert fragment.read_text().startswith("# ")
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(L.LightningDataModule, "data", subclass_mode=True)
    built = parser.instantiate_classes(parser.parse_args([f"--data={fragment}"]))
    assert isinstance(built.data, GroupData)
