"""What a reward may take and return, judged without processes."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import functools
from typing import Any

import numpy as np
import pytest
import torch

from alignment.errors import UserError
from alignment.rewards.calls import call_batch, call_one, load, reseed, wanted


def outcomes(returned: Any) -> list[tuple[float | None, str | None]]:
    return [
        (o.value, o.kind)
        for o in call_batch(lambda completions: returned, {"completions": ["a", "b"]}, 2, in_worker=True)
    ]


@pytest.mark.parametrize(
    "number",
    [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        torch.tensor(0.5),
        np.array(0.5),
        fractions.Fraction(1, 2),
        decimal.Decimal("0.5"),
    ],
)
def test_numbers_of_any_library(number: Any) -> None:
    assert outcomes([number, None]) == [(0.5, None), (None, None)]


@pytest.mark.parametrize("number", [True, 1, np.bool_(True), np.int64(1), torch.tensor(True)])
def test_booleans_and_integers(number: Any) -> None:
    assert outcomes([number, 0]) == [(1.0, None), (0.0, None)]


def test_an_exception_in_the_place_of_a_value_is_a_fault_of_that_completion_alone() -> None:
    returned = [ValueError("no answer"), 0.5]
    failed, fine = call_batch(lambda completions: returned, {"completions": ["a", "b"]}, 2, in_worker=True)
    assert (failed.value, failed.kind, failed.message) == (None, "raise", "ValueError: no answer")
    assert (fine.value, fine.kind) == (0.5, None)


@pytest.mark.parametrize("values", [(1, 2), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])])
def test_sequences_of_any_library(values: Any) -> None:
    assert outcomes(values) == [(1.0, None), (2.0, None)]


@pytest.mark.parametrize(
    ("returned", "kind", "told"),
    [
        ([1.0], "length", "returned 1 value, expected 3"),
        ([1.0] * 4, "length", "returned 4 values, expected 3"),
        ([], "length", "returned 0 values, expected 3"),
        (1.0, "type", "returned a float, expected a list"),
        (None, "type", "returned a NoneType"),
        (np.float64(1.0), "type", "returned a float64"),
        (torch.tensor(1.0), "type", "returned a Tensor"),
        ("abc", "type", "returned a str"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "type", "returned a dict"),
        ({1.0, 2.0, 3.0}, "type", "returned a set"),
        ((1.0 for _ in range(3)), "type", "returned a generator"),
        (["1.0"] * 3, "type", "gave a str, expected a number"),
        ([[1.0]] * 3, "type", "gave a list"),
        ([1j] * 3, "type", "gave a complex"),
        ([torch.ones(2)] * 3, "type", "gave a Tensor that is no number"),
        ([float("nan")] * 3, "nan", "gave NaN"),
        ([float("inf")] * 3, "inf", "gave inf"),
        ([-1e39] * 3, "inf", "beyond float32"),
        ([10**400] * 3, "inf", "beyond float64"),
    ],
)
def test_anything_else_is_a_fault(returned: Any, kind: str, told: str) -> None:
    """C15: nothing is broadcast; nothing is read from text; a mapping is no list."""
    found = call_batch(lambda completions: returned, {"completions": ["a", "b", "c"]}, 3, in_worker=True)
    assert [(o.value, o.kind) for o in found] == [(None, kind)] * 3
    assert told in found[0].message


def test_a_bad_value_costs_its_own_completion_only() -> None:
    assert outcomes([float("nan"), 2.0]) == [(None, "nan"), (2.0, None)]


def test_an_error_is_told_with_its_place() -> None:
    def broken(completion: str) -> float:
        raise KeyError("a\nb")

    outcome = call_one(broken, {"completion": "x"}, in_worker=True)
    assert outcome.kind == "raise"
    assert outcome.message.startswith(r"KeyError: 'a\nb' (" + __file__)


def throws(error: BaseException) -> Any:
    def reward(completion: str) -> float:
        raise error

    return reward


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), SystemExit("bye")])
def test_a_signals_exception_is_not_the_rewards_in_the_training_process(error: BaseException) -> None:
    with pytest.raises(type(error)):
        call_one(throws(error), {"completion": "x"}, in_worker=False)
    with pytest.raises(type(error)):
        call_batch(throws(error), {"completion": "x"}, 1, in_worker=False)
    assert call_one(throws(error), {"completion": "x"}, in_worker=True).kind in ("raise", "exit")


@pytest.mark.parametrize("status", [0, None])
def test_an_exit_without_an_error_never_ends_the_run(status: int | None) -> None:
    assert call_one(throws(SystemExit(status)), {"completion": "x"}, in_worker=False).kind == "exit"


# ---------------------------------------------------------------------------------------------------- parameters


def test_parameters_say_what_is_wanted() -> None:
    def single(completion: str, answer: str, hint: str = "") -> float:
        return 0.0

    def everything(completions: list[str], **kwargs: Any) -> list[float]:
        return []

    assert wanted(single) == (True, ("completion", "answer", "hint"), ("hint",), ())
    rest = ("prompts", "prompt_ids", "completion_ids", "truncated", "columns")
    assert wanted(everything) == (False, ("completions", *rest), rest, ())
    assert wanted(functools.partial(single, answer="4")) == (
        *(True, ("completion", "answer", "hint"), ("answer", "hint"), ()),
    )


def nothing() -> float:
    return 0.0


def both(completion: str, completions: list[str]) -> float:
    return 0.0


def unnamed(completions: list[str], /) -> list[float]:
    return []


async def later(completion: str) -> float:
    await asyncio.sleep(0)
    return 0.0


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (nothing, "must have a parameter `completions`"),
        (both, "`completions` .* or `completion`"),
        (unnamed, "positional-only"),
        (later, "coroutine"),
        (dict, "cannot be read|must have"),
    ],
)
def test_parameters_that_cannot_be_served(reward: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        wanted(reward)


# ------------------------------------------------------------------------------------------------------- loading


def test_loading_by_import_path() -> None:
    assert load(("tests.reward_faults.length", {}))("abc") == 3
    assert load(("tests.reward_faults.Returns", {"expression": "[2]"}))(["a"]) == [2]
    assert load(("Efficiency", {}))("x", [1]) == 1.0


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("tests.reward_faults.nothing", {}, "'tests.reward_faults' has no 'nothing'"),
        ("tests.reward_faults.VALUES", {}, "cannot be called"),
        ("tests.reward_faults.length", {"x": 1}, "not a class"),
        ("Lenght", {}, "'alignment.rewards' has no 'Lenght'"),
    ],
)
def test_what_cannot_be_loaded(path: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        load((path, arguments))


def test_seeding_leaves_nothing_behind() -> None:
    """torch queues a seed for each kind of device that it has not begun to use, without end."""
    queues = [torch.cuda._queued_calls, torch.xpu._queued_calls]
    before = [len(queue) for queue in queues]
    draws = []
    with torch.random.fork_rng(devices=[]):
        for keys in (["a"], ["b"], ["a"]):
            reseed(7, "reward", keys)
            draws.append((torch.rand(2).tolist(), np.random.random()))
    assert draws[0] == draws[2]
    assert draws[0] != draws[1]
    assert [len(queue) for queue in queues] == before
