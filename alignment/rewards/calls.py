"""Calling a reward and judging what it returns. Runs inside reward workers, so it imports nothing heavy.

Whatever a reward does, each completion gets an `Outcome`; nothing is broadcast, coerced from text or replaced by 0.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import numbers
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, SupportsFloat, cast, runtime_checkable

from alignment.errors import UserError
from alignment.rewards.protocol import FaultKind, Outcome

LARGEST = 3.4028234663852886e38  # of float32, in which advantages are computed
MESSAGE = 300  # characters kept of an error's text

SHARED = ("prompt_ids", "completion_ids", "truncated", "columns")
BATCH = ("prompts", "completions", *SHARED)
SINGLE = ("prompt", "completion", *SHARED)

Source = tuple[str, Mapping[str, Any]]
"""Import path, and what a class found there is constructed with."""
Function = Callable[..., Any]


class Wanted(NamedTuple):
    """The names of what a reward takes; `optional` ones are left out where they are not known. `columns` are the data
    columns in its attribute `needs_columns`."""

    per_sample: bool
    names: tuple[str, ...]
    optional: tuple[str, ...]
    columns: tuple[str, ...]


@runtime_checkable
class _Array(Protocol):
    """Arrays and tensors of any library."""

    def tolist(self) -> Any: ...


# ------------------------------------------------------------------------------------------------------------ loading


def load(source: Source) -> Function:
    """Import, and construct if it is a class. Raises UserError for what does not exist or does not fit; whatever the
    user's own code raises passes through."""
    path, arguments = source
    module_name, _, attribute = (path if "." in path else f"alignment.rewards.{path}").rpartition(".")
    module = importlib.import_module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        raise UserError(f"'{module_name}' has no '{attribute}'")
    if isinstance(found, type):
        check_arguments(found, arguments)
        found = found(**arguments)
    elif arguments:
        raise UserError(f"'{path}' is not a class, so it takes no args")
    if not callable(found):
        raise UserError(f"'{path}' cannot be called")
    return cast(Function, found)


def check_arguments(cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for arguments that a class cannot be constructed with."""
    try:
        signature = inspect.signature(cls)
    except ValueError:  # of a compiled class
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = ", ".join(p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD) or "none"
        raise UserError(f"args: {error}; {cls.__name__} takes {known}") from error


def wanted(reward: Function) -> Wanted:
    """What the parameters of `reward` ask for. Raises UserError for a signature that cannot be served."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"its parameters cannot be read: {error}") from error
    named = check_parameters(parameters, inspect.iscoroutinefunction(reward))
    names = {p.name for p in named}
    fields = SINGLE if "completion" in names else BATCH
    rest = [f for f in fields if f not in names] if any(p.kind is p.VAR_KEYWORD for p in parameters) else []
    optional = [p.name for p in named if p.default is not p.empty] + rest
    columns = tuple(getattr(reward, "needs_columns", ()))
    return Wanted("completion" in names, tuple([p.name for p in named] + rest), tuple(optional), columns)


def check_parameters(parameters: Sequence[inspect.Parameter], is_coroutine: bool) -> list[inspect.Parameter]:
    """Those that are given by name. Raises UserError for a signature that cannot be served."""
    if is_coroutine:
        raise UserError("it is a coroutine function; a reward is an ordinary one (use asyncio.run inside)")
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise UserError("it has positional-only parameters; a reward is called by name")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = {p.name for p in named}
    if ("completion" in names) == ("completions" in names):
        raise UserError(
            "it must have a parameter `completions` (a list, to score all at once) or `completion` (one at a time), "
            f"and has ({', '.join(p.name for p in parameters)})"
        )
    return named


# ------------------------------------------------------------------------------------------------------------ calling


def own(arguments: Mapping[str, Sequence[Any]], part: slice) -> dict[str, list[Any]]:
    """Copies of these completions' arguments: a reward may change what it is given, and the completions of a prompt
    share its ids and its row, as other rewards and the data do."""
    return {name: [_copied(value) for value in values[part]] for name, values in arguments.items()}


def _copied(value: Any) -> Any:
    """Lists and mappings anew; objects that rows hold besides may be such that cannot be copied."""
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def single(arguments: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
    """What a reward of single completions is given for completion i."""
    return {name: values[0] for name, values in own(arguments, slice(i, i + 1)).items()}


def reseed(seed: int, name: str, keys: Sequence[str]) -> None:
    """Seed global generators from what is scored: draws are the same on any worker and after a resume."""
    text = "\x1f".join([str(seed), name, *keys]).encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        # Not torch.manual_seed: without a device it leaves a call and a formatted stack behind for each kind of them,
        # a millisecond for every completion, and they add up.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)


def call_batch(
    reward: Function, arguments: Mapping[str, Sequence[Any]], size: int, *, in_worker: bool
) -> list[Outcome]:
    """`size` outcomes of one call with lists. In the training process some exceptions pass through: see `_passes`."""
    try:
        values = _listed(reward(**arguments))
        if (count := len(values)) != size:
            return [Outcome(None, "length", f"returned {count} value{'s' * (count != 1)}, expected {size}")] * size
        return [judge(value) for value in values]
    except _WrongType as wrong:
        return [Outcome(None, "type", str(wrong))] * size
    except BaseException as error:  # sys.exit in a reward must not end the run
        if _passes(error, in_worker):
            raise
        return [fault(error)] * size


def call_one(reward: Function, arguments: Mapping[str, Any], *, in_worker: bool) -> Outcome:
    """The outcome of one call for one completion."""
    try:
        return judge(reward(**arguments))
    except BaseException as error:
        if _passes(error, in_worker):
            raise
        return fault(error)


def _passes(error: BaseException, in_worker: bool) -> bool:
    """Whether an exception is not the reward's to answer for: in the training process Ctrl-C and a signal's exit, which
    come to whatever code is running. An exit with status 0 is no signal's."""
    harmless_exit = isinstance(error, SystemExit) and not error.code
    return not (in_worker or isinstance(error, Exception) or harmless_exit)


class _WrongType(Exception):
    pass


def _listed(values: object) -> list[Any]:
    """A list from what a batch reward may return: a list, a tuple, or a one-dimensional array of any library."""
    if isinstance(values, list | tuple):
        return list(values)
    if isinstance(values, _Array) and not isinstance(values, type):
        listed = values.tolist()
        if isinstance(listed, list):
            return listed
    raise _WrongType(f"returned a {type(values).__name__}, expected a list with one value per completion")


def judge(value: object) -> Outcome:
    """A number, None, or a fault. Booleans and scalars of numpy and torch are numbers; text never is. An exception in
    the place of a value is a fault of that completion alone: how a reward of whole batches says that one has failed."""
    if value is None:
        return Outcome(None)
    if isinstance(value, BaseException):
        return fault(value)
    try:
        unreal = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
        if unreal or not isinstance(value, SupportsFloat):
            return Outcome(None, "type", f"gave a {type(value).__name__}, expected a number or None")
        number = float(value)
    except OverflowError:
        return Outcome(None, "inf", "gave a number beyond float64")
    except Exception as error:  # __float__ is the user's code too
        return Outcome(None, "type", f"gave a {type(value).__name__} that is no number: {describe(error)}")
    if math.isnan(number):
        return Outcome(None, "nan", "gave NaN")
    if abs(number) > LARGEST:
        return Outcome(None, "inf", f"gave {number}, beyond float32")
    return Outcome(number)


def fault(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    kind: FaultKind = "raise"
    if isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, SystemExit):
        kind = "exit"
    return Outcome(None, kind, describe(error))


def describe(error: BaseException) -> str:
    """Type, text and place of an exception in one short line, whatever its `__str__` does."""
    try:
        text = " ".join(str(error)[: 4 * MESSAGE].split())[:MESSAGE]
    except Exception:  # an exception whose own text raises is still reported
        text = "(its text cannot be read)"
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}{place}"
