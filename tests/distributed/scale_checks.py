"""What `test_scale.py` runs in one process, in two that are one rank (tensor parallelism) and in two ranks (FSDP2).
Run directly, it is one process of a group: of two, or of four that are two ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.cli import main
from alignment.logprobs import LogProbEngine
from alignment.probe import Probe
from alignment.sharding import Sharding
from alignment.spread import whole
from benchmarks import nonfinite
from callbacks import Fp8PolicyArchive, NanGuard
from modules import DPO, SFT
from tests.architectures import DENSE, build, ragged_batch
from tests.distributed import fsdp_checks
from tests.distributed.fsdp_checks import SETTINGS, offline, run_of
from tests.rl_toys import Watch
from tests.toys import TINY, FixedData, groups

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TENSOR = ("sft", "sft, recomputing", "reward model", "dpo", "dpo, cached")
"""Of `fsdp_checks.RUNS`."""
ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3"),
    *("gpt-neox", "olmo2", "smollm3", "granite", "cohere2"),
)


# ---------------------------------------------------------------------- one model, cut and whole


def on_one(name: str) -> dict[str, float]:
    """Largest difference of a log-prob, with and without gradients, and of the gradient relative to its norm, between
    a model whose layers are cut over all processes and the same one whole."""
    model = build(DENSE[name]())
    cut, batch = deepcopy(model), ragged_batch()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    Sharding(mesh=mesh["data_parallel"], twins=mesh["tensor_parallel"])(cut)
    found: list[Tensor] = []
    gradients: list[Tensor] = []
    silent: list[Any] = []
    for each in (model, cut):
        engine = LogProbEngine(each)
        with torch.no_grad():
            silent.append(engine(batch).logps)
        logps = engine(batch).logps
        assert logps is not None
        logps.sum().backward()
        found.append(logps.detach())
        gradients.append(torch.cat([whole(p.grad).flatten() for p in each.parameters() if p.grad is not None]).double())
    return {
        "logps": float((found[0] - found[1]).abs().max()),
        "no gradient": float((silent[0] - silent[1]).abs().max()),
        "gradient": float((gradients[0] - gradients[1]).norm() / gradients[0].norm()),
    }


# ---------------------------------------------------------------------- archived policies


class Evaluates(L.Callback):
    """At the end of a fit: log-probs of the start as it was archived, of the policy after that, and whether the policy
    is what it was."""

    def __init__(self, archive: Fp8PolicyArchive) -> None:
        self.archive = archive.archive
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        before = [whole(p).clone() for p in module.parameters()]
        config = module.engine._config
        batch: GroupBatch = Probe(config=config, device=module.device).batch()
        with self.archive.evaluating(module, "start"):
            archived: Tensor = module.engine(batch).logps
            said = module.complete(batch, 4)
        with torch.no_grad():
            own: Tensor = module.engine(batch).logps
        self.found = {
            "archived": archived,
            "own": own,
            "said": said,
            "kept": all(torch.equal(whole(p), b) for p, b in zip(module.parameters(), before, strict=True)),
            "error": trainer.callback_metrics["fp8/logp_error"].item(),
        }


def archived(world: int, folder: Path, ways: int = 1) -> dict[str, Any]:
    module, data = fsdp_checks.RUNS["sft"]()
    keep = Fp8PolicyArchive(every_n_steps=2)
    evaluates = Evaluates(keep)
    run_of(world, folder, keep, evaluates, ways=ways, max_steps=3, limit_val_batches=0).fit(module, datamodule=data)
    return evaluates.found


def fp8_reference(world: int, folder: Path) -> list[float]:
    module, data = offline(DPO, 2, reference="fp8")()
    watch = Watch()
    watch.on_gradients = lambda *args: None  # type: ignore[method-assign]
    run_of(world, folder, watch, max_steps=3, limit_val_batches=0).fit(module, datamodule=data)
    return [u["loss"] for u in watch.updates]


# ---------------------------------------------------------------------- what is not finite


class Asks(NanGuard):
    """Keeps what it found out."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def on_nonfinite(self, trainer: L.Trainer, module: L.LightningModule, skipped: Any) -> dict[str, Any]:
        found = super().on_nonfinite(trainer, module, skipped)
        self.told.append(found["blame"])
        return found


class Spoils(L.Callback):
    """Puts something into a place for the second batch, in the last process alone."""

    def __init__(self, put: Callable[[Any, GroupBatch], Any]) -> None:
        self.put = put
        self.undo: Any = None
        self.row = -1

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: GroupBatch, batch_idx: int) -> None:
        if batch_idx == 1 and distributed.process() == distributed.processes() - 1:
            self.row = int(batch.group_index[nonfinite._last(batch)])
            self.undo = self.put(module, batch)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.undo is not None:
            self.undo()
            self.undo = None


def output_gradient(module: Any, batch: GroupBatch) -> Any:
    def spoil(_module: Any, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf)

    return nonfinite.part(module, "1.self_attn.o_proj").register_forward_hook(spoil).remove


FAULTS: dict[str, Callable[[Any, GroupBatch], Any]] = {
    "layer": nonfinite.layer,
    "one row's loss": nonfinite.last_micro_batch,
    "gradient": output_gradient,
}


def blamed(name: str, folder: Path) -> dict[str, Any]:
    """Two ranks, of which the second has a fault in the second batch of four."""
    module = SFT(policy=TINY, **SETTINGS)
    asks, spoils, watch = Asks(), Spoils(FAULTS[name]), Watch()
    watch.on_gradients = lambda *args: None  # type: ignore[method-assign]
    run = run_of(2, folder / name, asks, spoils, watch, max_epochs=1, limit_val_batches=0)
    run.fit(module, datamodule=FixedData(groups(32, 1), batch_size=8))
    finite = all(bool(whole(p).isfinite().all()) for p in module.parameters())
    return {"told": asks.told, "row": spoils.row, "losses": [u["loss"] for u in watch.updates], "finite": finite}


# ---------------------------------------------------------------------- all of it


def from_the_command_line(folder: Path) -> int:
    """The file of two processes, as `--trainer` takes it too."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    words = ["fit", "-c", str(CONFIGS / "debug" / "sft_smoke.yaml"), "--trainer", str(CONFIGS / "trainer" / "tp2.yaml")]
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
    return main([*words, *quiet, "--trainer.max_steps=1"])


def run_all(world: int, folder: Path) -> None:
    ways = min(world, 2)
    names = TENSOR if world < 4 else ("dpo",)
    results: dict[str, Any] = {name: fsdp_checks.fit(name, world, folder, ways) for name in names}
    results["predicted"] = fsdp_checks.predicted(world, folder, ways)
    if world > 1:
        results["archived, tensor"] = archived(world, folder, ways)
        results["resumed"] = {"dpo": fsdp_checks.resumed("dpo", 6, world, folder, ways)}
    if world == 2:
        results["models"] = {name: on_one(name) for name in ARCHITECTURES}
        results["command line"] = from_the_command_line(folder / "cli")
        results["blamed"] = {name: blamed(name, folder) for name in FAULTS}
    if world < 4:
        results["archived"] = archived(world, folder)
        results["fp8 reference"] = fp8_reference(world, folder)
    torch.save(results, folder / f"results.rank{distributed.process()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
