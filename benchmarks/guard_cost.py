"""What the finite guard costs while everything is finite (R24): its share of an optimizer step's time, on this machine.

    python -m benchmarks.guard_cost [--steps 110] [--hidden 512] [--layers 8]

A run of SFT with callbacks.NanGuard; the guard's own calls are timed inside its steps, since the difference of two runs
would be smaller than their noise. The read of all moments at every so many steps is among them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.batches import Group, GroupBatch
from alignment.guard import FiniteGuard
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.tiny import tiny_tokenizer
from benchmarks.nonfinite import trainer
from callbacks import NanGuard
from modules import SFT


class Timed(FiniteGuard):
    """Adds up the seconds of its own work."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        stepped = self.moments.stepped

        def timed(optimizer: torch.optim.Optimizer) -> None:
            started = time.perf_counter()
            stepped(optimizer)
            self.seconds[-1] += time.perf_counter() - started

        self.moments.stepped = timed  # type: ignore[method-assign]

    def unsafe(self, optimizer: torch.optim.Optimizer) -> str:
        started = time.perf_counter()
        found = super().unsafe(optimizer)
        self.seconds.append(time.perf_counter() - started)
        return found


class Steps(SFT):
    """Notes the seconds of each batch."""

    def training_step(self, batch: GroupBatch, batch_idx: int) -> None:
        started = time.perf_counter()
        super().training_step(batch, batch_idx)
        self.took = [*getattr(self, "took", []), time.perf_counter() - started]


def model(folder: Path, hidden: int, layers: int) -> str:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def run(name: str, steps: int, folder: Path) -> Any:
    module = Steps(policy=PolicyConfig(name=name), optim=OptimConfig(lr=1e-5, schedule="constant"), entropy=False)
    module.guard = Timed()
    groups = [Group(prompt=[1, *range(10, 73)], completions=[list(range(100, 164))], index=i) for i in range(4)]
    batches = [GroupBatch.from_groups(groups)] * steps
    trainer(folder, [NanGuard()]).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = run(model(folder / "model", options.hidden, options.layers), options.steps, folder)
    step, own = statistics.median(module.took[2:]), statistics.fmean(module.guard.seconds[2:])
    count = sum(p.numel() for p in module.parameters())
    print(f"{count:,} parameters in {len(list(module.parameters()))} tensors: a step {1e3 * step:.1f} ms")
    print(f"the guard's own calls {1e6 * own:.0f} us, {own / step:.3%} of it on average")


if __name__ == "__main__":
    main()
