"""`torch.compile` on this machine: what compiling costs, what a step gains, and after how many steps that is even.

Called by `python -m benchmarks.performance.parts compile`, which has the units. Compiling counts the compiler's own
processes, starts from an empty cache on disk, and is what the first step takes more than a later one; a row may find
what an earlier one compiled in this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM

from alignment import lm_head
from alignment.batches import Group, GroupBatch
from alignment.compiled import compile_layers, uncompiled
from alignment.local_rollout import LocalRollout
from alignment.logprobs import LogProbEngine
from alignment.rollout import SamplingConfig
from benchmarks.performance.workloads import WORKLOADS, make_model, rows_of

REPEATS = 6
HEAD = ("what", "as it is, ms", "compiled, ms", "compiling, s", "even after steps")


def spent() -> float:
    """CPU seconds of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def seconds(run: Callable[[], object]) -> float:
    begun = spent()
    run()
    return spent() - begun


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Nothing compiled before is found; the compiler runs in this process, so that its time is counted."""
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), inductor.patch(compile_threads=1):
            torch._dynamo.reset()
            yield


def line(name: str, plain: Callable[[], object], compiled: Callable[[], object]) -> list[str]:
    """A row of the table: `compiled` compiles at its first call."""
    plain()
    with empty_cache():
        first = seconds(compiled)
        compiled()
        turns = [(seconds(plain), seconds(compiled)) for _ in range(REPEATS)]
    least, after = (min(times) for times in zip(*turns, strict=True))
    cost, gain = first - after, least - after
    even = f"{cost / gain:.0f}" if gain > 0 else "never"
    return [name, f"{1000 * least:.0f}", f"{1000 * after:.0f}", f"{cost:.0f}", even]


def model_of(name: str) -> nn.Module:
    work = WORKLOADS[name]
    path = make_model(work.shape, work.mean, Path(".cache/performance/models"))
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    return model


def training(mixed: bool) -> list[str]:
    """Log-probs of W3's pairs and their backward: all of a step but reference, optimizer and loss."""
    work = WORKLOADS["W3"]
    model = compile_layers(model_of("W3"))
    engine = LogProbEngine(model)
    engine.verify()
    ids = torch.randint(2, work.shape.vocabulary, (work.rows, work.prompt + 2 * work.completion)).tolist()
    first, second = work.prompt, work.prompt + work.completion
    batch = GroupBatch.from_groups(
        [Group(prompt=row[:first], completions=[row[first:second], row[second:]]) for row in ids]
    )

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
            logps = engine(batch).logps
        assert logps is not None
        logps.sum().backward()
        model.zero_grad()

    def plain() -> None:
        with uncompiled(model):
            step()

    return line(f"layers in training, W3, {'bf16-mixed' if mixed else 'fp32'}", plain, step)


def head(mixed: bool, tokens: int, vocabulary: int, size: int) -> list[str]:
    """The gradient of a tile of logits, the LM head's longest run of passes over the same numbers."""
    hidden = torch.randn(tokens, size, requires_grad=True)
    weight = nn.Parameter(0.05 * torch.randn(vocabulary, size))
    targets = torch.randint(0, vocabulary, (tokens,))
    eager = lm_head.logit_gradient
    fused = torch.compile(eager, dynamic=True)

    def apart(z: Tensor, targets: Tensor, columns: slice, *rest: object) -> Tensor:
        """Tiles start elsewhere each time: that must not be part of what is compiled."""
        return fused(z, targets - columns.start, slice(0, z.shape[1]), *rest[:-1], slice(0, len(z)))

    def run(gradient: Callable[..., Tensor]) -> None:
        with mock.patch.object(lm_head, "logit_gradient", gradient):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
                logps, _ = lm_head.score_tokens(hidden, weight, None, targets)
            logps.sum().backward()
        hidden.grad = weight.grad = None

    name = f"gradient of the LM head, {tokens} tokens, {vocabulary // 1000}k, {'bf16-mixed' if mixed else 'fp32'}"
    return line(name, lambda: run(eager), lambda: run(apart))


def decoding() -> list[str]:
    """W6's rollout with compiled layers, which rollouts otherwise run as they are."""
    work = WORKLOADS["W6"]
    model = compile_layers(model_of("W6"))
    engine = LocalRollout(model, pad_id=0, stop_ids=[1])
    engine.verify()
    prompts = [
        Group(prompt=[int(word[1:]) for word in row["prompt"].split()], completions=(), index=i)
        for i, row in enumerate(rows_of(work, work.rows))
    ]

    def plain() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            engine.generate(prompts, work.completions, SamplingConfig(max_tokens=work.completion), seed=0, step=0)

    def compiled() -> None:
        with mock.patch("alignment.local_rollout.uncompiled", return_value=contextlib.nullcontext()):
            plain()

    return line("a rollout, W6, bf16-mixed", plain, compiled)


def lines() -> Sequence[list[str]]:
    """The table's rows."""
    heads = [head(mixed, *shape) for mixed in (False, True) for shape in ((1024, 32_000, 288), (512, 152_064, 256))]
    return [*(training(mixed) for mixed in (False, True)), *heads, decoding()]
