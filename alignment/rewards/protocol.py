"""What a reward is, and how a run describes the ones it uses. Imports no torch: reward workers start from here.

A reward is a callable, or a class whose instances are. The names of its parameters say what it wants:

    completions   all at once: prompts, completions: list[str]; prompt_ids, completion_ids: list[list[int]];
                  truncated: list[bool]; columns: list[Mapping[str, Any]]; returns one value per completion
    completion    one at a time: prompt, completion: str; prompt_ids, completion_ids: list[int]; truncated: bool;
                  columns: Mapping[str, Any]; returns one value

Any other parameter is the data column of that name, a list of its values or one value (None where a row has none);
`**kwargs` receives what is listed above and not named. What a reward looks up in `columns` it lists in its attribute
`needs_columns` (of a function too), so that a column that no row has is an error before the first call, not a fault of
every row. A value is a number, or None to abstain: None enters no mean, no standard deviation and no sum. A reward of
whole batches that fails for one completion puts the exception in the place of its value: a fault of that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from alignment.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from alignment.batches import GroupBatch

FaultKind = Literal["raise", "exit", "timeout", "crash", "memory", "length", "type", "nan", "inf", "load"]
"""How a reward can fail to give a value: it raised, called sys.exit, took longer than its deadline, ended its process,
needed more memory than allowed, returned a list of another length, something that is no number, NaN, or a number beyond
float32; or it could not be loaded again after its worker was restarted."""


class Reward(Protocol):
    """The full form for whole batches. A reward may leave out any parameter but `completions`; see the module."""

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        truncated: list[bool],
        columns: list[Mapping[str, Any]],
    ) -> Sequence[float | Exception | None]: ...


_BY_ZERO = ("ZeroDivisionError", "DivisionByZero", "DivisionUndefined", "division by zero", "divide by zero")
"""How exceptions of Python, `decimal` and numpy say so, and those that were raised from one and repeat it."""


class Outcome(NamedTuple):
    """What became of one completion under one reward: a value, a deliberate abstention (all None), or a fault."""

    value: float | None
    kind: FaultKind | None = None
    message: str = ""

    @property
    def no_number(self) -> bool:
        """Whether it is NaN, infinite, or what a division by zero raised."""
        return self.kind in ("nan", "inf") or (self.kind == "raise" and any(word in self.message for word in _BY_ZERO))


# ----------------------------------------------------------------------------------------------------- configuration


@dataclass(kw_only=True)
class Condition:
    """A reward that counts only where another one is good enough: r <- r * 1[other >= at_least], equation 8 of GDPO
    (arXiv 2601.05242). Where the other one abstains this one does too.

    Args:
        reward: name of the other reward; its value before scaling and before its own condition is compared.
        at_least: the threshold.
    """

    reward: str
    at_least: float


@dataclass(kw_only=True)
class RewardSpec:
    """One named reward of a run.

    Args:
        reward: import path of a callable or a class, `my_rewards.tone`; a name without a dot is one of
            `alignment.rewards`. In Python also the callable itself.
        args: what the class is constructed with.
        weight: factor of this reward in the total, or of its normalised advantage.
        scale: map values to [0, 1] before the condition: fixed bounds [low, high] (values outside are clipped), or
            `running`: the smallest and largest value seen so far, this batch included (0.5 while they are equal).
        condition: count the value only where another reward reaches a threshold; it is 0 elsewhere.
        timeout_s: seconds one call may take; then its worker is killed and the completions of that call abstain.
        batch_size: completions a worker gets at a time. Null: 8 for a reward of single completions; else all of them.
        in_process: call it in the training process when the values are collected: for model rewards, and for cheap code
            you trust. It then has no deadline, and a crash there ends the run; all else is supervised as usual.
    """

    reward: str | Callable[..., Any]
    args: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    scale: tuple[float, float] | Literal["running"] | None = None
    condition: Condition | None = None
    timeout_s: float = 30.0
    batch_size: int | None = None
    in_process: bool = False


@dataclass(kw_only=True)
class SuiteConfig:
    """How the rewards of a run are supervised.

    Args:
        workers: processes that rewards run in, on each rank; each serves every reward and sees no GPU. Results do not
            depend on their number.
        memory_mb: MiB of private memory a worker may hold; a call that needs more fails with MemoryError.
        load_timeout_s: seconds a reward may take to be imported and constructed.
        fault_limit: the run stops when a reward fails to give a value for more than this share of the completions ...
        fault_window: ... of this many batches, once there were as many.
        on_fault: `abstain`: completions without a value abstain and are counted. `stop`: the first fault stops the run.
    """

    workers: int = 2
    memory_mb: int = 4096
    load_timeout_s: float = 120.0
    fault_limit: float = 0.2
    fault_window: int = 50
    on_fault: Literal["abstain", "stop"] = "abstain"


# -------------------------------------------------------------------------------------------------------------- input


class Texts(NamedTuple):
    """The text of a rollout's P prompts and N completions."""

    prompts: Sequence[str]
    completions: Sequence[str]

    @classmethod
    def decode(cls, batch: GroupBatch, tokenizer: PreTrainedTokenizerBase) -> Texts:
        """Prompts as the policy read them, special tokens included; completions without, so that an answer is its text
        alone."""
        prompts = _cut(batch.prompt_ids.tolist(), batch.prompt_lengths.tolist())
        completions = _cut(batch.completion_ids.tolist(), batch.completion_lengths.tolist())
        return cls(
            [cast(str, tokenizer.decode(ids)) for ids in prompts],
            [cast(str, tokenizer.decode(ids, skip_special_tokens=True)) for ids in completions],
        )


class SampledBatch(Protocol):
    """What is read of a rollout; `alignment.rollout.Rollout` is one."""

    @property
    def batch(self) -> GroupBatch: ...
    @property
    def truncated(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """N completions to score, each with its prompt. Lists are N long; ids and truncation are None where unknown.

    Raises ValueError when lists differ in length.
    """

    prompts: Sequence[str]
    completions: Sequence[str]
    prompt_ids: Sequence[Sequence[int]] | None = None
    completion_ids: Sequence[Sequence[int]] | None = None
    truncated: Sequence[bool] | None = None
    columns: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.completions)
        for name in ("prompts", "prompt_ids", "completion_ids", "truncated"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(f"{len(values)} {name} for {n} completions")
        if self.columns and len(self.columns) != n:
            raise ValueError(f"columns of {len(self.columns)} rows for {n} completions")

    def __len__(self) -> int:
        return len(self.completions)

    @classmethod
    def of(cls, rollout: SampledBatch, texts: Texts) -> Samples:
        """The completions of a rollout in its order, prompts and columns repeated for each of a group."""
        batch, groups = rollout.batch, rollout.batch.group_of.tolist()
        if len(texts.prompts) != batch.num_prompts or len(texts.completions) != batch.num_completions:
            raise ValueError(
                f"texts of {len(texts.prompts)} prompts and {len(texts.completions)} completions for a rollout with "
                f"{batch.num_prompts} and {batch.num_completions}"
            )
        prompt_ids = _cut(batch.prompt_ids.tolist(), batch.prompt_lengths.tolist())
        return cls(
            prompts=[texts.prompts[g] for g in groups],
            completions=list(texts.completions),
            prompt_ids=[prompt_ids[g] for g in groups],
            completion_ids=_cut(batch.completion_ids.tolist(), batch.completion_lengths.tolist()),
            truncated=rollout.truncated.tolist(),
            columns=[batch.columns[g] for g in groups] if batch.columns else [],
        )


def _cut(flat: list[int], lengths: list[int]) -> list[list[int]]:
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class RewardsFailing(UserError):
    """Rewards fail too often to go on. Says which, how, and what to do."""
