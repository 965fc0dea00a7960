"""What `test_head_callbacks.py` runs. Run directly, it is one rank of a two-process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from callbacks import FocusReward, FusionStability, GradientNormRatio, OnlineHeadUpdate, RegressionGuard, StalledHead
from datamodules import PromptData
from modules.decoupled_po import DecoupledPO
from tests.distributed.online_modules_checks import SGD, same_on_all_ranks
from tests.distributed.pair import as_a_rank, fitted
from tests.rl_toys import here, odd, online


def length(completion: str, completion_ids: list[int]) -> float:
    return float(len(completion_ids))


REWARDS = {"odd": here(odd), "length": here(length), "same": here(lambda completion: 0.5)}


def run(world: int, folder: Path) -> dict[str, Any]:
    """Feedback first, five rows in batches of four and one, which leaves a rank without any; then the data."""
    for name, count in (("data", 8), ("feedback", 5)):
        rows = [{"prompt": f"{name} {i}?"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptData(str(folder / "data.jsonl"), cache_dir=None, val_fraction=0.25, batch_size=4, seed=1)
    module = online(DecoupledPO, rewards=REWARDS, optim=SGD, kl={"coefficient": 0.0}, heads={"kl": 0.0, "every": 1})
    fusion, guard = FusionStability(limit=1e-9, cooldown=1), RegressionGuard(evaluations=1)
    guard.best = 1e6
    ratio, stalled = GradientNormRatio(control=True), StalledHead(steps=2)
    update = OnlineHeadUpdate("odd", str(folder / "feedback.jsonl"), wait=False)
    watching = [ratio, stalled, fusion, FocusReward(evaluations=1, steps=2, share=1.0), guard, update]
    trained = fitted(world, folder, module, data, callbacks=watching, max_epochs=4)
    rates = {group["name"]: group["lr"] for group in trained.optimizers[0].param_groups}
    return {
        "averages": ratio.averages,
        "stalled": stalled.constant,
        "entropy": module.fusion_entropy,
        "frozen": sorted(module.frozen),
        "bonus": module.entropy.coefficient,
        "place": update.state_dict(),
        "rates": rates,
        "weights_equal": same_on_all_ranks(module),
        "global_step": trained.global_step,
    }


if __name__ == "__main__":
    as_a_rank(run)
