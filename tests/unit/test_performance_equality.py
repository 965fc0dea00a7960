"""What the comparison with TRL calls equal, and the rows both sides see."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.performance import equality, peers
from benchmarks.performance.equality import END, LENGTH, ROWS, Side, json_row, rows_of, theirs_of


def test_gradients_are_compared_over_all_parameters_together() -> None:
    mine = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    peer = {"b": torch.tensor([[0.0, 8.0]]), "a": torch.tensor([0.0])}
    cosine, norm = equality.of_gradients("x", mine, peer)
    assert (cosine["ours"], cosine["theirs"]) == (5.0, 8.0)
    assert cosine["difference"] == pytest.approx(1 - 4 / 5)  # 32 / (5 * 8)
    assert norm["difference"] == pytest.approx(3 / 8)
    assert not cosine["ok"]
    assert not norm["ok"]
    assert all(row["ok"] for row in equality.of_gradients("x", mine, dict(mine)))
    with pytest.raises(AssertionError, match="'c'"):
        equality.of_gradients("x", mine, {**peer, "c": torch.zeros(1)})


def test_one_far_token_or_step_is_not_equal() -> None:
    def side(logp: float, loss: float) -> Side:
        gradients = {"a": torch.ones(1)}
        return Side(logps={(5, 6): torch.tensor([-1.0, logp])}, gradients=gradients, losses=[0.5, loss])

    bad = [row["what"] for row in equality.compared("x", side(-2.0, 1.0), side(-2.1, 1.001)) if not row["ok"]]
    assert bad == ["x: token log-probs", "x: losses of 2 steps"]
    assert all(row["ok"] for row in equality.compared("x", side(-2.0, 1.0), side(-2.0, 1.00005)))


def test_not_a_number_is_not_equal() -> None:
    side = Side(gradients={"a": torch.ones(1)}, losses=[1.0, math.nan, 1.0])
    assert [row["ok"] for row in equality.compared("x", side, side)] == [True, True, True, False]


def test_rows() -> None:
    ends = rows_of(2, steps=3)
    assert len(ends) == 3 * ROWS
    assert all(
        ids[-1] == END and END not in ids[:-1] and 2 <= len(ids) <= LENGTH for g in ends for ids in g.completions
    )
    assert any(g.columns["flat"] for g in ends)
    cut = rows_of(2, steps=3, ends=False, fixed=True)
    assert all(len(ids) == LENGTH and END not in ids for g in cut for ids in g.completions)


def test_the_peer_appends_the_end_token_itself() -> None:
    group = rows_of(2, steps=1)[0]
    row = json_row("dpo", group)
    assert row["prompt"].split() == [f"w{i}" for i in group.prompt]
    assert row["chosen"].split() == [f"w{i}" for i in group.completions[0][:-1]]
    assert row["rejected"].split() == [f"w{i}" for i in group.completions[1][:-1]]
    assert json_row("grpo", group) == {"prompt": row["prompt"], "flat": False}


def test_names_of_parameters() -> None:
    assert theirs_of("policy.model.norm.weight") == "model.norm.weight"
    assert theirs_of("heads.weight") == "score.weight"
    assert theirs_of("critic.trunk.norm.weight") == "critic/model.norm.weight"
    assert theirs_of("critic.head.weight") == "critic/score.weight"


def test_the_peer_gets_our_versions(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# exact\ntorch==2.13.0\nPyYAML==6.0.4\ntorchmetrics==1.9.0\n")
    assert peers.pinned(("torch", "pyyaml"), constraints) == ["torch==2.13.0", "PyYAML==6.0.4"]
    assert peers.pinned(("torch", *peers.BESIDE))[0].startswith("torch==")
