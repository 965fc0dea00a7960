"""What an evaluation task gets and gives."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from alignment.errors import UserError
from alignment.runs import named_checkpoint

if TYPE_CHECKING:
    from alignment.logprobs import LogProbEngine
    from alignment.ready import Ready
    from alignment.rewards.model import SequenceClassifier

Z = 1.959964
"""Quantile of the normal distribution for 95 % intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a task found.

    Args:
        metrics: name -> value. intervals: name -> 95 % interval, of those that have one.
        table: rows for people, all with the same keys.
    """

    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    table: Sequence[Mapping[str, Any]] = ()


class Task(Protocol):
    """A measurement. Its settings are what its class is constructed with."""

    def run(self, subject: Subject) -> Result:
        """Measure. Raises UserError for rows that do not fit."""
        ...


class Subject:
    """The model that is measured, loaded when it is first asked for.

    Args:
        name: any name of a model (`alignment.ready.ready`), also a reward model.
        root: folder of `runs`. device: null: cuda where there is one. seed: of what is sampled.
    """

    def __init__(self, name: str, *, root: Path = Path("."), device: str | None = None, seed: int = 0) -> None:
        self.name, self.root, self.device, self.seed = name, root, device, seed
        checkpoint = named_checkpoint(name, root, {}) if name in ("last", "best") else Path(name)
        self._place = str(checkpoint) if name in ("last", "best") else name
        inside = checkpoint.parent.name == "checkpoints"
        self.run = checkpoint.parents[1] if inside else checkpoint if (checkpoint / "run.json").is_file() else None

    @cached_property
    def policy(self) -> Ready:
        """The model with its tokenizer. Raises UserError for a reward model."""
        from alignment.ready import ready

        if self.is_reward_model:
            raise UserError(f"'{self.name}' is a reward model; this task needs a policy")
        return ready(self._place, self.root, device=self.device)

    @cached_property
    def engine(self) -> LogProbEngine:
        """Log-probs of the policy."""
        from alignment.logprobs import LogProbEngine

        pad = self.policy.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer makes sure of a padding token"
        engine = LogProbEngine(self.policy.model, pad_id=pad)
        engine.verify()
        return engine

    @property
    def _is_checkpoint(self) -> bool:
        return any((Path(self._place) / mark).exists() for mark in ("manifest.json", "checkpoints"))

    @cached_property
    def is_reward_model(self) -> bool:
        """Whether it scores and does not write."""
        if self._is_checkpoint:
            from alignment.reward_export import is_reward_model

            return is_reward_model(Path(self._place))
        config = Path(self._place) / "config.json"
        if not config.is_file():
            return False
        kinds = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
        return any(kind.endswith("ForSequenceClassification") for kind in kinds)

    @cached_property
    def reward_model(self) -> SequenceClassifier:
        """Scores of prompts with completions; a mean of members where it is an ensemble."""
        from alignment.reward_export import export_reward

        if not self._is_checkpoint:
            return _classifier(Path(self._place), self.device)
        with tempfile.TemporaryDirectory() as folder:
            return _classifier(export_reward(Path(self._place), Path(folder) / "model"), self.device)


def _classifier(folder: Path, device: str | None) -> SequenceClassifier:
    from alignment.rewards.model import SequenceClassifier

    outputs = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("id2label") or {}
    return SequenceClassifier(str(folder), label="members" if len(outputs) > 1 else None, device=device)


# ------------------------------------------------------------------------------------------------- numbers


def share_interval(hits: float, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927). Ties may count as half a hit."""
    if not count:
        return math.nan, math.nan
    p, z2 = hits / count, Z * Z
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = Z * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return middle - half, middle + half


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean, by the normal approximation; NaN of a single value."""
    if len(values) < 2:
        return math.nan, math.nan
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return mean - Z * error, mean + Z * error


def by_category(
    hits: Sequence[float], categories: Sequence[str | None]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Accuracy of each category as metrics `<category>/accuracy` with their plain mean `categories/accuracy`, and as a
    table. Nothing where no row has a category."""
    groups: dict[str, list[float]] = {}
    for hit, category in zip(hits, categories, strict=True):
        if category is not None:
            groups.setdefault(category, []).append(hit)
    if not groups:
        return {}, []
    means = {name: sum(values) / len(values) for name, values in sorted(groups.items())}
    table = [
        {"category": name, "rows": len(groups[name]), "accuracy": round(mean, 4),
         "interval": "{:.3f} to {:.3f}".format(*share_interval(sum(groups[name]), len(groups[name])))}
        for name, mean in means.items()
    ]  # fmt: skip
    metrics = {f"{name}/accuracy": mean for name, mean in means.items()}
    return {**metrics, "categories/accuracy": sum(means.values()) / len(means)}, table
