"""GRPO, GDPO, PPO, MORL and OnlineDPO on two processes equal one: first gradients, metrics, weights; uneven batches,
refills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import online_modules_checks
from tests.distributed.pair import run_pair

RUNS = [("modules", name) for name in online_modules_checks.RUNS] + [("refills", "GRPO"), ("refills", "PPO")]
RUNS += [("uneven", "dropped, PPO"), ("uneven", "a prompt again")]
Results = dict[str, Any]


def write_prompts(folder: Path) -> None:
    rows = [
        {"prompt": f"Question {i}?", "alive": i % 3 == 0, "level": "easy" if i else "hard"} for i in range(20)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Results of both ranks."""
    folder = tmp_path_factory.mktemp("two")
    write_prompts(folder)
    run_pair("online_modules_checks", folder, timeout=600)
    return [torch.load(folder / f"results.rank{rank}", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("one")
    write_prompts(folder)
    online_modules_checks.run_all(1, folder)
    results: Results = torch.load(folder / "results.rank0", weights_only=True)
    return results


@pytest.mark.parametrize(("part", "name"), RUNS)
def test_two_processes_are_one(part: str, name: str, one: Results, two: list[Results]) -> None:
    """First gradient to 2e-6 of its norm, metrics of the first batch to 1e-6, losses of all updates to 1e-5; between
    the ranks everything, weights too, bit for bit."""
    expected = one[part][name]
    gradient = expected["gradient"].double()
    assert gradient.norm() > 1e-2
    for rank in two:
        found = rank[part][name]
        assert (found["gradient"] - gradient).norm() <= 2e-6 * gradient.norm()
        assert found["logged"][0] == pytest.approx(expected["logged"][0], rel=1e-6, abs=1e-6, nan_ok=True)
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert found["val"] == pytest.approx(expected["val"], abs=1e-5)
        assert found["global_step"] == expected["global_step"]
        assert found["weights_equal"]
    first, second = (str({k: v for k, v in rank[part][name].items() if k != "gradient"}) for rank in two)
    assert first == second


def test_the_refills_were_some(one: Results) -> None:
    for name in ("GRPO", "PPO"):
        rows = one["refills"][name]["logged"]
        assert max(row["dynamic_sampling/dropped"] for row in rows) > 0
        assert max(row["dynamic_sampling/lacking"] for row in rows) > 0
