"""What `test_online_modules.py` runs under one and under two processes. Run directly, it is one rank of a two-process
group."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from alignment import distributed
from alignment.optim import OptimConfig
from datamodules import PromptData
from modules.gdpo import GDPO
from modules.grpo import GRPO
from modules.morl import MORL
from modules.online_dpo import OnlineDPO
from modules.ppo import PPO
from tests.rl_toys import Watch, here, odd, odd_in_some, online, prompts
from tests.toys import FixedData, trainer

SGD = OptimConfig(lr=1e-2, optimizer="sgd", schedule="linear")
SEVERAL = {"odd": here(odd_in_some, scale="running"), "all": here(odd), "same": here(lambda completion: 0.5)}
RUNS: dict[str, tuple[type, dict[str, Any]]] = {
    "grpo": (GRPO, {"minibatches": 2, "kl": {"coefficient": 0.1, "estimator": "k3"}, "advantage": "batch"}),
    "grpo, skipping": (GRPO, {"minibatches": 2, "epochs": 2, "loss": "gspo", "mask_truncated": True}),
    "ppo": (
        PPO,
        {
            "minibatches": 2,
            "epochs": 2,
            "kl": {"coefficient": 0.1, "target": 0.1, "horizon": 50, "estimator": "k1", "place": "reward"},
            "entropy": {"target": 6.0, "coefficient": 0.01, "keep": 0.5},
        },
    ),
    "online dpo, a reference that follows": (
        OnlineDPO,
        {"minibatches": 2, "epochs": 2, "reference_sync": {"alpha": 0.5, "every": 1}},
    ),
    "gdpo": (GDPO, {"rewards": SEVERAL, "minibatches": 2, "kl": {"coefficient": 0.1, "place": "reward"}}),
    "gdpo, over tokens": (GDPO, {"rewards": SEVERAL, "whiten": "token", "kl": {"coefficient": 0.1}}),
    "morl": (MORL, {"rewards": SEVERAL, "combine": "gradvac", "minibatches": 2, "epochs": 2, "preferences": {}}),
    "morl, one score, critic": (MORL, {"rewards": SEVERAL, "scalarise": "chebyshev", "critic": {"kind": "head"}}),
    "morl, a critic for each reward": (
        MORL,
        {"rewards": SEVERAL, "combine": "cagrad", "critic": {"kind": "head"}, "kl": {"coefficient": 0.1}},
    ),
}


def same_on_all_ranks(module: L.LightningModule) -> bool:
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    every = distributed.all_gather_objects(flat.numpy().tobytes())
    return all(other == every[0] for other in every)


def fit(module: Any, data: L.LightningDataModule, world: int, folder: Path) -> dict[str, Any]:
    watch = Watch()
    strategy = "ddp" if world > 1 else "auto"
    settings: dict[str, Any] = {"devices": world, "strategy": strategy, "num_sanity_val_steps": 0, "max_epochs": 1}
    run = trainer(folder, callbacks=[watch], **settings)
    run.fit(module, datamodule=data)
    return {
        "gradient": watch.gradients[0],
        "losses": [u["loss"] for u in watch.updates],
        "logged": watch.logged,
        "val": {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val/")},
        "weights_equal": same_on_all_ranks(module),
        "global_step": run.global_step,
    }


def modules(world: int, folder: Path) -> dict[str, Any]:
    """Batches of 4, 4 and 3 prompts, the last of which deals the ranks 2 and 1; only rank 0's prompts give a signal."""
    data = FixedData(prompts(11, alive=[i % 2 == 0 for i in range(11)]), batch_size=4)
    rewards = {"odd": here(odd_in_some, scale="running")}
    common = {"rewards": rewards, "optim": SGD, "micro_batch_tokens": 40}
    return {
        name: fit(online(kind, **{**common, **settings}), data, world, folder)
        for name, (kind, settings) in RUNS.items()
    }


def refills(world: int, folder: Path) -> dict[str, Any]:
    """Two thirds of the prompts give no signal: groups are dropped and replaced on both ranks, unequally; the first
    batches are full, the last ones have used up the prompts that there are."""
    data = PromptData(str(folder / "prompts.jsonl"), cache_dir=None, val_fraction=0.0, batch_size=5, seed=2)
    rewards = {"odd": here(odd_in_some)}
    return {
        kind.__name__: fit(online(kind, rewards=rewards, optim=SGD, dynamic_sampling=3), data, world, folder)
        for kind in (GRPO, PPO)
    }


def uneven(world: int, folder: Path) -> dict[str, Any]:
    """After refills rank 0 has one group and rank 1 two in either of the first batches, which are cut into two
    minibatches; and one prompt alone is hard and has two of three seats, on both ranks."""
    file, rewards = str(folder / "prompts.jsonl"), {"odd": here(odd_in_some)}
    settings: dict[str, Any] = {"cache_dir": None, "val_fraction": 0.0, "batch_size": 6, "seed": 8}
    strata = {"column": "level", "ratio": {"easy": 1, "hard": 2}}
    common = {"rewards": rewards, "optim": SGD, "epochs": 1}
    return {
        "dropped, PPO": fit(
            online(PPO, **common, dynamic_sampling=1, minibatches=2), PromptData(file, **settings), world, folder
        ),
        "a prompt again": fit(online(GRPO, **common), PromptData(file, **settings, strata=strata), world, folder),
    }


def run_all(world: int, folder: Path) -> None:
    results = {
        "modules": modules(world, folder),
        "refills": refills(world, folder),
        "uneven": uneven(world, folder),
    }
    torch.save(results, folder / f"results.rank{distributed.rank()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(2, Path(sys.argv[1]))
