"""About how much memory and time an advised run needs, before anything of it exists.

Memory is `alignment.memory`'s estimate. Time counts products of matrices: 2 FLOP per weight and token of a forward
pass, three times that to train on the token; replies are sampled one token after another, for which the weights are
read once a token and batch. The machine's rates are measured on the spot. A step reaches a share of that limit: 20 to
65 % on the workloads of reports/performance.md, which is why the time is a range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from alignment.advice import Run
from alignment.batches import Group
from alignment.critic import CriticConfig
from alignment.memory import Plan, ResolvedReference
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig

SHARE = (0.2, 0.65)
"""Of the machine's limit that a step reaches, least and most."""
MICRO_BATCH_TOKENS = 4096
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is trained on. Tokens are means over rows; `longest` is a prompt with all its replies."""

    count: int
    prompt: float
    reply: float
    longest: int

    @classmethod
    def of(cls, groups: Iterable[Group], max_tokens: int) -> Rows:
        """Of a DataModule's training groups. Replies that are still to be sampled count as `max_tokens` long."""
        prompts, replies, longest = [], [], 0
        for group in groups:
            lengths = [len(completion) for completion in group.completions] or [max_tokens]
            prompts.append(len(group.prompt))
            replies.append(sum(lengths) / len(lengths))
            longest = max(longest, len(group.prompt) + sum(lengths))
        count = len(prompts)
        return cls(count=count, prompt=sum(prompts) / count, reply=sum(replies) / count, longest=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured or given: floating-point operations a second in products, bytes a second of reading memory."""

    flops: float
    read: float


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of a few rounds of one product and one sum over 256 MB."""
    a, b = (torch.randn(1024, 1024, dtype=dtype, device=device) for _ in range(2))
    many = torch.zeros(1 << 26, device=device)
    product = min(_seconds(lambda: a @ b, device) for _ in range(_ROUNDS))
    read = min(_seconds(many.sum, device) for _ in range(_ROUNDS))
    return Rates(flops=2 * 1024**3 / product, read=many.nbytes / read)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def plan(run: Run, policy: PolicyConfig, rows: Rows) -> Plan:
    """What `alignment.memory` needs to know."""
    completions = int(run.settings.get("completions", 1))
    longest = rows.longest if not run.online else rows.longest + round((completions - 1) * rows.reply)
    reference: ResolvedReference = "none"
    if run.module in ("DPO", "GeneralizedRPO", "KTO", "PPO"):
        reference = "copy" if policy.lora is None else "adapter_off"
    return Plan(
        policy=policy,
        optim=OptimConfig(lr=run.lr),
        micro_batch_tokens=max(MICRO_BATCH_TOKENS, longest),
        row_tokens=longest,
        reference=reference,
        critic=CriticConfig() if run.module == "PPO" else None,
    )


def flops(run: Run, rows: Rows, parameters: int, passes: int) -> float:
    """Of one epoch. `passes`: how often each batch of samples is learned from."""
    forward = 2.0 * parameters
    if not run.online:
        replies = 2 if run.data == "PreferenceData" else 1
        tokens = rows.count * (rows.prompt + replies * rows.reply)
        reference = 0 if run.module in ("SFT", "RewardModel") else 1
        return forward * tokens * (3 + reference)
    completions = int(run.settings.get("completions", 1))
    tokens = rows.count * (rows.prompt + completions * rows.reply)
    reference = 1 if run.module == "PPO" else 0
    return forward * tokens * (1 + reference + 3 * passes)


def seconds(run: Run, rows: Rows, parameters: int, weights: int, rates: Rates, passes: int = 1) -> tuple[float, float]:
    """(least, most) of one epoch of a run over a model of `parameters` in `weights` bytes."""
    arithmetic = flops(run, rows, parameters, passes) / rates.flops
    decode = 0.0
    if run.online:
        steps = rows.count / run.batch_size * rows.reply
        decode = steps * weights / rates.read
    least, most = ((arithmetic + decode) / share for share in reversed(SHARE))
    return least, most
