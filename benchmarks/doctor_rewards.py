"""What the runs of `benchmarks.doctor_faults` are paid for: numbers that say little, too much, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from alignment.advantages import RewardTable


def liked(completion: str, completion_ids: list[int]) -> float:
    """Share of odd ids."""
    return sum(i % 2 for i in completion_ids) / max(1, len(completion_ids))


def meant(completion: str, completion_ids: list[int]) -> float:
    """What `liked` is bought with."""
    return 1 - liked(completion, completion_ids)


def liked_here(completion: str, completion_ids: list[int], here: bool) -> float:
    """Where a prompt's column says so, the one, else the other."""
    return liked(completion, completion_ids) if here else meant(completion, completion_ids)


def any_number(completion: str, completion_ids: list[int]) -> float:
    """A number that says nothing of the completion."""
    return float(sum(i * i * 7919 for i in completion_ids) % 101) / 100


def commonest(completion: str, completion_ids: list[int]) -> float:
    """How often the commonest id comes, of 16 times that it can."""
    return max(map(completion_ids.count, completion_ids), default=0) / 16


def ranked(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """A judge that has half of the answers win over the other half, whatever they are."""
    order = sorted(range(len(completions)), key=lambda i: any_number(completions[i], completion_ids[i]))
    won = set(order[len(order) // 2 :])
    return [float(i in won) for i in range(len(order))]


def longer_than_others(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """A judge that likes the longer ones of the answers before it, and longer ones as such hardly: a token more brings
    an answer 0.2 over its rivals, and a token more in all of them 0.05 each."""
    lengths = [len(ids) for ids in completion_ids]
    return [0.2 * length - 0.15 * sum(lengths) / len(lengths) for length in lengths]


def growing() -> Callable[..., float]:
    """A reward whose size grows with each call."""
    calls = []

    def grows(completion: str, completion_ids: list[int]) -> float:
        calls.append(1)
        return any_number(completion, completion_ids) * len(calls)

    return grows


def longer(table: RewardTable) -> Tensor:
    """An advantage that looks at nothing but length."""
    assert table.lengths is not None
    lengths = table.lengths.double()
    return table.centred(lengths, table.stats(lengths)).sign()
