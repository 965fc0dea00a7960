"""`python -m benchmarks.performance.ours SPEC`: a workload by the ordinary command line, a step at a time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.performance.turns import Turn

TURN = Turn() if __name__ == "__main__" else None  # first: seconds count from here

import lightning as L  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402

from alignment import cli  # noqa: E402

MODULES = {"sft": "SFT", "rm": "RewardModel", "dpo": "DPO", "grpo": "GRPO", "gdpo": "GDPO", "ppo": "PPO"}
DATA = {"sft": "SupervisedData", "rm": "PreferenceData", "dpo": "PreferenceData"}


class Turns(Callback):
    """Tells of every batch, and waits before the next."""

    turn: Turn

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from benchmarks.performance import ours  # this file is also __main__ of the process

        self.turn = ours.Turns.turn
        self._go(self.turn.ready())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.callback_metrics.get("train/loss")
        more = {"vram_peak": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}
        self._go(self.turn.done(loss=None if loss is None else float(loss), **more))

    @staticmethod
    def _go(on: bool) -> None:
        if not on:  # nothing is to be saved, and workers of rewards end with their parent
            os._exit(0)


def configuration(spec: dict[str, Any]) -> dict[str, Any]:
    """What a user would write."""
    kind = spec["kind"]
    settings: dict[str, Any] = {
        "policy": {"name": spec["model"]},
        "optim": {
            "lr": spec["lr"],
            "schedule": "constant",
            "warmup_steps": 0,
            "clip_norm": spec["clip_norm"],
            "weight_decay": spec["weight_decay"],
        },
        **spec.get("ours", {}),
    }
    if kind == "dpo":
        settings |= {"beta": spec["beta"], "reference": "cached" if spec["precompute_reference"] else "copy"}
    if kind in ("grpo", "gdpo", "ppo"):
        settings |= {
            "rewards": {name: _reward(name) for name in spec["rewards"]},
            "completions": spec["completions"],
            "sampling": {"max_tokens": spec["max_tokens"], "temperature": spec["temperature"]},
        }
        if kind == "ppo":
            settings |= {"epochs": spec["epochs"], "kl": {"coefficient": spec["kl"], "estimator": "k1"}}
            settings |= {"critic": {"kind": "copy"}}  # TRL's is a trunk of its own
        if kind == "gdpo":
            settings |= {"batch_eps": 1e-4}
    data = {
        "path": spec["data"],
        "template": "raw",
        "batch_size": spec["rows_per_step"],
        "shuffle": False,
        "val_fraction": 0,
        "keep_duplicates": True,
        "max_prompt_tokens": None,
        "max_completion_tokens": None,
    }
    if kind not in DATA:
        del data["max_completion_tokens"]
    return {
        "seed_everything": spec["seed"],
        "model": {"class_path": f"modules.{MODULES[kind]}", "init_args": settings},
        "data": {"class_path": f"datamodules.{DATA.get(kind, 'PromptData')}", "init_args": data},
        "trainer": {
            "accelerator": spec["accelerator"],
            **({"devices": processes, "strategy": "ddp"} if (processes := spec.get("processes", 1)) > 1 else {}),
            "precision": "bf16-mixed" if spec["dtype"] == "bf16-mixed" else "32-true",
            "max_steps": -1,
            "max_epochs": 1,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "benchmarks.performance.ours.Turns"}],
        },
    }


def _reward(name: str) -> dict[str, Any]:
    """Cheap ones here, others in worker processes, which is the default."""
    return {"reward": f"benchmarks.performance.rewards.{name}", **({"in_process": True} if name == "cheap" else {})}


def main(path: Path) -> int:
    spec = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    work = path.with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    Path("config.yaml").write_text(yaml.safe_dump(configuration(spec), sort_keys=False), encoding="utf-8")
    return cli.main(["fit", "-c", "config.yaml"])


if __name__ == "__main__":
    from benchmarks.performance import ours

    assert TURN is not None
    ours.Turns.turn = TURN
    sys.exit(main(Path(sys.argv[1]).resolve()))
