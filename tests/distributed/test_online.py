"""Advantages, whitening, thresholds, metrics, refills and gradings of two processes are those of one."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest
import torch

from tests.distributed import online_checks

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Results]]:
    """(of one process, of both ranks of two)."""
    folder = tmp_path_factory.mktemp("online")
    rows = [{"prompt": f"Question {i}?", "difficulty": ("easy", "medium", "hard")[i % 3]} for i in range(60)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    online_checks.run(0, 1, folder)
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=online_checks.run, args=(rank, 2, folder)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=600)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    read = [torch.load(folder / f"results.{rank}", weights_only=True) for rank in ("0of1", "0of2", "1of2")]
    return read[0], read[1:]


def test_advantages_and_metrics(results: tuple[Results, list[Results]]) -> None:
    one, two = ([r["advantages"] for r in part] for part in ([results[0]], results[1]))
    for name in (" ".join([name, *options.values()]) for name, options in online_checks.ESTIMATORS):
        assert torch.equal(torch.cat([r[f"{name} values"] for r in two]), one[0][f"{name} values"])
        # rank 0 holds 6 completions of 2 groups, rank 1 the other 3 of 2
        split = [torch.split(r[name], n) for r, n in zip(two, ([6, 6, 2, 4], [3, 3, 2, 4]), strict=True)]
        together = torch.cat([torch.cat(parts) for parts in zip(*split, strict=True)])
        assert torch.equal(together, one[0][name])
        assert two[0][f"{name} metrics"] == two[1][f"{name} metrics"] == one[0][f"{name} metrics"]
    assert not torch.equal(one[0]["gdpo token values"], one[0]["gdpo values"])


def test_tokens(results: tuple[Results, list[Results]]) -> None:
    one, two = results[0]["tokens"], [r["tokens"] for r in results[1]]
    torch.testing.assert_close(torch.cat([r["whitened"] for r in two]), one["whitened"])
    for name in ("explained", "threshold"):
        assert two[0][name] == two[1][name] == pytest.approx(one[name], abs=1e-12)


def test_refills_and_gradings(results: tuple[Results, list[Results]]) -> None:
    one, two = results[0]["prompts"], [r["prompts"] for r in results[1]]
    for name in ("batches", "filled", "sampled"):
        pairs = zip(two[0][name], two[1][name], strict=True)
        assert [sorted(a + b) for a, b in pairs] == [sorted(part) for part in one[name]]
    for step in (0, 1):
        assert two[0][f"counts {step}"] == two[1][f"counts {step}"] == one[f"counts {step}"]
        assert one[f"counts {step}"][1] > 0  # some groups were dropped and replaced
    assert two[0]["labels"] == two[1]["labels"] == one["labels"]
    assert one["labels"] != [i % 3 for i in range(60)]
