"""Shared-prefix log-probs against the plain padded path: time and memory of one forward and backward pass.

    python -m benchmarks.logprobs [--pairs 5] [--out reports/logprobs.md]

Both paths run the same model on the same batch, in turns in one process (A B A B ...); the ratio is the median of the
pairwise ratios, with the smallest and largest beside it. Peak memory is that of a fresh process per path, above what it
held before the pass. The models are random Llamas of the sizes below, fp32. It refuses to measure on a busy machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.batches import Group, GroupBatch
from alignment.logprobs import LogProbEngine

BUSY = 0.6
"""Load of the last minute, in cores, above which other work would be measured too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A batch of `groups` prompts of `prompt` tokens with `size` completions of `completion` tokens."""

    name: str
    groups: int
    size: int
    prompt: int
    completion: int
    vocabulary: int = 32_000
    hidden: int = 288
    layers: int = 6


SHAPES = (
    Shape(name="pairs, long prompt", groups=8, size=2, prompt=256, completion=64),
    Shape(name="pairs, short prompt", groups=8, size=2, prompt=64, completion=256),
    Shape(name="groups of 8, long prompt", groups=4, size=8, prompt=256, completion=64),
    Shape(name="pairs, 152k vocabulary", groups=4, size=2, prompt=256, completion=64, vocabulary=152_064, hidden=256),
    Shape(name="one completion each", groups=8, size=1, prompt=128, completion=128),
)


def build(shape: Shape) -> tuple[nn.Module, GroupBatch]:
    """The model and the batch, both drawn with seed 0."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=round(shape.hidden * 8 / 3),
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 48 if shape.hidden % 48 == 0 else shape.hidden // 32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, shape.vocabulary, (length,), generator=draw).tolist()

    groups = [
        Group(prompt=ids(shape.prompt), completions=[ids(shape.completion) for _ in range(shape.size)], index=i)
        for i in range(shape.groups)
    ]
    return model, GroupBatch.from_groups(groups)


def step(model: nn.Module, engine: LogProbEngine, batch: GroupBatch) -> float:
    """Seconds of one forward and backward pass of the mean negative log-likelihood."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    logps = engine(batch).logps
    assert logps is not None
    (-logps.mean()).backward()
    return time.perf_counter() - begin


def times(shape: Shape, pairs: int) -> tuple[list[float], list[float]]:
    """(shared, plain) seconds of `pairs` interleaved passes after one of each that is not counted."""
    model, batch = build(shape)
    shared, plain = LogProbEngine(model, path="shared"), LogProbEngine(model, path="plain")
    for engine in (shared, plain):
        step(model, engine, batch)
    measured = [(step(model, shared, batch), step(model, plain, batch)) for _ in range(pairs)]
    return [a for a, _ in measured], [b for _, b in measured]


def _peak_mib() -> float:
    """Largest resident memory of this process. Not `ru_maxrss` where there is a choice: a child begins with that of the
    process it was started from."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _peak(shape: Shape, path: str, send: Callable[[float], None]) -> None:
    model, batch = build(shape)
    engine = LogProbEngine(model, path="shared" if path == "shared" else "plain")
    engine.verify()
    before = _peak_mib()
    step(model, engine, batch)
    send(_peak_mib() - before)


def peak(shape: Shape, path: str) -> float:
    """MiB by which one pass raises the peak resident memory of a fresh process, gradients included."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_peak, args=(shape, path, send.send))
    child.start()
    value: float = receive.recv()
    child.join()
    return value


def row(shape: Shape, pairs: int) -> str:
    shared, plain = times(shape, pairs)
    ratios = sorted(b / a for a, b in zip(shared, plain, strict=True))
    tokens = shape.groups * (shape.prompt + shape.size * shape.completion)
    memory = [peak(shape, path) for path in ("shared", "plain")]
    return (
        f"| {shape.name} | {shape.groups} x {shape.size}, {shape.prompt} + {shape.completion} | {shape.vocabulary:,} "
        f"| {statistics.median(shared):.2f} s | {statistics.median(plain):.2f} s "
        f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
        f"| {tokens / statistics.median(shared):,.0f} | {memory[0]:,.0f} | {memory[1]:,.0f} |"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprobs", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs of passes")
    parser.add_argument("--out", type=Path, default=Path("reports/logprobs.md"), help="the report")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    if load > BUSY:
        print(
            f"the machine is busy (load {load:.1f} in the last minute); wait until it is below {BUSY}", file=sys.stderr
        )
        return 1
    lines = [
        "# Shared prefix against plain rows",
        "",
        "Command: `make bench`, which is `python -m benchmarks.logprobs`. "
        f"Machine: {platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} torch threads; torch "
        f"{torch.__version__}, transformers {transformers.__version__}. Forward and backward of random Llamas, fp32, "
        f"{options.pairs} interleaved pairs; ratio = plain time / shared time, median (smallest to largest). Memory: "
        "MiB by which a pass raises the peak of a fresh process. Tokens: each prompt counted once.",
        "",
        "| batch | prompts x completions, tokens | vocabulary | shared | plain | ratio | tokens/s "
        "| MiB shared | MiB plain |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        print(shape.name, flush=True)
        lines.append(row(shape, options.pairs))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")
    print(f"report: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
