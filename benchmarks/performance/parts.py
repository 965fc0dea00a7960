"""`python -m benchmarks.performance.parts [NAME ...]`: choices inside a step, one way of doing it beside another.

    attention   within groups (flash, products) against a mask over whole rows; forward and backward of one layer
    optimizer   AdamW fused against torch's loop, a step of 15M parameters
    rollout     W6's completions in bf16-mixed, weights cast once against in every decode step
    decode      attention of a decode step: torch's against plain products
    head        logits kept for the backward of the LM head against computed again; forward and backward
    embedding   rows added to the head's gradient of a tied weight against torch's dense one; backward of both
    clip        the gradients' norm; clipping before the optimizer's step and inside it; the step without
    compile     torch.compile of layers, of the LM head's gradient and of a rollout, with what compiling costs

CPU seconds of this process, the least of some repeats that take turns. docs/performance_log.md has what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from alignment import local_rollout, prefix_attention
from alignment.batches import Group, GroupBatch
from alignment.layout import LayerMask, attention_mask, pack
from alignment.lm_head import score_tokens
from alignment.local_rollout import LocalRollout
from alignment.rollout import SamplingConfig
from alignment.tied_rows import TiedRows, gathering_gradients
from alignment.update import total_norm
from benchmarks.online.bench import table
from benchmarks.performance import compiling
from benchmarks.performance.workloads import SMALL, WIDE, WIDEST, WORKLOADS, make_model, rows_of

REPEATS = 12
SHAPES = {
    "W3": (8, 6, 48, 256, (64, 64)),
    "W5": (8, 6, 48, 64, (256, 256)),
    "W6": (4, 6, 48, 256, (64,) * 8),
    "W7": (5, 8, 32, 256, (40,) * 8),
    "one long pair": (1, 8, 64, 2048, (1024, 1024)),
    "short pairs": (16, 4, 16, 20, (12, 13)),
}
"""Groups, heads, head size, prompt, completions."""

Ways = Mapping[str, Callable[[], object]]


def least(ways: Ways, repeats: int = REPEATS) -> list[str]:
    """Milliseconds of each way."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):  # the first is in none's favour: none is the first of the first
        for name, way in ways.items():
            begun = time.process_time()
            way()
            best[name] = min(best[name], time.process_time() - begun)
    return [f"{1000 * best[name]:.1f}" for name in ways]


def attention() -> list[str]:
    lines = []
    for name, (groups, heads, size, prompt, completions) in SHAPES.items():
        one = Group(prompt=[1] * prompt, completions=[[1] * n for n in completions])
        layout = pack(GroupBatch.from_groups([one] * groups), 0)
        mask = attention_mask(layout, LayerMask())
        parts, scale = [prompt, *completions], size**-0.5
        for dtype in (torch.float32, torch.bfloat16):
            shape = (groups, prompt + sum(completions), heads, size)
            q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
            ways: dict[str, Callable[[], Tensor]] = {
                "mask": lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
                "flash": lambda q=q, k=k, v=v, p=parts, s=scale: prefix_attention._flash(q, k, v, p, s, 0.0),
                "products": lambda q=q, k=k, v=v, p=parts, s=scale: prefix_attention._Products.apply(q, k, v, p, s),
            }
            both = {kind: lambda way=way: way().float().sum().backward() for kind, way in ways.items()}
            lines.append([f"{name}, {str(dtype).removeprefix('torch.')}", *least(both)])
    return table(["shape", "mask, ms", "flash, ms", "products, ms"], lines)


def optimizer() -> list[str]:
    sizes = [32_000] + [288] * 24 + [768] * 18
    weights = [torch.nn.Parameter(torch.randn(n, 288)) for n in sizes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    ways = {name: torch.optim.AdamW(weights, lr=1e-6, fused=name == "fused").step for name in ("loop", "fused")}
    return table(["", *(f"{name}, ms" for name in ways)], [["AdamW, 15M parameters", *least(ways)]])


def rollout() -> list[str]:
    work = WORKLOADS["W6"]
    path = make_model(work.shape, work.mean, Path(".cache/performance/models"))
    engine = LocalRollout(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), pad_id=0, stop_ids=[1])
    prompts = [
        Group(prompt=[int(word[1:]) for word in row["prompt"].split()], completions=(), index=i)
        for i, row in enumerate(rows_of(work, work.rows))
    ]

    def generate(once: bool) -> None:
        casts = local_rollout._weights_cast_once if once else contextlib.nullcontext
        casting = mock.patch.object(local_rollout, "_weights_cast_once", casts)
        with casting, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            sampling = SamplingConfig(max_tokens=work.completion)
            engine.generate(prompts, work.completions, sampling, seed=0, step=0)

    found = least({"every step": lambda: generate(False), "once": lambda: generate(True)}, repeats=3)
    return table(["", "cast in every step, ms", "cast once, ms"], [["W6, bf16-mixed", *found]])


def decode() -> list[str]:
    lines = []
    for rows, heads, slots, columns, size in ((4, 6, 8, 512, 48), (32, 6, 1, 288, 48), (8, 32, 1, 2048, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(rows, heads, slots, size, dtype=dtype)
            k, v = torch.randn(2, rows, heads, columns, size, dtype=dtype)
            mask = torch.zeros(rows, 1, slots, columns, dtype=dtype)

            def products(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor = mask) -> Tensor:
                return ((q * q.shape[-1] ** -0.5) @ k.mT + mask).softmax(-1) @ v

            ways: Ways = {
                "torch's": lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
                "products": products,
            }
            shape = f"{rows} rows, {slots} slots, {columns} columns, head {size}, {str(dtype).removeprefix('torch.')}"
            lines.append([shape, *least(ways, repeats=40)])
    return table(["shape", "torch's, ms", "products, ms"], lines)


HEADS = {"W1": (1900, SMALL), "W3": (1024, SMALL), "W4": (512, WIDE), "W6": (2048, SMALL)}
"""Tokens scored in a step, model."""


def head() -> list[str]:
    lines = []
    for name, (tokens, shape) in HEADS.items():
        states = torch.randn(tokens, shape.hidden, requires_grad=True)
        weight = torch.nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) / 20)
        targets = torch.randint(0, shape.vocabulary, (tokens,))
        for dtype in (torch.float32, torch.bfloat16):

            def run(kept_bytes: int, dtype: torch.dtype = dtype, args: tuple[Tensor, ...] = (states, weight, targets)):
                args[0].grad = args[1].grad = None
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
                    logps, _ = score_tokens(args[0], args[1], None, args[2], kept_bytes=kept_bytes)
                logps.sum().backward()

            found = least({"again": lambda run=run: run(0), "kept": lambda run=run: run(1 << 40)}, repeats=6)
            size = f"{tokens * shape.vocabulary * dtype.itemsize >> 20} MiB"
            lines.append([f"{name}, {str(dtype).removeprefix('torch.')}", size, *found])
    return table(["shape", "logits", "computed again, ms", "kept, ms"], lines)


def embedding() -> list[str]:
    lines = []
    for name, tokens, shape in (("W3", 3072, SMALL), ("W4", 1536, WIDE), ("W7", 2880, WIDEST)):
        inner = torch.nn.Embedding(shape.vocabulary, shape.hidden)
        head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        head.weight = inner.weight
        ids = torch.randint(0, shape.vocabulary, (tokens,))

        def run(rows: TiedRows | None, inner: torch.nn.Embedding = inner, ids: Tensor = ids) -> None:
            inner.weight.grad = None
            with gathering_gradients(), contextlib.nullcontext() if rows is None else rows.apart():
                states = inner(ids)
            (states.sum() + inner.weight.square().sum()).backward()  # the head's gradient: one multiplication

        tied = TiedRows(inner, head)
        ways: Ways = {"dense": lambda run=run: run(None), "rows": lambda run=run, tied=tied: run(tied)}
        lines.append([name, *least(ways, repeats=6)])
    return table(["vocabulary of", "dense, ms", "rows, ms"], lines)


def clip() -> list[str]:
    lines = []
    for name, shape in (("W3", SMALL), ("W4", WIDE)):
        weight = torch.nn.Parameter(torch.zeros(shape.parameters))
        weight.grad = torch.randn(shape.parameters)
        optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)

        def step(folded: bool, weight: Tensor = weight, optimizer: torch.optim.Optimizer = optimizer) -> None:
            if folded:
                optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]  # what gradients are divided by
            else:
                torch.nn.utils.clip_grads_with_norm_([weight], 1.0, torch.tensor(2.0))
            optimizer.step()
            optimizer.grad_scale = None  # type: ignore[attr-defined]

        ways: Ways = {
            "norm": lambda w=weight: total_norm([w.grad]),
            "before": lambda step=step: step(False),
            "inside": lambda step=step: step(True),
            "none": optimizer.step,
        }
        lines.append([name, *least(ways)])
    return table(["parameters of", "norm, ms", "clip and step, ms", "step that clips, ms", "step, ms"], lines)


PARTS: dict[str, Callable[[], list[str]]] = {
    "attention": attention,
    "optimizer": optimizer,
    "rollout": rollout,
    "decode": decode,
    "head": head,
    "embedding": embedding,
    "clip": clip,
    "compile": lambda: table(compiling.HEAD, compiling.lines()),
}


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance.parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *PARTS], help="none: all")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    for name in options.names or PARTS:
        with torch.no_grad() if name in ("rollout", "decode") else contextlib.nullcontext():
            print(f"\n{name}\n", *PARTS[name](), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
