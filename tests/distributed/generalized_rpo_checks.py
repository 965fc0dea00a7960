"""What `test_generalized_rpo.py` runs under one and under two processes. Run directly, it is one rank of two."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alignment import distributed
from alignment.batches import Group
from alignment.component_clip import ComponentClipConfig
from alignment.domains import DomainConfig
from alignment.optim import OptimConfig
from modules import GeneralizedRPO
from tests.distributed.ddp_checks import Capture, ranks_trainer
from tests.toys import TINY, FixedData, groups

STEPS = 5
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"smoothness": "js", "lambda_smooth": 0.5},
    "parameters": {"component_clip": ComponentClipConfig(ratio=0.05)},
    "states": {"component_clip": ComponentClipConfig(ratio=0.05, at="states"), "micro_batch_tokens": 40},
    # Every rank has one micro-batch, or none: the graph of the measurement is kept for the update.
    "states, one pass": {"component_clip": ComponentClipConfig(ratio=0.05, at="states"), "micro_batch_tokens": None},
    "cached": {"entropy_floor": "reference", "reference": "cached", "lambda_entropy": 2.0},
}


def rows() -> list[Group]:
    """Domain c is only in the second row of its batch, so with two ranks the first never sees it; the last batch holds
    one pair, so the second rank has none there."""
    domains = {1: "c", 9: "c"}
    return [
        replace(g, columns={"domain": domains.get(g.index, "ab"[g.index % 3 == 2])})
        for g in groups(8 * (STEPS - 1) + 1, 2)
    ]


def run_all(world: int, folder: Path) -> None:
    out: dict[str, Any] = {}
    for name, own in RUNS.items():
        domains = DomainConfig(beta={"b": 0.5, "c": 0.3}, lambda_entropy={"a": 0.9}, adaptive=True, step_size=0.5)
        settings: dict[str, Any] = {
            "policy": TINY,
            "reference": "copy",
            "optim": OptimConfig(lr=1e-4, schedule="cosine", warmup_steps=3),
            "micro_batch_tokens": 40,
            "entropy_floor": "uniform",
            "lambda_entropy": 0.4,
            "domains": domains,
        }
        module, capture = GeneralizedRPO(**(settings | own)), Capture()
        t = ranks_trainer(folder, world, max_epochs=1, callbacks=[capture])
        t.fit(module, datamodule=FixedData(rows(), val=rows()[:11], batch_size=8))
        assert capture.gradient is not None
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        out[name] = {
            "gradient": capture.gradient.tolist(),
            "logged": capture.logged,
            "val": {k: float(v) for k, v in t.callback_metrics.items() if k.startswith("val/")},
            "domains": module.domains.weights if module.domains else {},
            "weights": len(set(distributed.all_gather_objects(weights.numpy().tobytes()))),
            "global_step": t.global_step,
        }
    (folder / f"results.rank{distributed.rank()}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(2, Path(sys.argv[1]))
