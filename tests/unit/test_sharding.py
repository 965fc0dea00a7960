"""What sharding refuses, and tensors in parts on the disk. What it computes: tests/distributed/test_fsdp.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from alignment import distributed, optim, spread_file, tensor_file
from alignment.checkpoint_folder import CheckpointError, load_checkpoint_folder, write_together
from alignment.errors import UserError
from alignment.optim import OptimConfig, build_optimizer
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.sharded_strategy import ShardedStrategy, adopt
from alignment.sharding import Sharding, is_sharded, unsharded
from alignment.spread_file import open_spread
from alignment.tensor_file import write_tensors
from alignment.transforms import Transforms
from callbacks import FSDP2
from modules import GRPO, SFT
from tests.rl_toys import online
from tests.toys import OPTIM, TINY, FixedData, groups, trainer


def module() -> SFT:
    return SFT(policy=TINY, optim=OPTIM, micro_batch_tokens=None)


def parallel(tmp_path: Path, ways: int = 1) -> L.Trainer:
    """A trainer whose strategy stands where the callback finds it."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ways)
    mesh: Any = {"tensor_parallel": SimpleNamespace(size=lambda: ways), "data_parallel": None}
    strategy._device_mesh = mesh
    return trainer(tmp_path, strategy=strategy)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_another_strategy_is_told_what_to_write(tmp_path: Path) -> None:
    run = trainer(tmp_path, callbacks=[FSDP2()])
    with pytest.raises(UserError, match=r"SingleDeviceStrategy; write trainer\.strategy: \{class_path: light"):
        run.fit(module(), datamodule=FixedData(groups(8, 1)))


def test_what_is_refused_where_several_processes_are_one_rank(tmp_path: Path) -> None:
    run = parallel(tmp_path, ways=2)
    with pytest.raises(UserError, match=r"tensor_parallel_size 2 .* GRPO samples .*; write trainer\.strategy"):
        FSDP2().setup(run, online(GRPO), "fit")
    for policy in (PolicyConfig(lora=LoRAConfig()), PolicyConfig(lora=LoRAConfig(), quantization="4bit")):
        adapted = SFT(policy=policy, optim=OPTIM, micro_batch_tokens=None)
        with pytest.raises(UserError, match=r"plans know no adapters .*tensor_parallel_size: 1"):
            FSDP2().setup(run, adapted, "fit")


def test_a_module_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LightningModule does not"):
        FSDP2().setup(parallel(tmp_path), L.LightningModule(), "fit")


def test_the_strategy_without_the_callback_is_refused(tmp_path: Path) -> None:
    own = module()
    own.trainer = parallel(tmp_path)
    with pytest.raises(UserError, match=r"add callbacks\.FSDP2"):
        own.setup("fit")


def test_the_callback_registers_once_and_adopts_the_strategy(tmp_path: Path) -> None:
    run, own, callback = parallel(tmp_path), module(), FSDP2(param_dtype="bfloat16")
    callback.setup(run, own, "fit")
    callback.setup(run, own, "test")
    assert own.transforms.stages == ("fully_shard",)
    assert type(run.strategy) is ShardedStrategy
    (step,) = own.transforms._steps.values()
    assert isinstance(step, Sharding)
    assert (step.param_dtype, step.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_a_strategy_of_the_users_own_stays() -> None:
    class Mine(ModelParallelStrategy):
        pass

    strategy = Mine()
    adopt(strategy)
    assert type(strategy) is Mine


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UserError, match=r"FSDP2\.param_dtype is one of float32, bfloat16, or null; got 'fp8'"):
        FSDP2(param_dtype="fp8")  # type: ignore[arg-type]


def test_compiled_layers_are_refused() -> None:
    steps = Transforms()
    steps.register("fully_shard", lambda model: model)
    with pytest.raises(UserError, match=r"policy\.compile does not go with callbacks\.FSDP2"):
        load_policy(PolicyConfig(name="tiny", compile=True), steps)


def test_optimizers_in_8_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "is_spread", lambda tensor: True)
    with pytest.raises(UserError, match=r"optim\.optimizer lion_8bit cannot hold the state of sharded parameters"):
        build_optimizer([("w", nn.Parameter(torch.zeros(2, 2)))], OptimConfig(optimizer="lion_8bit"), 1e-3)


def test_what_stays_whole_beside_sharded_parameters_has_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused and foreach optimizers take either kind of tensor in one call."""
    named = [("cut", nn.Parameter(torch.zeros(2, 2))), ("head", nn.Parameter(torch.zeros(1, 2)))]
    monkeypatch.setattr(optim, "is_spread", lambda tensor: tensor is named[0][1])
    found = optim.parameter_groups(named, 0.1)
    assert [(g["name"], g["params"], g["weight_decay"]) for g in found] == [
        ("matrices", [named[0][1]], 0.1),
        ("whole matrices", [named[1][1]], 0.1),
    ]


def test_a_whole_model_is_not_sharded() -> None:
    model = load_policy(TINY)
    assert not is_sharded(model)
    with unsharded(model):
        assert all(type(p) is nn.Parameter for p in model.parameters())


# --------------------------------------------------------------------------------------------------- parts on the disk


@pytest.fixture
def whole() -> torch.Tensor:
    return torch.arange(20, dtype=torch.bfloat16).view(5, 4)


@pytest.fixture
def files(whole: torch.Tensor, tmp_path: Path) -> list[Path]:
    """Three ranks: rows 0 and 1, the left and the right half of the others."""
    parts = {"w@0,0": whole[:2], "w@2,0": whole[2:, :2], "w@2,2": whole[2:, 2:]}
    paths = [tmp_path / spread_file.file_name(rank, 3) for rank in range(3)]
    for path, (entry, part) in zip(paths, parts.items(), strict=True):
        write_tensors(path, {entry: part})
    return paths


def test_a_block_is_read_from_the_parts_it_crosses(files: list[Path], whole: torch.Tensor) -> None:
    (tensor,) = open_spread(files).values()
    assert tensor.shape == whole.shape
    assert torch.equal(tensor.whole(), whole)
    assert torch.equal(tensor.read((3, 2), (1, 1)), whole[1:4, 1:3])
    assert tensor.read((0, 4), (5, 0)).shape == (0, 4)


def test_a_missing_part_is_an_error(files: list[Path]) -> None:
    tensor = open_spread([files[0], files[2]])["w"]
    with pytest.raises(ValueError, match="the files lack a part of 'w'"):
        tensor.whole()
    assert tensor.read((2, 4), (0, 0)).shape == (2, 4)


@pytest.mark.parametrize("entry", ["w", "@0,0", "w@0", "w@0,x"])
def test_an_entry_that_is_no_part_is_an_error(entry: str, whole: torch.Tensor, tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {entry: whole})
    with pytest.raises(ValueError, match=r"is no part of a tensor"):
        open_spread([tmp_path / "file"])


# ------------------------------------------------------------------------------------------------- writing together


def test_a_state_without_spread_tensors_is_written_as_ever(tmp_path: Path, whole: torch.Tensor) -> None:
    state = {"global_step": 3, "state_dict": {"w": whole, "tied": whole}}
    write_together(state, tmp_path / "a")
    found = load_checkpoint_folder(tmp_path / "a")
    assert found["global_step"] == 3
    assert torch.equal(found["state_dict"]["w"], whole)
    assert found["state_dict"]["w"] is found["state_dict"]["tied"]


def test_a_rank_that_cannot_write_leaves_the_old_state(
    tmp_path: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_together({"state_dict": {"w": whole}}, path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"a not written \([\d,]+ bytes\): No space left on device"):
        write_together({"state_dict": {"w": whole + 1}}, path)
    assert torch.equal(load_checkpoint_folder(path)["state_dict"]["w"], whole)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_disk_must_have_room_for_all_ranks(
    tmp_path: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "gather_from_processes", lambda value: [value, value])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 << 20))
    with pytest.raises(CheckpointError, match=r"it needs 2,\d+,\d+ bytes, the disk has 2,097,152 free"):
        write_together({"state_dict": {"w": whole}}, tmp_path / "a")
