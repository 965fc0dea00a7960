"""FP8 on a GPU: codes there, the memory that evaluation takes, and products in hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from alignment.fp8 import LOGP_BOUND, Fp8Archive, quantise
from alignment.logprobs import LogProbEngine
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.swapping import decoder_layers
from callbacks import Fp8Training
from modules import SFT
from tests.architectures import DENSE, build, ragged_batch
from tests.loops import Rows
from tests.toys import FixedData, groups, trainer

pytestmark = pytest.mark.gpu


def test_codes_are_those_of_the_cpu() -> None:
    x = torch.randn(257, 129, generator=torch.Generator().manual_seed(0)) * 3
    for per in ("tensor", "row"):
        here, there = quantise(x, per), quantise(x.cuda(), per)
        assert torch.equal(here.codes.view(torch.uint8), there.codes.view(torch.uint8).cpu())
        torch.testing.assert_close(there.dequantise().cpu(), here.dequantise(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3", "gpt2"])
@pytest.mark.parametrize("place", ["host", "device"])
def test_an_archived_policy(name: str, place: Any) -> None:
    model = build(DENSE[name]()).cuda()
    engine, archive, batch = LogProbEngine(model), Fp8Archive(place=place), ragged_batch().to("cuda")
    archive.store("a", model)
    with torch.no_grad():
        own = engine(batch).logps
        with archive.evaluating(model, "a"):
            inside = engine(batch).logps
        assert torch.equal(engine(batch).logps, own)
    gaps = (inside - own).abs()[batch.scored]
    assert gaps.mean() <= LOGP_BOUND["mean"]
    assert gaps.max() <= LOGP_BOUND["largest"]


def test_the_memory_of_evaluation() -> None:
    """One layer and what is in none, as the allocator sees it."""
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=128,
    )  # fmt: skip
    model = build(config).cuda()
    engine, archive, batch = LogProbEngine(model), Fp8Archive(), ragged_batch().to("cuda")
    archive.store("a", model)

    def peak(archived: bool) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            if archived:
                with archive.evaluating(model, "a"):
                    engine(batch)
            else:
                engine(batch)
        return torch.cuda.max_memory_allocated() - before

    peak(False)
    layer = sum(p.nbytes for p in decoder_layers(model)[0].parameters())
    everything = sum(p.nbytes for p in model.parameters())
    extra = peak(True) - peak(False)
    assert extra <= (everything - 8 * layer) + layer + 2 * 4096 * 1024
    assert extra < everything / 4


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_products_in_hardware_train_as_emulated_ones(recipe: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products before compute capability 8.9")
    losses = []
    for emulate in (False, True):
        module = SFT(policy=PolicyConfig(), optim=OptimConfig(lr=3e-3, schedule="constant"))
        rows = Rows()
        settings = {"accelerator": "gpu", "precision": "bf16-mixed", "max_epochs": 1, "limit_val_batches": 0}
        run = trainer(tmp_path, callbacks=[Fp8Training(recipe=recipe, emulate=emulate)], logger=rows, **settings)
        run.fit(module, datamodule=FixedData(groups(64, 1)))
        losses.append([dict(row)["loss"] for _, row in rows.rows if "loss" in dict(row)])
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert losses[0][-1] < losses[0][0] - 0.3
