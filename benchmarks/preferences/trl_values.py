"""`python trl_values.py IN.json OUT.json`: TRL's preference losses of given log-probs. Runs in TRL's environment.

IN holds `cases`, each with `trainer` (dpo, kto, cpo, orpo, online_dpo), `settings` of its config and `rows`; the rows
of a pair are {chosen, rejected}, of KTO {said, other, label}, of online DPO {first, second, scores}, and each
completion is {policy, reference, collision}: token values. What stands for the model returns these values, so only
TRL's own arithmetic is computed; of online DPO that is a whole training step but its sampling. OUT is a list of losses.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOTrainer

PROMPT = 2
"""Tokens before each completion."""


class Model(torch.nn.Module):
    """Returns the log-probs that stand in for its weights; the input ids say which row is asked for."""

    is_gradient_checkpointing = False

    def __init__(self, rows: list[dict[str, list[float]]], which: str) -> None:
        super().__init__()
        self.rows, self.which = rows, which

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        picked = [self.rows[int(row[0])] for row in input_ids]
        logps = padded([row[self.which] for row in picked], input_ids.shape[1] - 1)
        collision = padded([row["collision"] for row in picked], input_ids.shape[1] - 1)
        nothing = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps,
            log_sum_sq_probs=collision,
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
            logits=two_words(torch.nn.functional.pad(logps, (0, 1))),
        )


def padded(rows: list[list[float]], width: int) -> Tensor:
    """[N, width] values behind the prompt's, which has one place less than tokens; 0 elsewhere."""
    out = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, PROMPT - 1 : PROMPT - 1 + len(row)] = torch.tensor(row)
    return out


def two_words(logps: Tensor) -> Tensor:
    """[N, T] -> [N, T, 2] logits of a vocabulary of two words, of which the first has these log-probs."""
    return torch.stack([logps, torch.log(-torch.expm1(logps))], dim=-1)


def inputs_of(rows: list[dict[str, list[float]]], start: int) -> dict[str, Tensor]:
    """Ids whose first is the row's number, attention and completion masks."""
    width = PROMPT + max(len(row["policy"]) for row in rows)
    lengths = torch.tensor([[PROMPT + len(row["policy"])] for row in rows])
    place = torch.arange(width)[None]
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    ids[:, 0] = torch.arange(start, start + len(rows))
    attention = (place < lengths).long()
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": attention * (place >= PROMPT)}


def bare(kind: type, rows: list[dict[str, list[float]]], args: Any) -> Any:
    """A trainer without anything but what its loss reads."""
    trainer = object.__new__(kind)
    accelerator = SimpleNamespace(
        device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, backward=lambda loss, **_: None
    )
    given = {
        "args": args,
        "accelerator": accelerator,
        "model": Model(rows, "policy"),
        "ref_model": Model(rows, "reference"),
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "beta": args.beta,
    }
    trainer.__dict__.update(given)
    return trainer


def dpo(settings: dict[str, Any], pairs: list[dict[str, Any]], folder: str) -> float:
    args = DPOConfig(output_dir=folder, report_to="none", bf16=False, use_cpu=True, **settings)
    rows = [pair[side] for side in ("chosen", "rejected") for pair in pairs]
    trainer = bare(DPOTrainer, rows, args)
    trainer.loss_types = args.loss_type
    trainer.loss_weights = args.loss_weights or [1.0] * len(args.loss_type)
    for name in ("ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing", "use_weighting"):
        setattr(trainer, name, getattr(args, name))
    return float(trainer._compute_loss(trainer.model, inputs_of(rows, 0), return_outputs=False))


def kto(settings: dict[str, Any], given: list[dict[str, Any]], folder: str) -> float:
    args = KTOConfig(output_dir=folder, report_to="none", bf16=False, use_cpu=True, **settings)
    said, other = ([row[name] for row in given] for name in ("said", "other"))
    trainer = bare(KTOTrainer, [*said, *other], args)
    trainer.loss_type, trainer.calculate_KL = args.loss_type, args.loss_type == "kto"
    trainer.desirable_weight, trainer.undesirable_weight = args.desirable_weight, args.undesirable_weight
    inputs: dict[str, Any] = {**inputs_of(said, 0), "label": torch.tensor([row["label"] for row in given])}
    inputs |= {f"KL_{name}": value for name, value in inputs_of(other, len(said)).items()}
    return float(trainer._compute_loss(trainer.model, inputs, return_outputs=False))


def cpo(settings: dict[str, Any], pairs: list[dict[str, Any]], folder: str) -> float:
    args = CPOConfig(output_dir=folder, report_to="none", bf16=False, use_cpu=True, **settings)
    trainer = bare(CPOTrainer, [], args)
    for name in ("alpha", "loss_type", "label_smoothing", "simpo_gamma"):
        setattr(trainer, name, getattr(args, name))
    means = args.loss_type in ("simpo", "ipo")
    return float(trainer.cpo_loss(*(sums(pairs, side, means) for side in ("chosen", "rejected")))[0].mean())


def orpo(settings: dict[str, Any], pairs: list[dict[str, Any]], folder: str) -> float:
    """The odds-ratio term; TRL subtracts it."""
    trainer = bare(ORPOTrainer, [], SimpleNamespace(**settings))
    return -float(trainer.odds_ratio_loss(*(sums(pairs, side, True) for side in ("chosen", "rejected")))[0].mean())


def online_dpo(settings: dict[str, Any], prompts: list[dict[str, Any]], folder: str) -> float:
    """A training step on given completions and scores; which of two is chosen is TRL's to say."""
    args = OnlineDPOConfig(output_dir=folder, report_to="none", bf16=False, use_cpu=True, **settings)
    rows = [row[which] for which in ("first", "second") for row in prompts]
    scores = [row["scores"][place] for place in (0, 1) for row in prompts]
    inputs = inputs_of(rows, 0)
    parts = [inputs[name] for name in ("input_ids", "attention_mask")]
    sampled = (*(part[:, :PROMPT] for part in parts), *(part[:, PROMPT:] for part in parts), None)
    trainer = bare(OnlineDPOTrainer, rows, args)
    given = {
        "_beta": args.beta,
        "_generate": lambda *_: sampled,
        "max_length": args.max_length,
        "eos_token_ids": [1],
        "processing_class": SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        "reward_funcs": [lambda **_: scores],
        "reward_processing_classes": [None],
        "reward_weights": None,
        "state": SimpleNamespace(global_step=0),
        "stats": defaultdict(list),
    }
    trainer.__dict__.update(given)
    return float(trainer.training_step(trainer.model, {"prompt": ["a"] * len(prompts)}))


def sums(pairs: list[dict[str, Any]], side: str, means: bool) -> Tensor:
    rows = [torch.tensor(pair[side]["policy"]) for pair in pairs]
    return torch.stack([row.mean() if means else row.sum() for row in rows])


TRAINERS = {"dpo": dpo, "kto": kto, "cpo": cpo, "orpo": orpo, "online_dpo": online_dpo}

if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cases"]
    folder = str(Path(sys.argv[2]).parent / "trl")
    found = [TRAINERS[case["trainer"]](case["settings"], case["rows"], folder) for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
