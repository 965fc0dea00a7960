"""KTO: values by hand, the baseline from mismatched completions, labelled data of every format, mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.tiny import tiny_tokenizer
from alignment.unpaired import kto, mismatched, partners_of
from alignment.update import UNIT, Counts
from datamodules import PreferenceData, UnpairedData
from modules import KTO
from tests.rl_toys import SaidBefore, moved
from tests.toys import OPTIM, TINY, FixedData, trainer


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_values_by_hand() -> None:
    """r = 1, -2 with z = 0.5 and beta 0.1: 1 - sigmoid(0.05) of the good one, 1 - sigmoid(0.25) of the bad one."""
    ratios = torch.tensor([1.0, -2.0], requires_grad=True)
    found = kto(ratios, torch.tensor([True, False]), torch.tensor([0.5, 0.5]), 0.1)
    assert found.tolist() == pytest.approx([1 - sigmoid(0.05), 1 - sigmoid(0.25)])
    found.sum().backward()
    assert ratios.grad is not None
    slopes = [-0.1 * sigmoid(0.05) * sigmoid(-0.05), 0.1 * sigmoid(0.25) * sigmoid(-0.25)]
    assert ratios.grad.tolist() == pytest.approx(slopes)


def labelled(*completions: list[list[int]], good: list[list[float]] | None = None) -> GroupBatch:
    """Prompts [1], [2], ... with these completions; the first of each is good unless said otherwise."""
    labels = good or [[1.0, *[0.0] * (len(said) - 1)] for said in completions]
    return GroupBatch.from_groups(
        [
            Group(prompt=[i + 1], completions=said, rows={"label": label}, index=i)
            for i, (said, label) in enumerate(zip(completions, labels, strict=True))
        ]
    )


def told(batch: GroupBatch) -> list[tuple[list[int], list[list[int]]]]:
    completions = torch.split(batch.completion_ids, batch.completion_lengths.tolist())
    prompts = torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())
    return [
        (p.tolist(), [c.tolist() for c, g in zip(completions, batch.group_of.tolist(), strict=True) if g == i])
        for i, p in enumerate(prompts)
    ]


def test_completions_move_on_by_one() -> None:
    found = mismatched(labelled([[10]], [[20, 21]], [[30]]))
    assert told(found) == [([1], [[30]]), ([2], [[10]]), ([3], [[20, 21]])]


def test_a_completion_does_not_stand_in_for_one_of_its_own_prompt() -> None:
    """The second completion of each prompt takes what came before that prompt."""
    found = mismatched(labelled([[10], [11]], [[20], [21]]))
    assert told(found) == [([1], [[21], [21]]), ([2], [[11], [11]])]
    assert partners_of([(1,), (1,), (2,)]) == [2, 2, 1]


def test_one_prompt_has_nothing_to_compare_with() -> None:
    assert mismatched(labelled([[10], [11]])).num_completions == 0
    assert mismatched(GroupBatch.from_groups([])).num_completions == 0
    module = moved(KTO(policy=TINY))
    assert float(module.whole_batch(labelled([[10], [11]])).rows["kl"].max()) == 0


def test_masks_travel_with_their_completions() -> None:
    batch = GroupBatch.from_groups(
        [Group(prompt=[i], completions=[[10 + i, 20 + i]], scored=[[i == 1, True]]) for i in (1, 2)]
    )
    assert mismatched(batch).scored.tolist() == [False, True, True, True]


class Ratios:
    """An engine that gives every token a log-prob by its id; the reference gives 0."""

    def __init__(self, by_id: dict[int, float]) -> None:
        self.by_id = by_id

    def __call__(self, batch: GroupBatch, **asked: Any) -> Any:
        logps = torch.tensor([self.by_id[i] for i in batch.completion_ids.tolist()])
        return SaidBefore(logps)(batch, **asked)


def golden(by_id: dict[int, float], **settings: Any) -> Any:
    module: Any = KTO(policy=TINY, **settings)
    module.engine = Ratios(by_id)
    module.reference_logps = lambda micro: torch.zeros(len(micro.completion_ids))
    return module


def test_the_loss_by_hand() -> None:
    """Ratios 1, 4 + 4, -3: their mean 2 is the baseline, since every completion stands in once. Two are good."""
    batch = labelled([[10]], [[20, 20]], [[30]], good=[[1.0], [1.0], [0.0]])
    module = golden({10: 1.0, 20: 4.0, 30: -3.0}, good_weight=1.0, bad_weight=2.0)
    share, metrics = module.loss(module.whole_batch(batch), Counts(prompts=3.0, rows=3.0, tokens=4.0))
    expected = (1 - sigmoid(-0.1)) + (1 - sigmoid(0.6)) + 2 * (1 - sigmoid(0.5))
    assert float(share.detach()) == pytest.approx(expected / 3)
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert means == pytest.approx(
        {
            "loss": expected / 3,
            "kl": 2.0,
            "accuracy": 2 / 3,
            "beta": 0.1,
            "rewards/chosen": 0.45,
            "rewards/rejected": -0.3,
            "logps/chosen": 4.5,
            "logps/rejected": -3.0,
        }
    )


def test_the_baseline_is_not_negative() -> None:
    module = golden({10: -1.0, 20: -4.0})
    assert module.whole_batch(labelled([[10]], [[20]])).rows["kl"].tolist() == [0.0, 0.0]


def test_apo_zero_has_no_baseline_and_no_pass_for_it() -> None:
    """1 - sigmoid(beta r) of the good one, sigmoid(beta r) of the bad one."""
    module = golden({10: 1.0, 20: 4.0}, loss="apo_zero")
    batch = labelled([[10]], [[20]], good=[[1.0], [0.0]])
    engine, module.engine = module.engine, None
    batch = module.whole_batch(batch)
    module.engine = engine
    share, _ = module.loss(batch, Counts(prompts=2.0, rows=2.0, tokens=2.0))
    assert float(share.detach()) == pytest.approx((1 - sigmoid(0.1) + sigmoid(0.4)) / 2)


def test_a_side_that_is_not_there_has_no_metric() -> None:
    module = golden({10: 1.0, 20: 4.0})
    batch = module.whole_batch(labelled([[10]], [[20]], good=[[1.0], [1.0]]))
    metrics = module.loss(batch, UNIT)[1]
    assert "rewards/chosen" in metrics
    assert "rewards/rejected" not in metrics
    assert module.derived_metrics({"rewards/chosen": 1.0}) == {}


def test_the_start_is_a_half(tmp_path: Path) -> None:
    """Policy and reference agree, so r = z = 0; every reference does."""
    rows = [Group(prompt=[1, i + 4], completions=[[i + 5, 3]], rows={"label": [float(i % 2)]}) for i in range(8)]
    module = KTO(policy=TINY, optim=OPTIM)
    t = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    t.fit(module, datamodule=FixedData(rows, batch_size=4))
    assert module.reference.kind == "copy"  # cached would not know the pairs behind the baseline
    assert float(t.callback_metrics["loss"]) == pytest.approx(0.5, abs=1e-6)
    assert float(t.callback_metrics["kl"]) == pytest.approx(0.0, abs=1e-5)


def test_predictions_are_of_each_completion(tmp_path: Path) -> None:
    rows = [Group(prompt=[1], completions=[[5, 3], [6, 3]], rows={"label": [1.0, 0.0]}, index=4)]
    found = trainer(tmp_path).predict(KTO(policy=TINY), datamodule=FixedData(rows))
    (row,) = found[0]  # type: ignore[index]
    assert row["index"] == 4
    assert row["reward"] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert len(row["completions"]) == len(row["logps"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "dpo"}, "loss 'dpo' is not known; use kto or apo_zero"),
        ({"reference": "cached"}, "reference=cached does not go with kto"),
        ({"bad_weight": 0.0}, "bad_weight is 0.0; it must be positive"),
        ({"beta": -1.0}, "beta is -1.0"),
        ({"beta": math.inf}, "beta is inf; it must be positive, and finite"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KTO(policy=TINY, **settings)


def test_a_batch_of_one_is_refused(tmp_path: Path) -> None:
    rows = [Group(prompt=[1], completions=[[5]], rows={"label": [1.0]})]
    with pytest.raises(UserError, match="needs at least 2 prompts"):
        trainer(tmp_path).fit(KTO(policy=TINY), datamodule=FixedData(rows, batch_size=1))


# ---------------------------------------------------------------------- data


def data(folder: Path, rows: list[dict[str, Any]], kind: Any = UnpairedData, **settings: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = kind(str(path), tokenizer=tiny_tokenizer(), cache_dir=None, val_fraction=0.0, **settings)
    found.groups("train")
    return found


USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"prompt": "Hi", "completion": "Hello", "label": True}, [1.0]),
        ({"prompt": "Hi", "completion": "Hello", "label": 0}, [0.0]),
        ({"prompt": "Hi", "completion": "Hello", "label": "False"}, [0.0]),
        ({"messages": [USER, REPLY], "label": 1.0}, [1.0]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "label": 1}, [1.0]),
        ({"instruction": "Hi", "output": "Hello", "label": False}, [0.0]),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "What?"}, [1.0, 0.0]),
        ({"chosen": [USER, REPLY], "rejected": [USER, {"role": "assistant", "content": "No"}]}, [1.0, 0.0]),
    ],
)
def test_labelled_formats(row: dict[str, Any], labels: list[float], tmp_path: Path) -> None:
    (group,) = data(tmp_path, [row]).groups("train")
    assert group.rows["label"] == labels
    assert len(group.completions) == len(labels)


def test_columns_are_named_as_anywhere(tmp_path: Path) -> None:
    columns = {"prompt": "question", "completion": "answer", "label": "liked"}
    rows = [{"question": "Hi", "answer": "Hello", "liked": True, "weight": 0.5}]
    (group,) = data(tmp_path, rows, columns=columns).groups("train")
    assert group.rows["label"] == [1.0]
    assert group.weights == [0.5]


def test_bad_labels_are_dropped_with_a_count(tmp_path: Path) -> None:
    good = {"prompt": "Hi", "completion": "Hello", "label": True}
    bad = [{**good, "label": value, "prompt": f"Hi {i}"} for i, value in enumerate((None, 2, "good", [1]))]
    report = data(tmp_path, [good, good, {**good, "label": False}, *bad]).report
    assert {reason: tally.count for reason, tally in report.dropped.items()} == {
        "duplicate of an earlier row": 1,
        "label is None": 1,
        "label is neither true nor false": 3,
    }
    assert report.used == 2  # somebody liked it, somebody did not


def test_a_label_elsewhere_is_a_column_like_any_other(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi", "chosen": "Hello", "rejected": "What?", "label": "greeting"}]
    (group,) = data(tmp_path, rows, PreferenceData).groups("train")
    assert group.columns == {"label": "greeting"}
    assert "label" not in group.rows


def test_rows_without_a_label_are_no_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no unpaired format.*columns: \{prompt: question, completion: answer, label"):
        data(tmp_path, [{"prompt": "Hi", "completion": "Hello"}])


def test_pairs_are_not_for_kto(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"KTO learns from completions labelled good or bad.*use datamodules.UnpairedData"
    ):
        trainer(tmp_path).fit(KTO(policy=TINY), datamodule=PreferenceData(cache_dir=None, max_rows=8, batch_size=4))
