"""The workloads: which model, which rows, how much of a step. What both sides need lies in files.

    W1  SFT, lengths lognormal      W4  DPO, large vocabulary      W7  GRPO, large vocabulary, 40 % silent groups
    W2  reward model                W5  DPO, long completions      W8  GDPO, a slow and a failing reward
    W3  DPO                         W6  GRPO                       W9  PPO

On a GPU, in bf16: H1 GRPO with 0.6B parameters, H2 DPO with 270M and a large vocabulary.

Models are random Llamas; a word of the word-level tokenizer is a token. Rows are used in the order of the file.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.online.bench import write_lines

Kind = Literal["sft", "rm", "dpo", "grpo", "gdpo", "ppo"]

PAD, END = "<pad>", "<eos>"
EPOCHS = 4
"""Passes of PPO over a rollout."""
LENGTH = 32_768
"""Positions of the models: more than any row has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama with tied embeddings."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def backbone(self) -> int:
        """Parameters without embeddings."""
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.mlp + 2 * self.hidden) + self.hidden

    @property
    def parameters(self) -> int:
        return self.backbone + self.vocabulary * self.hidden


SMALL = Shape(hidden=288, mlp=768, layers=6, heads=6, vocabulary=32_000)
WIDE = Shape(hidden=256, mlp=688, layers=8, heads=8, vocabulary=152_064)
WIDEST = replace(WIDE, vocabulary=262_144)
LARGE = Shape(hidden=1024, mlp=3072, layers=32, heads=16, vocabulary=151_936)
MIDDLE = Shape(hidden=640, mlp=2048, layers=18, heads=10, vocabulary=262_144)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Args:
    rows: of the data in a step: texts, pairs, prompts. completions: sampled per prompt.
    prompt, completion: tokens; of sft 0, whose lengths are drawn. mean: of completions that end by themselves; None:
        all are as long as they may be. flat: share of prompts whose completions all get the same reward.
    peer: the version of TRL that is faster on it (part `versions`).
    bar, goal: the peer's time over ours. memory: our memory over the peer's, at most; None: no bar. gpu: needs one.
    """

    id: str
    title: str
    kind: Kind
    shape: Shape = SMALL
    rows: int
    prompt: int
    completion: int
    completions: int = 1
    mean: int | None = None
    flat: float = 0.0
    rewards: tuple[str, ...] = ("cheap",)
    peer: str = "1.12.0"
    bar: float
    goal: float
    memory: float | None = None
    gpu: bool = False


WORKLOADS = {
    w.id: w
    for w in (
        Workload(id="W1", title="SFT, lengths lognormal with mean 180", kind="sft", rows=16, prompt=0, completion=0,
                 bar=1.4, goal=2.2),
        Workload(id="W2", title="reward model", kind="rm", rows=8, prompt=256, completion=64, bar=1.5, goal=2.2),
        Workload(id="W3", title="DPO", kind="dpo", rows=8, prompt=256, completion=64, bar=2.4, goal=4.0),
        Workload(id="W4", title="DPO, 152k vocabulary", kind="dpo", shape=WIDE, rows=4, prompt=256, completion=64,
                 bar=3.0, goal=8.0, memory=0.5),
        Workload(id="W5", title="DPO, long completions", kind="dpo", rows=8, prompt=64, completion=256, bar=1.2,
                 goal=1.6),
        Workload(id="W6", title="GRPO", kind="grpo", rows=4, completions=8, prompt=256, completion=64, bar=2.5,
                 goal=5.0),
        Workload(id="W7", title="GRPO, 262k vocabulary, two groups in five without a signal", kind="grpo",
                 shape=WIDEST, rows=5, completions=8, prompt=256, completion=128, mean=40, flat=0.4, bar=4.0,
                 goal=10.0),
        Workload(id="W8", title="GDPO, three rewards", kind="gdpo", rows=4, completions=8, prompt=256, completion=64,
                 rewards=("cheap", "slow", "raising"), bar=2.0, goal=4.0),
        Workload(id="W9", title="PPO", kind="ppo", rows=16, prompt=256, completion=64, bar=2.5, goal=6.0),
        Workload(id="H1", title="GRPO, 0.6B parameters, one GPU", kind="grpo", shape=LARGE, rows=16, completions=8,
                 prompt=256, completion=256, peer="1.16.0", bar=3.0, goal=12.0, gpu=True),
        Workload(id="H2", title="DPO, 270M parameters, 262k vocabulary, one GPU", kind="dpo", shape=MIDDLE, rows=32,
                 prompt=512, completion=128, peer="1.16.0", bar=2.0, goal=4.0, gpu=True),
    )
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- models


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token per word: w2, w3, ...; `<pad>` is 0 and `<eos>` 1."""
    words = {PAD: 0, END: 1} | {f"w{i}": i for i in range(2, vocabulary)}
    core = Tokenizer(models.WordLevel(words, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)  # type: ignore[no-untyped-call]


def model_of(shape: Shape, mean: int | None, seed: int = 0) -> LlamaForCausalLM:
    """A random model. With `mean` its completions end after so many tokens on average, without they never do.

    Every embedding has one direction in common, which moves all logits alike; the end's has more or less of it.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    embedding = model.get_input_embeddings().weight.data
    common = 4 * embedding.std() * torch.randn(shape.hidden)  # enough to show in every state
    embedding += common
    ids = torch.randint(2, shape.vocabulary, (4, 64))
    with torch.no_grad():
        states = model.model(input_ids=ids).last_hidden_state[:, 32:].flatten(0, 1)
        lift = states @ common
        others = (states @ embedding[2:].T).logsumexp(-1)
        low, high = -200.0, 200.0
        wanted = 1 / mean if mean else 1e-9
        for _ in range(60):
            middle = (low + high) / 2
            share = (states @ embedding[1] + middle * lift - others).sigmoid().mean()
            low, high = (middle, high) if share < wanted else (low, middle)
        embedding[1] += middle * common
    return model


def make_model(shape: Shape, mean: int | None, folder: Path) -> Path:
    """The model's folder below `folder`, made on first use."""
    path = folder / f"llama-{shape.hidden}-{shape.layers}-{shape.vocabulary}-{mean or 'endless'}"
    if not (path / "config.json").exists():
        model = model_of(shape, mean)
        tokenizer_of(shape.vocabulary).save_pretrained(path)
        model.save_pretrained(path)
    return path


# ------------------------------------------------------------------------------------------------- rows


def rows_of(work: Workload, count: int) -> list[dict[str, Any]]:
    """Random words. A completion's last token is its end, which is not written."""
    draw = random.Random(work.id)

    def text(tokens: int) -> str:
        return " ".join(f"w{draw.randrange(2, work.shape.vocabulary)}" for _ in range(tokens))

    rows = []
    for i in range(count):
        if work.kind == "sft":
            length = _length(draw)
            rows.append({"prompt": text(length // 3), "completion": text(length - length // 3 - 1)})
        elif work.kind in ("rm", "dpo"):
            answers = {side: text(work.completion - 1) for side in ("chosen", "rejected")}
            rows.append({"prompt": text(work.prompt), **answers})
        else:
            flat = (i % work.rows) < round(work.flat * work.rows)
            rows.append({"prompt": text(work.prompt), "flat": flat})
    return rows


def _length(draw: random.Random, mean: float = 180.0, spread: float = 0.8, most: int = 1024) -> int:
    """Tokens of a text: lognormal, from 6 to `most`."""
    return max(6, min(most, round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread))))


# ------------------------------------------------------------------------------------------------- specification


def specify(work: Workload, folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """What a worker of either side is told, with model and rows in files below `folder`."""
    model = make_model(work.shape, work.mean, folder / "models")
    data = folder / "rows" / f"{work.id}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    write_lines(data, rows_of(work, work.rows * steps))
    return {
        "id": work.id,
        "kind": work.kind,
        "model": str(model.resolve()),
        "reward_model": None,
        "data": str(data.resolve()),
        "steps": steps,
        "rows_per_step": work.rows,
        "completions": work.completions,
        "max_tokens": work.completion,
        "temperature": 1.0,
        "lr": 1e-6,
        "clip_norm": None if work.kind == "ppo" else 1.0,  # TRL's PPO trainer never clips
        "weight_decay": 0.0,
        "dtype": "fp32",
        "beta": 0.1,
        "kl": 0.05 if work.kind == "ppo" else 0.0,
        "precompute_reference": False,
        "micro_batch": None,
        "threads": torch.get_num_threads(),
        "seed": 0,
        "rewards": list(work.rewards),
        "raise_caught": True,
        "as_it_comes": False,
        "large_pages": True,  # the peer's; ours asks for them itself
        "replay": None,
        "work": str((folder / "work").resolve()),
        "epochs": EPOCHS,
        "accelerator": "gpu" if work.gpu else "cpu",
        **changes,
    }


def write_spec(spec: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    return path


def facts(work: Workload) -> dict[str, Any]:
    """For the report."""
    return asdict(work)
