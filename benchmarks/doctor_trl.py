"""`PYTHON benchmarks/doctor_trl.py MODEL OUT`, with a Python that has TRL: what TRL's GRPO gives to a tracker.

Twelve steps of the TinyStories model (MODEL: its folder) under two rewards, one of which is the same for everything,
with an evaluation every four. OUT gets each row as the Trainer hands it to its callbacks, MLflow's among them:
tests/data/trl_grpo.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Rows(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.rows.append([state.global_step, {k: float(f"{float(v):.5g}") for k, v in (logs or {}).items()}])


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    """Share of vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def same(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.5] * len(completions)


def main(model: str, out: Path) -> None:
    names = ("cat", "dog", "boy", "girl") * 8
    prompts = Dataset.from_list([{"prompt": f"Once upon a time, a {name}"} for name in names])
    rows = Rows()
    config = GRPOConfig(
        output_dir=str(out.parent / "trl_grpo"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_steps=12,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=8,
        learning_rate=1e-4,
        beta=0.05,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=[vowels, same],
        args=config,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(8)),
        callbacks=[rows],
    )
    trainer.train()
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows.rows)
    command = "PYTHON benchmarks/doctor_trl.py MODEL OUT"
    out.write_text(f'{{"command": {json.dumps(command)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
