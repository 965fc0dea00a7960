"""What the machine could do at most: measured rates of arithmetic and of copying, and what a step needs of either.

Legend: N_b parameters without embeddings, H hidden, L layers, V vocabulary, d heads x head size, P prompt, R
completion, B pairs, N prompts, G completions of a prompt, n scored tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.performance.workloads import EPOCHS, Shape, Workload

ADAMW_BYTES = 28
"""Of traffic per fp32 parameter and step: weight, gradient and two moments are read, all but the gradient written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Measured: floating-point operations a second in fp32 and bf16 products, bytes a second of a copy (read and
    written counted each)."""

    fp32: float
    bf16: float
    copy: float


def ceiling(device: str = "cpu", repeats: int = 5) -> Ceiling:
    """The best of some repeats."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, m, dtype=dtype, device=device) for n, m in ((1024, 640), (640, 32768)))
        out = torch.empty(1024, 32768, dtype=dtype, device=device)
        rates[dtype] = 2 * 1024 * 640 * 32768 / _best(functools.partial(torch.mm, a, b, out=out), repeats)
    source, target = torch.zeros(2, 1 << 28, device=device)
    seconds = _best(functools.partial(target.copy_, source), repeats)
    return Ceiling(fp32=rates[torch.float32], bf16=rates[torch.bfloat16], copy=2 * source.nbytes / seconds)


def _best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _pairs(tokens: float) -> float:
    """Attended pairs of a causal text."""
    return tokens * (tokens + 1) / 2


def forward(shape: Shape, tokens: float, attended: float, scored: float) -> float:
    """FLOP of a forward pass: `attended` pairs of positions in all, `scored` rows of the head."""
    width = shape.hidden  # heads x head size
    return (
        2 * shape.backbone * tokens + 4 * shape.layers * width * attended + 2 * shape.hidden * shape.vocabulary * scored
    )


def group(prompt: float, completion: float, size: int) -> tuple[float, float]:
    """(tokens, attended pairs) of a prompt with `size` completions behind it."""
    return prompt + size * completion, _pairs(prompt) + size * (prompt * completion + _pairs(completion))


def flops(work: Workload, lengths: list[int] | None = None) -> float:
    """Of a whole step. `lengths`: tokens of the texts of some SFT steps."""
    shape, p, r = work.shape, work.prompt, float(work.mean or work.completion)
    if work.kind == "sft":
        assert lengths is not None
        return sum(3 * forward(shape, n, _pairs(n), n - n // 3) for n in lengths) * work.rows / len(lengths)
    if work.kind in ("rm", "dpo"):
        tokens, attended = group(p, r, 2)
        scored = 2 * r if work.kind == "dpo" else 0.0
        once = work.rows * forward(shape, tokens, attended, scored)
        return 3 * once + (once if work.kind == "dpo" else 0.0)
    tokens, attended = group(p, r, work.completions)
    rows = work.completions * r
    prefill = forward(shape, p, _pairs(p), 1)
    decode = forward(shape, rows, work.completions * (p * r + _pairs(r)), rows)
    train = 3 * (1 - work.flat) * forward(shape, tokens, attended, rows)
    if work.kind != "ppo":
        return work.rows * (prefill + decode + train)
    reference = forward(shape, tokens, attended, rows)
    critic = forward(shape, tokens, attended, 0.0)
    # Critic: values once, then trained; reward model once.
    return work.rows * (prefill + decode + EPOCHS * (train + 3 * critic) + reference + 2 * critic)


def least_bytes(work: Workload) -> Mapping[str, float]:
    """Of memory traffic of a step: phase -> bytes."""
    steps = EPOCHS if work.kind == "ppo" else 1
    trained = work.shape.parameters * (2 if work.kind == "ppo" else 1)
    found = {"optimizer": float(ADAMW_BYTES * trained * steps)}
    if work.kind in ("grpo", "gdpo", "ppo"):
        found["decode"] = 4.0 * work.shape.parameters * work.completion
    return found


def seconds(work: Workload, limits: Ceiling, dtype: str, lengths: list[int] | None = None) -> float:
    """The least time of a step: arithmetic, or the decoder's reading where that is more, and the optimizer."""
    traffic = least_bytes(work)
    arithmetic = flops(work, lengths) / (limits.fp32 if dtype == "fp32" else limits.bf16)
    return max(arithmetic, traffic.get("decode", 0.0) / limits.copy) + traffic["optimizer"] / limits.copy
