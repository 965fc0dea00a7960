"""What `test_fsdp.py` runs in one process and, sharded, in two. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from alignment import distributed
from alignment.checkpoint import SafeCheckpointIO, load_checkpoint_folder
from alignment.checkpoint_folder import write_checkpoint
from alignment.guard import roll_back
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.spread import is_spread, whole
from callbacks import FSDP2, Checkpoint
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader
from modules import DPO, GRPO, MORL, PPO, SFT, DecoupledPO, GeneralizedRPO, RewardModel
from tests.rl_toys import Watch, here, odd, odd_in_some, online, prompts
from tests.toys import TINY, FixedData, groups, trainer

OPTIM = OptimConfig(lr=1e-4, schedule="cosine", warmup_steps=3, weight_decay=0.1, clip_norm=0.5)
SGD = OptimConfig(lr=1e-2, optimizer="sgd", schedule="linear")
SETTINGS: dict[str, Any] = {"optim": OPTIM, "micro_batch_tokens": 40}
LORA = LoRAConfig(r=3)
"""Of three rows one rank has two; of one, the second rank has none."""
KL = {"coefficient": 0.1, "estimator": "k3"}
ODD = {"odd": here(odd_in_some, scale="running")}
TWO = {**ODD, "all": here(odd)}


def rows(completions: int, steps: int = 6) -> list[Any]:
    """The last batch holds one group, so that with two ranks the second has none, and nothing called `margin`."""
    return groups(8 * (steps - 1) + 1, completions, margin=0.01)


def offline(kind: Any, completions: int, policy: PolicyConfig = TINY, **settings: Any) -> Any:
    def build() -> tuple[Any, FixedData]:
        data = FixedData(rows(completions), val=groups(11, completions, seed=3, margin=0.01), batch_size=8)
        return kind(policy=policy, **SETTINGS, **settings), data

    return build


def sampling(kind: Any, **settings: Any) -> Any:
    """Batches of 4, 4 and 3 prompts, of which the last gives the ranks 2 and 1; only rank 0's prompts give a signal."""

    def build() -> tuple[Any, FixedData]:
        data = FixedData(prompts(11, alive=[i % 2 == 0 for i in range(11)]), batch_size=4)
        common = {"rewards": ODD, "optim": SGD, "micro_batch_tokens": 40, "minibatches": 2}
        return online(kind, **{**common, **settings}), data

    return build


RUNS: dict[str, Callable[[], tuple[Any, FixedData]]] = {
    "sft": offline(SFT, 1),
    "sft, recomputing": offline(SFT, 1, PolicyConfig(name="tiny", gradient_checkpointing=True)),
    "sft, 4-bit base": offline(SFT, 1, PolicyConfig(name="tiny", lora=LORA, quantization="4bit")),
    "sft, plain path": offline(SFT, 1, PolicyConfig(name="tiny", logprob_path="plain")),
    "reward model": offline(RewardModel, 2),
    "dpo": offline(DPO, 2, reference="copy", sft_weight=0.3, reference_sync={"alpha": 0.3, "every": 2}),
    "dpo, cached": offline(DPO, 2, reference="cached"),
    "dpo, lora": offline(DPO, 2, PolicyConfig(name="tiny", lora=LORA), reference="adapter_off"),
    "dpo, a reference that follows": offline(
        DPO,
        2,
        PolicyConfig(name="tiny", lora=LoRAConfig(r=1)),
        reference="frozen_adapter",
        reference_sync={"every": 2},
    ),
    "dpo, whole batch": offline(DPO, 2, reference="copy", loss={"aot": 1.0, "bco": 0.5}),
    "generalized": offline(GeneralizedRPO, 2, reference="copy", smoothness="js"),
    "grpo": sampling(GRPO, kl=KL, advantage="batch"),
    "ppo": sampling(PPO, kl={**KL, "place": "reward"}, epochs=2),
    "ppo, own critic": sampling(PPO, kl=KL, critic={"kind": "copy"}),
    "morl": sampling(MORL, rewards=TWO, combine="mgda", kl=KL),
    "decoupled": sampling(DecoupledPO, rewards=TWO, isolation={"mode": "project"}, kl={"estimator": "full_reverse"}),
}


RESUMED = {"dpo": 6, "dpo, a reference that follows": 6, "ppo": 8}
"""Name -> steps of the run, one of whose checkpoints is before the last."""


class Continued(FixedData):
    """The same batches from a loader that goes on where a run stopped."""

    def train_dataloader(self) -> Any:
        order = SampleOrder(len(self.train), shuffle=False)
        share = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        rank, world = share["rank"], share["num_replicas"]
        return StatefulLoader(
            self.train, BatchOrder(order, batch_size=self.batch_size, rank=rank, world_size=world)
        )


class WholeWatch(Watch):
    """Watch, with gradients joined from all ranks."""

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Any) -> None:
        if not self.gradients:
            self.gradients.append(
                torch.cat([whole(p.grad).flatten() for p in module.parameters() if p.grad is not None])
            )


def run_of(world: int, folder: Path, *callbacks: Any, ways: int = 1, **settings: Any) -> L.Trainer:
    """A trainer that shards where there are several processes, `ways` of which are one rank."""
    strategy: Any = "auto"
    if world > 1:
        strategy = ModelParallelStrategy(data_parallel_size=world // ways, tensor_parallel_size=ways)
    own = [] if world == 1 or any(isinstance(c, FSDP2) for c in callbacks) else [FSDP2()]
    fixed: dict[str, Any] = {"devices": world, "strategy": strategy, "plugins": [SafeCheckpointIO()]}
    return trainer(folder, callbacks=[*own, *callbacks], num_sanity_val_steps=0, **fixed, **settings)


def fit(name: str, world: int, folder: Path, ways: int = 1) -> dict[str, Any]:
    module, data = RUNS[name]()
    watch = WholeWatch()
    run = run_of(world, folder / name, watch, ways=ways, max_epochs=1)
    run.fit(module, datamodule=data)
    held = sum(p.to_local().numel() if is_spread(p) else p.numel() for p in module.parameters())
    return {
        "gradient": watch.gradients[0],
        "losses": [u["loss"] for u in watch.updates],
        "norms": [u["grad_norm"] for u in watch.updates],
        "logged": watch.logged[0],
        "val": {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val/")},
        "global_step": run.global_step,
        "held": held / sum(p.numel() for p in module.parameters()),
    }


def tensors_of(module: Any, run: L.Trainer) -> dict[str, Tensor]:
    """Weights and moments, joined from all ranks."""
    found = {name: whole(value).clone() for name, value in module.state_dict().items()}
    for number, state in run.optimizers[0].state_dict()["state"].items():
        found |= {f"{number}/{name}": whole(value).clone() for name, value in state.items()}
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def source(place: Path, joined: bool) -> Path:
    path = min(place.glob("step=*.ckpt"))
    if not joined:
        return path
    if distributed.process() == 0:
        write_checkpoint(load_checkpoint_folder(path), place / "joined.ckpt")
    distributed.gather_from_processes(None)
    return place / "joined.ckpt"


def resumed(name: str, steps: int, world: int, folder: Path, ways: int = 1) -> dict[str, Any]:
    """A run, which then loses its weights and goes back to its last checkpoint; one that goes on from the first one;
    one that goes on from the same as a single process would have written it: what each ends with."""
    ends: list[dict[str, Tensor]] = []
    losses: list[list[float]] = []
    place = folder / f"resume {name}"
    for first, joined in ((True, False), (False, False), (False, True)):
        module, given = RUNS[name]()
        data, watch = Continued(given.train, batch_size=given.batch_size), Watch()
        watch.on_gradients = lambda *args: None  # type: ignore[method-assign]
        saver = [Checkpoint(dirpath=place, filename="{step}", every_n_train_steps=3, save_top_k=-1)] if first else []
        settings: dict[str, Any] = {"max_steps": steps, "enable_checkpointing": first, "limit_val_batches": 0}
        run = run_of(world, folder, watch, *saver, ways=ways, **settings)
        run.fit(module, datamodule=data, ckpt_path=None if first else source(place, joined))
        ends.append(tensors_of(module, run))
        losses.append([u["loss"] for u in watch.updates])
        if first:
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(1.0)
            roll_back(module)
            ends.append(tensors_of(module, run))
    return {
        "rolled back": equal(ends[0], ends[1]),
        "same": equal(ends[0], ends[2]),
        "from one process": equal(ends[0], ends[3]),
        "losses": losses,
        "end": {name.removeprefix("policy."): v for name, v in ends[0].items() if name.startswith("policy.")},
    }


def predicted(world: int, folder: Path, ways: int = 1) -> list[Any]:
    """Greedy replies; the second rank has fewer prompts."""
    module, _ = RUNS["sft"]()
    data = FixedData(groups(5, 1), batch_size=5)
    return run_of(world, folder, ways=ways).predict(module, datamodule=data)  # type: ignore[return-value]


def in_bfloat16(world: int, folder: Path) -> dict[str, Any]:
    module, data = RUNS["sft"]()
    watch = Watch()
    watch.on_gradients = lambda *args: None  # type: ignore[method-assign]
    run = run_of(world, folder, FSDP2(param_dtype="bfloat16"), watch, max_steps=4, limit_val_batches=0)
    run.fit(module, datamodule=data)
    dtypes = {str(p.dtype) for p in module.parameters()}
    return {"losses": [u["loss"] for u in watch.updates], "dtypes": sorted(dtypes)}


def run_all(world: int, folder: Path, names: list[str] | None = None) -> None:
    results: dict[str, Any] = {name: fit(name, world, folder) for name in names or RUNS}
    if world > 1 and not names:
        results["resumed"] = {name: resumed(name, steps, world, folder) for name, steps in RESUMED.items()}
        results["bfloat16"] = in_bfloat16(world, folder)
    if not names:
        results["predicted"] = predicted(world, folder)
    torch.save(results, folder / f"results.rank{distributed.process()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(2, Path(sys.argv[1]), sys.argv[2:] or None)
