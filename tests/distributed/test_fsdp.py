"""FSDP2 on two gloo processes equals one process: first gradients, losses, validation; what it saves resumes bit for
bit, and any number of processes reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from alignment.checkpoint import load_checkpoint_folder, verify
from alignment.checkpoint_folder import CheckpointError
from alignment.export import export
from modules import DPO
from tests.distributed import fsdp_checks
from tests.distributed.pair import run_pair

Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have run, with the checkpoints they wrote."""
    folder = tmp_path_factory.mktemp("two")
    run_pair("fsdp_checks", folder, timeout=600)
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Results]:
    return [torch.load(folder / f"results.rank{rank}", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("one")
    fsdp_checks.run_all(1, folder)
    results: Results = torch.load(folder / "results.rank0", weights_only=True)
    return results


@pytest.mark.parametrize("name", list(fsdp_checks.RUNS))
def test_two_ranks_are_one_process(name: str, one: Results, two: list[Results]) -> None:
    """First gradient to 2e-6 of its norm, losses of all updates to 1e-5, metrics of the first batch to 1e-6 but for the
    gradient's length, whose squares one process sums in fp32."""
    expected = one[name]
    gradient = expected["gradient"].double()
    assert gradient.norm() > 1e-2
    for rank in two:
        found = rank[name]
        assert (found["gradient"] - gradient).norm() <= 2e-6 * gradient.norm()
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=2e-5)
        logged, other = ({k: v for k, v in r["logged"].items() if "grad" not in k} for r in (found, expected))
        assert logged == pytest.approx(other, rel=1e-6, abs=1e-6, nan_ok=True)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-4, abs=1e-4)
        assert found["global_step"] == expected["global_step"]
    assert len(expected["losses"]) >= 6


@pytest.mark.parametrize("name", list(fsdp_checks.RUNS))
def test_a_rank_holds_half(name: str, one: Results, two: list[Results]) -> None:
    """But for what stays whole: packed weights of a base in 4 bits, heads, the adapter of a reference."""
    assert one[name]["held"] == 1.0
    shares = [rank[name]["held"] for rank in two]
    if "4-bit" in name:  # three quarters of what there is in elements, and all of it on both ranks
        assert 1.5 < sum(shares) < 2.0
    else:
        assert 1.0 <= sum(shares) < 1.1
        assert max(shares) < 0.6


@pytest.mark.parametrize("name", list(fsdp_checks.RESUMED))
def test_a_sharded_run_resumes_bit_for_bit(name: str, two: list[Results]) -> None:
    """Weights, moments, and the losses on the way there."""
    for rank in two:
        found = rank["resumed"][name]
        whole, rest, again = found["losses"]
        assert found["same"]
        assert found["rolled back"]
        assert found["from one process"]
        assert 0 < len(rest) < len(whole) == fsdp_checks.RESUMED[name]
        assert whole[-len(rest) :] == rest == again


@pytest.mark.parametrize("name", ["dpo", "dpo, a reference that follows"])
def test_its_checkpoint_is_exported(name: str, folder: Path, two: list[Results], tmp_path: Path) -> None:
    """Plain transformers loads the folder; without LoRA the weights are those that training ended with."""
    out = export(folder / f"resume {name}" / "step=6.ckpt", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert sorted(p.name for p in out.glob("*.safetensors")) == ["model.safetensors"]
    if name == "dpo":
        ended = two[0]["resumed"][name]["end"]
        for key, value in model.state_dict().items():
            assert torch.equal(value, ended[key])


def test_one_process_goes_on_from_what_two_saved(folder: Path, two: list[Results]) -> None:
    path = folder / "resume dpo" / "step=3.ckpt"
    module, given = fsdp_checks.RUNS["dpo"]()
    data = fsdp_checks.Continued(given.train, batch_size=given.batch_size)
    watch = fsdp_checks.WholeWatch()
    run = fsdp_checks.run_of(1, folder / "alone", watch, max_steps=6, limit_val_batches=0)
    run.fit(module, datamodule=data, ckpt_path=path)
    expected = two[0]["resumed"]["dpo"]["losses"][0][3:]
    assert [u["loss"] for u in watch.updates] == pytest.approx(expected, abs=1e-5)
    loaded = DPO.load_from_checkpoint(folder / "resume dpo" / "step=6.ckpt")
    for key, value in loaded.policy.state_dict().items():
        assert torch.equal(value, two[0]["resumed"]["dpo"]["end"][key])


def test_a_damaged_or_missing_shard_is_found(folder: Path) -> None:
    path = folder / "resume ppo" / "step=8.ckpt"
    manifest = verify(path)
    assert manifest["world_size"] == 2
    shard = path / "shard-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002\.safetensors does not have the sha256"):
        load_checkpoint_folder(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"must hold .*shard-00001-of-00002"):
        load_checkpoint_folder(path)


def test_parameters_gathered_in_bfloat16_stay_in_float32(one: Results, two: list[Results]) -> None:
    for rank in two:
        assert rank["bfloat16"]["dtypes"] == ["torch.float32"]
        assert rank["bfloat16"]["losses"] == pytest.approx(one["sft"]["losses"][:4], rel=0.01)
        assert rank["bfloat16"]["losses"] != one["sft"]["losses"][:4]


def test_replies_are_those_of_one_process(one: Results, two: list[Results]) -> None:
    """Ranks have different numbers of prompts, and of tokens to say."""
    found = {row["index"]: row for rank in two for batch in rank["predicted"] for row in batch}
    expected = {row["index"]: row for batch in one["predicted"] for row in batch}
    assert found == expected
    assert len(expected) == 5
