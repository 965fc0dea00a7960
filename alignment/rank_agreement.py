"""Whether the processes of a run still hold the same weights: exact, and cheap enough for every few steps.

A fingerprint reads every weight once and copies a few numbers. Weights that are sharded over the processes differ by
design and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from alignment import distributed
from alignment.spread import is_spread

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = (1 << 61) - 1


@torch.no_grad()
def fingerprint(parameters: Iterable[nn.Parameter]) -> int:
    """A number that depends on every bit of the parameters that each process holds whole, and on their order.

    Two sets of weights that differ have the same one only if the differences of each tensor's words sum to 0.
    """
    sums = [_words(p).sum(dtype=torch.int64) for p in parameters if not is_spread(p)]
    found = 0
    if sums:
        for value in torch.stack([total.to(sums[0].device) for total in sums]).tolist():
            found = (found * 1_000_003 + value) % _MODULUS
    return found


def _words(tensor: Tensor) -> Tensor:
    """The bits as integers of the elements' size."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def disagreement(parameters: Iterable[nn.Parameter], grad_norm: float | None) -> dict[str, float]:
    """Metrics of one comparison, the same on every rank; none in a single process. A collective.

        ranks/parameters_differ   share of the ranks whose weights are not those of most ranks
        ranks/grad_norm_spread    largest minus smallest norm of the last update's reduced gradient, relative to the
                                  largest; where every rank has one

    Args:
        grad_norm: of this rank's last update, over all parameters, as `GradientListener` gets it.
    """
    if distributed.processes() == 1:
        return {}
    gathered: list[tuple[int, float | None]] = distributed.gather_from_processes(  # type: ignore[assignment]
        (fingerprint(parameters), grad_norm)
    )
    prints, norms = Counter(print_ for print_, _ in gathered), [norm for _, norm in gathered if norm is not None]
    found = {"ranks/parameters_differ": 1 - prints.most_common(1)[0][1] / len(gathered)}
    if len(norms) == len(gathered):
        found["ranks/grad_norm_spread"] = (max(norms) - min(norms)) / max(max(norms), 1e-30)
    return found
