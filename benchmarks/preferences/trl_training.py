"""`python trl_training.py SPEC.json`: `benchmarks/performance/trl_worker.py` with trainers of KTO, CPO and ORPO."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "performance"))

import transformers
import trl
import trl_worker as worker
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


@worker.kind("kto")
def kto(run: worker.Run) -> Any:
    """Rows with a `label`, each completion by itself."""
    config = run.config(trl.KTOConfig, run.per_step, beta=run.spec["beta"], max_length=None, model_init_kwargs=run.load)
    return worker.stepped(run, trl.KTOTrainer)(
        model=run.model,
        args=config,
        processing_class=run.tokenizer,
        train_dataset=run.dataset("prompt", "completion", "label"),
    )


class OddsRatio(ORPOTrainer):
    """ORPO without its NLL, which counts the prompt's tokens in."""

    def concatenated_forward(self, *given: Any) -> Any:
        found = list(super().concatenated_forward(*given))
        found[4] = 0.0 * found[4]
        return tuple(found)


@worker.kind("cpo", "orpo")
def reference_free(run: worker.Run) -> Any:
    which, trainer = (CPOConfig, CPOTrainer) if run.spec["kind"] == "cpo" else (ORPOConfig, OddsRatio)
    config = run.config(which, run.per_step, beta=run.spec["beta"])
    return worker.stepped(run, trainer)(
        model=transformers.AutoModelForCausalLM.from_pretrained(run.model, **run.load),
        args=config,
        processing_class=run.tokenizer,
        train_dataset=run.dataset("prompt", "chosen", "rejected"),
    )


if __name__ == "__main__":
    worker.main(worker.Run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
