"""FSDP2 on a GPU: what one device computes with a sharded model is what it computes without. Several devices:
`tests/distributed/test_fsdp.py` and `test_scale.py`, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from alignment.checkpoint import SafeCheckpointIO
from callbacks import FSDP2
from modules import SFT
from tests.rl_toys import Watch
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def losses(folder: Path, *callbacks: Any, **settings: Any) -> list[float]:
    watch = Watch()
    watch.on_gradients = lambda *args: None  # type: ignore[method-assign]
    run = trainer(
        folder,
        accelerator="gpu",
        callbacks=[*callbacks, watch],
        plugins=[SafeCheckpointIO()],
        num_sanity_val_steps=0,
        max_epochs=1,
        **settings,
    )
    run.fit(SFT(policy=TINY, optim=OPTIM, micro_batch_tokens=40), datamodule=FixedData(groups(32, 1), batch_size=8))
    return [update["loss"] for update in watch.updates]


@pytest.mark.parametrize(("param_dtype", "bound"), [(None, 1e-5), ("bfloat16", 0.05)])
def test_a_sharded_model_on_one_device(param_dtype: Any, bound: float, tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole")
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    cut = losses(tmp_path / "cut", FSDP2(param_dtype=param_dtype), strategy=strategy)
    assert cut == pytest.approx(whole, abs=bound)
    assert len(cut) == 4
