"""The tasks that methods are compared on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.multi_reward import support, triconflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Args:
    config: name of the YAML file beside this one that every method shares; `config`_sft is that of the base model.
    files: what the working folder of a run needs, made by `prepare` in the current folder.
    stride: optimizer steps between two evaluations.
    low, high: name of a reward -> the mean that counts as 0 and as 1.
    """

    config: str
    files: tuple[str, ...]
    prepare: Callable[[], None]
    stride: int
    low: Mapping[str, float]
    high: Mapping[str, float]

    @property
    def rewards(self) -> tuple[str, ...]:
        return tuple(self.low)

    @property
    def yaml(self) -> Path:
        return Path(__file__).with_name(f"{self.config}.yaml")

    def normalised(self, name: str, value: float) -> float:
        """A mean reward on the scale from 0 to 1."""
        return min(1.0, max(0.0, (value - self.low[name]) / (self.high[name] - self.low[name])))


_TRICONFLICT = Task(
    config="triconflict",
    files=("base", "rl.jsonl", "held_out.jsonl", "seen.jsonl"),
    prepare=triconflict.prepare,
    stride=20,
    low=triconflict.LOW,
    high=triconflict.HIGH,
)
TASKS = {
    "triconflict": _TRICONFLICT,
    "triconflict-long": replace(_TRICONFLICT, files=("base", "rl.jsonl", "held_out_long.jsonl")),
    "support": Task(
        config="support",
        files=("base", "seen.jsonl"),
        prepare=support.prepare,
        stride=10,
        low=support.LOW,
        high=support.HIGH,
    ),
}
