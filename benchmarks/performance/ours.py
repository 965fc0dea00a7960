"""`python -m benchmarks.performance.ours SPEC`: a workload by the ordinary command line, a step at a time.

Imports what the command line does and nothing before it, so that its start is that of `alignment fit`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from alignment import cli
from benchmarks.performance import turns

MODULES = {"sft": "SFT", "rm": "RewardModel", "dpo": "DPO", "grpo": "GRPO", "gdpo": "GDPO", "ppo": "PPO"}
DATA = {"sft": "SupervisedData", "rm": "PreferenceData", "dpo": "PreferenceData"}


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
            "callbacks": [
                {
                    "class_path": "benchmarks.performance.waiting.Turns",
                    "init_args": {"threads": spec["threads"], "profile": spec.get("profile", False)},
                }
            ],
        },
    }


def _reward(name: str) -> dict[str, Any]:
    """Cheap ones here, others in worker processes, which is the default."""
    return {"reward": f"benchmarks.performance.rewards.{name}", **({"in_process": True} if name == "cheap" else {})}


def main(path: Path) -> int:
    spec = json.loads(path.read_text(encoding="utf-8"))
    work = path.with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    Path("config.yaml").write_text(yaml.safe_dump(configuration(spec), sort_keys=False), encoding="utf-8")
    return cli.main(["fit", "-c", "config.yaml"])


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:  # not in the further processes of a run
        turns.current()  # now: nobody else is to inherit its pipes
    sys.exit(main(Path(sys.argv[1]).resolve()))
