"""Which devices a job runs on, told at its start when they are not all of one kind."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence

import torch

from alignment import distributed

log = logging.getLogger(__name__)


def device_kind(device: torch.device) -> str:
    """The name a person would call this device by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def mixture(kinds: Sequence[str]) -> str:
    """One line about the kinds of devices that ranks have, in rank order; "" when all are alike."""
    if len(set(kinds)) < 2:
        return ""
    ranks = {kind: [str(rank) for rank, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)}
    named = "; ".join(f"{kind} on rank{'s' * (len(own) > 1)} {', '.join(own)}" for kind, own in ranks.items())
    return (
        f"devices of different kinds in one job: {named}. Each step takes as long as the slowest needs, the smallest "
        "memory bounds micro_batch_tokens, and a resumed run repeats bits only with the same device on each rank"
    )


def report_mixture(device: torch.device) -> None:
    """Warn on rank 0 when ranks run on devices of different kinds. A collective."""
    message = mixture([str(kind) for kind in distributed.gather_from_processes(device_kind(device))])
    if message and distributed.process() == 0:
        log.warning("%s", message)
