"""MODPO: [G-MODPO] of ALGORITHMS through the loss and through DPO, margins from data, mistakes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.cli import main
from alignment.errors import UserError
from alignment.losses import DPO_LOSSES, PairLogRatios, check_margin_columns, margin_of
from alignment.optim import OptimConfig
from alignment.update import Counts
from modules import DPO
from tests.rl_toys import SaidBefore, fit
from tests.toys import TINY, FixedData, groups

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# c and j of [G-DPO]; margins m_w = (.4, -.2, 0), m_l = (.1, .3, -.5) of weight .3.
CHOSEN, REJECTED = (1.0, 0.5, -1.0), (-0.5, -0.8, 0.4)
MARGINS = (0.3, -0.5, 0.5)
LOSSES = [0.651208, 0.513015, 0.921592]


def golden_pairs(margin: Tensor, share: float) -> PairLogRatios:
    one = torch.ones(3)
    return PairLogRatios(
        chosen=torch.tensor(CHOSEN),
        rejected=torch.tensor(REJECTED),
        chosen_tokens=one,
        rejected_tokens=one,
        margin=margin,
        share=share,
    )


def golden_batch(*columns: str) -> GroupBatch:
    return GroupBatch.from_groups(
        [
            Group(prompt=[1], completions=[[5], [6]], columns=dict.fromkeys(columns, margin), index=i)
            for i, margin in enumerate(MARGINS)
        ]
    )


def test_golden_loss() -> None:
    """[G-MODPO]: logits .085714, .4, -.414286."""
    found = DPO_LOSSES["modpo"].fn(golden_pairs(0.3 * torch.tensor(MARGINS), 0.7), 0.1, 0.0)
    assert found.tolist() == pytest.approx(LOSSES, abs=1e-6)
    smoothed = DPO_LOSSES["modpo"].fn(golden_pairs(0.3 * torch.tensor(MARGINS), 0.7), 0.1, 0.1)
    # -log sigmoid(-x) = x - log sigmoid(x).
    logits = (0.085714, 0.4, -0.414286)
    expected = [loss + 0.1 * x for loss, x in zip(LOSSES, logits, strict=True)]
    assert smoothed.tolist() == pytest.approx(expected, abs=1e-6)


def golden_module(margins: dict[str, float] | None, **settings: Any) -> Any:
    module: Any = DPO(policy=TINY, reference="copy", margins=margins, **settings)
    logps = [x for pair in zip(CHOSEN, REJECTED, strict=True) for x in pair]
    module.engine = SaidBefore(logps)
    module.reference_logps = lambda micro: torch.zeros(len(micro.completion_ids))
    return module


def test_golden_loss_through_the_module() -> None:
    module = golden_module({"brief": 0.3}, loss="modpo")
    share, metrics = module.loss(golden_batch("brief"), Counts(prompts=3.0, rows=6.0, tokens=6.0))
    assert float(share.detach()) == pytest.approx(0.695272, abs=1e-6)
    assert float(metrics["rewards/margins"][0] / 3) == pytest.approx(0.046667, abs=1e-6)  # beta delta, as in DPO


def test_several_other_objectives_and_a_row_value() -> None:
    """Weights .1 and .2 of equal margins are one of weight .3; `margin` of the data is a column like any other."""
    module = golden_module({"brief": 0.1, "kind": 0.2}, loss="modpo")
    counts = Counts(prompts=3.0, rows=6.0, tokens=6.0)
    assert float(module.loss(golden_batch("brief", "kind"), counts)[0].detach()) == pytest.approx(0.695272, abs=1e-6)
    rows = GroupBatch.from_groups(
        [Group(prompt=[1], completions=[[5], [6]], rows={"margin": [m, m]}) for m in MARGINS]
    )
    assert margin_of(rows, {"margin": 0.3}).tolist() == pytest.approx([0.09, -0.15, 0.15])


def test_what_the_margin_explains_is_not_learned(tmp_path: Path) -> None:
    """At the start delta is 0, so the loss of every pair is log(1 + exp(margin weight / share)): here 1 + e^(.5 .8/.5).
    Its gradient is that of DPO, times sigmoid(.8) / sigmoid(0) / share."""
    pairs = [replace(g, columns={"brief": 0.8}) for g in groups(8, 2)]
    sgd = OptimConfig(lr=1e-3, optimizer="sgd", schedule="constant", clip_norm=None)
    runs = {}
    for loss, margins in (("sigmoid", None), ("modpo", {"brief": 0.5})):
        module = DPO(policy=TINY, loss=loss, margins=margins, reference="copy", optim=sgd, micro_batch_tokens=30)
        runs[loss] = fit(module, tmp_path, FixedData(pairs, batch_size=8))[0]
    assert runs["modpo"].updates[0]["loss"] == pytest.approx(math.log(1 + math.exp(0.8)), abs=1e-6)
    factor = 2 / (1 + math.exp(-0.8)) / 0.5
    plain, ours = runs["sigmoid"].gradients[0], runs["modpo"].gradients[0]
    assert float(plain.norm()) > 1e-3
    torch.testing.assert_close(ours, factor * plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "modpo"}, "'modpo' needs margins: data column -> weight"),
        ({"margins": {"brief": 0.3}}, r"'sigmoid' does not use margins \(brief\); these do: modpo"),
        ({"loss": "modpo", "margins": {"brief": 0.0}}, "weights brief 0; each is above 0"),
        ({"loss": "modpo", "margins": {"brief": 0.5, "kind": 0.5}}, "brief 0.5, kind 0.5; .* leave a share of 1"),
    ],
)
def test_margins_and_losses_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DPO(policy=TINY, **settings)


def pairs_with(*columns: dict[str, Any]) -> list[Group]:
    return [Group(prompt=[1], completions=[[5], [6]], columns=c, index=i) for i, c in enumerate(columns)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([{"kind": 0.1, "of": "x"}, {}], "margins names the column 'brief', which no row .* columns: kind, of$"),
        ([{}, {}], "margins names the column 'brief', which no row .* columns: none$"),
        ([{"brief": 0.1}, {"brief": "much"}, {}], "row 1 has 'much' in column 'brief'"),
        ([{}, {"brief": 0.1}], "row 0 has None in column 'brief'"),
    ],
)
def test_columns_are_looked_for_in_all_rows(columns: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_margin_columns(pairs_with(*columns), {"brief": 0.3})
    assert "\n" not in str(caught.value)


def test_columns_that_are_there() -> None:
    check_margin_columns(pairs_with({"brief": 0.1, "kind": 2}, {"brief": -1.0, "kind": 0}), {"brief": 0.3, "kind": 0.2})
    margins = [Group(prompt=[1], completions=[[5], [6]], rows={"margin": [0.1, 0.1]})]
    check_margin_columns(margins, {"margin": 0.3})
    check_margin_columns([], {"brief": 0.3})  # no rows are another mistake


def test_a_column_that_is_not_there_costs_no_model(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of the README's DPO example: one line, before a model, a run or a table of the data."""
    rows = [{"prompt": f"Question {i}?", "chosen": "Three years.", "rejected": "Who knows."} for i in range(20)]
    Path("my_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-c", str(CONFIGS / "modpo.yaml"), "--data.path=my_pairs.jsonl", "--trainer.accelerator=cpu"]
    assert main(["fit", *words]) == 2
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if line.startswith("alignment: error: ")]
    assert told == [
        "alignment: error: margins names the column 'brevity', which no row of the data has; the data's columns: none"
    ]
    assert "memory" not in err
    assert "Data:" not in out
    assert not Path("runs").exists()


@pytest.mark.parametrize("value", [None, "much", True, math.nan])
def test_a_column_without_a_number_is_named(value: Any) -> None:
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5], [6]], columns={"brief": value}, index=7)])
    with pytest.raises(UserError, match=rf"row 7 has {value!r} in column 'brief'.* it must be a number"):
        margin_of(batch, {"brief": 0.3})
    with pytest.raises(UserError, match="row 7 has None in column 'kind'"):
        margin_of(batch, {"kind": 0.3})
