"""[G-STAGE] through callbacks.Stages: beta and the entropy's weight as GeneralizedRPO's loss uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment.domains import DomainConfig
from alignment.optim import OptimConfig
from callbacks import BatchBeta, PlateauBeta, Stages
from modules import GeneralizedRPO
from tests.rl_toys import fit
from tests.toys import TINY, FixedData, groups

BETAS = {0: 0.05, 99: 0.05, 100: 0.05, 150: 0.0875, 200: 0.125, 300: 0.2, 400: 0.2}


def module(**settings: Any) -> Any:
    optim = OptimConfig(lr=1e-6, schedule="constant")
    return GeneralizedRPO(policy=TINY, reference="copy", optim=optim, beta=0.1, **settings)


def stages(warm: int, ramp: int) -> Stages:
    return Stages(
        {
            "warm_start": {"steps": warm, "values": {"beta": 0.05, "lambda_entropy": "x5"}},
            "reinforcement": {"steps": ramp, "values": {"beta": {"end": 0.2}, "lambda_entropy": "x1"}},
            "fine_tuning": {"values": {"beta": 0.2}},
        }
    )


def test_golden_stages(tmp_path: Path) -> None:
    """Warm 100, ramp 200. The metrics are those of the loss: what its pairs and tokens were weighed with."""
    data = FixedData(groups(4, 2), batch_size=1)
    settings = {"max_epochs": -1, "max_steps": 401, "callbacks": [stages(100, 200)]}
    watch, _ = fit(module(), tmp_path, data, **settings)
    assert {step: watch.updates[step]["beta"] for step in BETAS} == pytest.approx(BETAS)
    weights = [watch.updates[step]["lambda_entropy"] for step in (0, 99, 100, 400)]
    assert weights == pytest.approx([0.05, 0.05, 0.01, 0.01])


def test_a_domain_moves_with_the_stages_and_all_callbacks_compose(tmp_path: Path) -> None:
    """A domain with four times the general beta has four times what the stages make of it."""
    pairs = [replace(g, columns={"domain": "ab"[g.index % 2]}) for g in groups(8, 2)]
    own = {"domains": DomainConfig(beta={"b": 0.4}, adaptive=True)}
    settings = {"max_epochs": -1, "max_steps": 6}
    watch, _ = fit(module(**own), tmp_path, FixedData(pairs, batch_size=4), callbacks=[stages(2, 2)], **settings)
    # Two pairs of each domain: the mean beta is 2.5 times the general one.
    expected = [2.5 * beta for beta in (0.05, 0.05, 0.05, 0.125, 0.2, 0.2)]
    assert [update["beta"] for update in watch.updates] == pytest.approx(expected)
    together = [PlateauBeta(patience=1, min_delta=9.0, every="check"), stages(2, 2), BatchBeta()]
    validated = {"limit_val_batches": 1, "num_sanity_val_steps": 0, **settings}
    watch, _ = fit(module(**own), tmp_path, FixedData(pairs, batch_size=4), callbacks=together, **validated)
    assert len(watch.updates) == 6
