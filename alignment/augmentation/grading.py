"""How hard each prompt is for a model: the success rate of its own answers, as a column of the data.

    success rate = sum of the reward over the answers that got a value / number of those answers

with one of the run's rewards, in [0, 1]. An answer whose reward abstains, of itself or by a fault, enters neither sum
nor number; a prompt none of whose answers has a value has no difficulty, and says so. Names of difficulty are parted by
falling rates, with the bounds by which training grades anew (`datamodules.difficulty.StrataConfig`): `easy` from 0.7
on, `hard` below 0.3.

Rows that ask the same and hold the same for the rewards are graded once. Answers are keyed by (seed, the first of these
rows, number of the answer).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.progress import track

from alignment.augmentation.generation import AT_ONCE, Generator
from alignment.augmentation.journal import Graded, Journal
from alignment.augmentation.rows import ATTACK, AUGMENTED, EXPANSION, SOURCE_ROW, Entry, Rows
from alignment.batches import Group
from alignment.chat import TemplateRefused
from alignment.errors import UserError
from alignment.prompting import DIFFICULTY
from alignment.ready import Ready
from alignment.rewards import RewardSuite, Texts
from alignment.rewards.specs import AnySpec, to_spec
from alignment.rollout import SamplingConfig
from alignment.settings import plain
from datamodules.difficulty import StrataConfig

SUCCESS_RATE, TRIALS = "success_rate", "success_trials"
_STRATA = StrataConfig()
_TOLERANCE = 1e-6  # rewards are float32: 1 + 1e-7 is a rate of 1
_MARKS = (AUGMENTED, ATTACK, EXPANSION, SOURCE_ROW, SUCCESS_RATE, TRIALS)
"""Columns that make no other task of a row."""


@dataclass(frozen=True, kw_only=True)
class GradingConfig:
    """How success is measured, and how it is written.

    Args:
        samples: answers to each prompt.
        success: the reward that measures it. None: the first one.
        difficulty: `name`, the name of the stratum (easy, medium, hard), or `number`, 1 - success rate, which
            PromptData parts into strata of equal size or by `data.strata.bounds`.
        rates: falling success rates that part the names.
        column: where the difficulty is written.
        max_prompt_tokens: longer prompts are cut on the left, as in training.
        seed: of the answers.
    """

    samples: int = 8
    success: str | None = None
    difficulty: Literal["name", "number"] = "name"
    rates: Sequence[float] = field(default_factory=lambda: list(_STRATA.rates))
    column: str = DIFFICULTY
    max_prompt_tokens: int | None = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"--samples is {self.samples}; at least 1 answer is needed")
        if self.difficulty not in ("name", "number"):
            raise UserError(f"--difficulty is '{self.difficulty}'; use name or number")
        if len(self.rates) != len(_STRATA.names) - 1 or not all(0 < rate < 1 for rate in self.rates):
            raise UserError(f"--rates is {list(self.rates)}; give {len(_STRATA.names) - 1} rates between 0 and 1")
        if not all(a > b for a, b in pairwise(self.rates)):
            raise UserError(f"--rates must fall, as {_STRATA.rates} do; got {list(self.rates)}")
        if self.column in (SUCCESS_RATE, TRIALS):
            raise UserError(f"--column is '{self.column}', which is written anyway; choose another name")

    def name_of(self, rate: float) -> str:
        """The stratum of a success rate: a bound itself belongs to the easier one."""
        return _STRATA.names[sum(rate < bound for bound in self.rates)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedRows:
    """What came of it.

    Args:
        rows: the rows with success rate, number of answers with a value, and difficulty.
        counts: prompts, answers, abstentions and faults; exact. rates: mean success rate.
        notes: what training with the difficulties needs to know.
    """

    rows: list[dict[str, Any]]
    counts: dict[str, int]
    rates: dict[str, float]
    notes: list[str]


class _Groups(NamedTuple):
    """The prompts that a model can be asked, and how many it cannot, by reason."""

    groups: list[Group]
    refused: Counter[str]


class Grader:
    """Grades the prompts of a file.

    Args:
        rows: the file. config: see there.
        rewards: the rewards of a run; those that do not measure success are asked only where success is conditioned on
            them. sampling: how answers are drawn. scoring: see `alignment.rewards.SuiteConfig`.

    Raises UserError for rewards that cannot measure success, and for a column that the file has of its own.
    """

    def __init__(
        self,
        rows: Rows,
        config: GradingConfig,
        rewards: Mapping[str, AnySpec],
        sampling: SamplingConfig,
        scoring: Mapping[str, Any] | None = None,
    ) -> None:
        self._rows, self._config, self._sampling = rows, config, sampling
        graded = TRIALS in rows.keys
        if config.column in rows.keys and not graded:
            raise UserError(
                f"'{rows.path}' has a column '{config.column}' of its own; write the difficulty to another with "
                "--column NAME (training then reads it with --data.strata.column NAME)"
            )
        if SUCCESS_RATE in rows.keys and not graded:
            raise UserError(f"'{rows.path}' has a column '{SUCCESS_RATE}' of its own; rename it")
        self._suite = RewardSuite(_needed(rewards, config.success), scoring, seed=config.seed)
        self._success = config.success or self._suite.names[0]
        if self._suite.specs[self._success].scale == "running":
            raise UserError(
                f"reward '{self._success}' has scale running, so a value would depend on the prompts graded before; "
                "give fixed bounds, scale: [low, high]"
            )
        if sampling.greedy and config.samples > 1:
            raise UserError(
                f"sampling.temperature is 0, so all {config.samples} answers are the same; give --samples 1, or a "
                "temperature above 0"
            )
        self._tasks = _tasks(rows, {*_MARKS, config.column} if graded else set(_MARKS))

    def identity(self, loaded: Ready) -> dict[str, Any]:
        """Everything that the grades depend on."""
        return {
            "file": self._rows.sha256,
            "format": str(self._rows.format),
            "rows": self._rows.report.read,
            "model": loaded.digest(),
            "rewards": {name: _as_json(plain(spec)) for name, spec in self._suite.specs.items()},
            "success": self._success,
            "sampling": asdict(self._sampling),
            "samples": self._config.samples,
            "max_prompt_tokens": self._config.max_prompt_tokens,
            "seed": self._config.seed,
        }

    def check_columns(self) -> None:
        """Raise UserError where a reward needs a column that no row has. Before a model is loaded."""
        self._suite.check_columns(entry.row.columns for entry in self._rows.entries)

    def grade(self, loaded: Ready, journal: Path, *, quiet: bool = True) -> tuple[GradedRows, Journal]:
        """Sample, score and write down. The journal is handed back; close it once the rows are safe.

        Args:
            journal: file that a grading under way keeps its results in, and goes on from.
            quiet: show no progress.

        Raises UserError for a value outside [0, 1], rewards that fail too often, and where no prompt could be graded.
        """
        noted = Journal(journal, self.identity(loaded))
        generator = Generator(loaded, self._config.max_prompt_tokens)
        found = self._groups(generator)
        todo = [group for group in found.groups if group.index not in noted.grades]
        parts = [todo[first : first + AT_ONCE] for first in range(0, len(todo), AT_ONCE)]
        with self._suite:
            for part in track(parts, description="grading", disable=quiet, transient=True):
                noted.add(*self._grades(generator, part))
        return self._result(noted, found, resumed=len(found.groups) - len(todo)), noted

    # ------------------------------------------------------------------ parts

    def _groups(self, generator: Generator) -> _Groups:
        groups: list[Group] = []
        refused: Counter[str] = Counter()
        for entries in self._tasks:
            entry = entries[0]
            try:
                group = generator.prompt(entry.number, entry.row.prompt, raw=entry.row.raw, columns=entry.row.columns)
            except TemplateRefused:
                refused["prompts that the chat template refuses"] += 1
                continue
            if generator.fits(group, self._sampling):
                groups.append(group)
            else:
                refused["prompts too long for the model"] += 1
        return _Groups(groups=groups, refused=refused)

    def _grades(self, generator: Generator, part: Sequence[Group]) -> tuple[dict[int, Graded], int]:
        """Sample and score the answers to some prompts: (their grades, values lost to faults)."""
        count = self._config.samples
        rollout = generator.sample(part, count, self._sampling, seed=self._config.seed)
        matrix = self._suite.score(rollout, Texts.decode(rollout.batch, generator.tokenizer))
        place = matrix.names.index(self._success)
        values = matrix.values[:, place].double().reshape(len(part), count)
        self._check_range(values)
        valid = ~values.isnan()
        sums = torch.where(valid, values.clamp(0.0, 1.0), torch.zeros_like(values)).sum(dim=1)
        grades = {
            group.index: Graded(round(total, 9), trials)
            for group, total, trials in zip(part, sums.tolist(), valid.sum(dim=1).tolist(), strict=True)
        }
        return grades, matrix.faults[self._success].total()

    def _check_range(self, values: torch.Tensor) -> None:
        known = values[~values.isnan()]
        wrong = known[(known < -_TOLERANCE) | (known > 1 + _TOLERANCE)]
        if len(wrong):
            raise UserError(
                f"reward '{self._success}' gave {wrong[0].item():g}; success lies in [0, 1]: give it a scale, for "
                f"example --rewards.{self._success}.scale '[0, 10]'"
            )

    def _result(self, noted: Journal, found: _Groups, *, resumed: int) -> GradedRows:
        rates: dict[int, float] = {
            number: round(grade.success / grade.trials, 6) for number, grade in noted.grades.items() if grade.trials
        }
        if not rates:
            raise UserError(
                f"no prompt of '{self._rows.path}' could be graded: reward '{self._success}' gave no value "
                f"({noted.faults} faults), and {found.refused.total()} prompts were not asked"
            )
        written: dict[int, dict[str, Any]] = {}
        names: Counter[str] = Counter()
        for entries in self._tasks:
            number = entries[0].number
            rate = rates.get(number)
            trials = noted.grades[number].trials if number in noted.grades else 0
            names["" if rate is None else self._config.name_of(rate)] += len(entries)
            for entry in entries:
                marks = {SUCCESS_RATE: rate, TRIALS: trials, self._config.column: self._difficulty(rate)}
                written[entry.number] = dict(entry.values) | marks
        return GradedRows(
            rows=[written[entry.number] for entry in self._rows.entries],
            counts=self._counts(noted, found, resumed, names),
            rates={"mean success rate": sum(rates.values()) / len(rates)},
            notes=self._notes(names),
        )

    def _difficulty(self, rate: float | None) -> str | float | None:
        if rate is None:
            return None
        return self._config.name_of(rate) if self._config.difficulty == "name" else round(1 - rate, 6)

    def _counts(self, noted: Journal, found: _Groups, resumed: int, names: Counter[str]) -> dict[str, int]:
        answers = len(noted.grades) * self._config.samples
        valued = sum(grade.trials for grade in noted.grades.values())
        counts = {
            "prompts graded": len(noted.grades),
            "of them by an earlier start": resumed,
            **found.refused,
            "answers": answers,
            "answers with a value": valued,
            "answers abstained from": answers - valued - noted.faults,
            "answers lost to faults": noted.faults,
        }
        counts |= {f"rows {name}": names[name] for name in _STRATA.names}
        return counts | {"rows without a difficulty": names[""]}

    def _notes(self, names: Counter[str]) -> list[str]:
        notes = []
        empty = [name for name in _STRATA.names if not names[name]]
        if empty and self._config.difficulty == "name":
            notes.append(
                f"no row is {' or '.join(empty)}: training mixes all three, so give --data.strata.ratio with "
                f"{', '.join(f'{name}: 0' for name in empty)}, or grade with --difficulty number, which makes three "
                "strata of equal size"
            )
        if names[""]:
            notes.append(f"{names['']} rows have no difficulty; PromptData leaves them out, and counts them")
        return notes


def _needed(rewards: Mapping[str, AnySpec], success: str | None) -> dict[str, AnySpec]:
    """The reward that measures success, and those that it is conditioned on. Raises UserError where there is none."""
    if not rewards:
        raise UserError("grading needs a reward: --rewards '{right: ExactMatch}', or -c with a run's configuration")
    name: str | None = success or next(iter(rewards))
    found: dict[str, AnySpec] = {}
    while name is not None and name not in found:
        if name not in rewards:
            known = ", ".join(rewards)
            what = f"--success names '{name}'" if name == success else f"a condition names '{name}'"
            raise UserError(f"{what}, which is no reward; there are {known}")
        spec = to_spec(rewards[name])
        found[name] = spec
        name = None if spec.condition is None else spec.condition.reward
    return found


def _tasks(rows: Rows, ours: Collection[str]) -> list[list[Entry]]:
    """The rows that ask the same and hold the same but for `ours`, in the order of the first of each."""
    found: dict[str, list[Entry]] = {}
    for entry in rows.entries:
        prompt = entry.row.prompt
        said = prompt if isinstance(prompt, str) else [(message.role, message.content) for message in prompt]
        columns = {name: value for name, value in entry.row.columns.items() if name not in ours}
        key = json.dumps([said, columns], sort_keys=True, default=str)
        found.setdefault(key, []).append(entry)
    return list(found.values())


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
