"""What goes wrong in a run, told from what it logs.

    examination = Examination()
    for step, values in rows:                    # each logged row, as alignment.diagnosis_source reads them
        for alarm in examination.add(step, values):
            print(alarm.line())
    print(examination.report("run 4f2a"))

Every `every` training rows the rules of `alignment.diagnosis_rules` are asked; they are pure functions of the series so
far (`alignment.diagnosis_series`). `callbacks.Doctor` does this while a run trains and `alignment doctor` from its log,
with the same result. Evidence that may come late is waited for: a rule whose metrics are missing, or have too few rows,
says so and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from alignment.diagnosis_known import Evidence, Known, Seen
from alignment.diagnosis_rules import RULES, Rule
from alignment.diagnosis_series import History
from alignment.errors import UserError

PREFIX = "doctor/"
"""Of the metric of each rule that has given an alarm: 1 while it sees its fault, 0 when it no longer does."""
SETS = ("val/", "test/")
"""Beginnings of the metrics of evaluations."""
IGNORED = (PREFIX, "event/", "nonfinite/", "lr-", "epoch", "system/", "strata/")
"""Beginnings of what is logged beside the metrics of training, and no rule reads."""
MEASURED = ("time/", "ranks/")
"""Beginnings of what the doctor measures itself, which may be logged at an epoch's end by itself."""


def trains(values: Mapping[str, float]) -> bool:
    """Whether a row is one of training: it has a metric that is neither of an evaluation nor beside it all."""
    return any(not name.startswith((*SETS, *IGNORED, *MEASURED)) for name in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A fault that a rule has seen.

    Args:
        rule: its name. about: the reward it is about, "" for the run.
        since: step at which it was seen first. until: step at which it was no longer seen; None: it still is.
        evidence: what was seen first.
    """

    rule: str
    about: str
    since: int
    until: int | None
    evidence: Seen

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.about

    @property
    def source(self) -> Rule:
        return next(rule for rule in RULES if rule.name == self.rule)

    @property
    def says(self) -> str:
        return self.source.says.replace("NAME", f"'{self.about}'")

    def line(self) -> str:
        """Fault, evidence, likely cause and the first setting, in one line."""
        rule, first = self.source, self.source.settings[0]
        seen = "; ".join(map(str, self.evidence))
        how = _named(first.how, self.about)
        return f"{rule.name}: {self.says}: {seen}. Likely: {rule.cause}. Change {first.key}: {how}"

    def block(self) -> list[str]:
        """The same in full."""
        rule = self.source
        to = "and still at the end" if self.until is None else f"to step {self.until}"
        lines = [f"{rule.name}, from step {self.since} {to}: {self.says}"]
        lines += [f"    evidence  {evidence}" for evidence in self.evidence]
        lines += [f"    likely    {rule.cause}"]
        lines += [f"    change    {s.key}: {_named(s.how, self.about)}" for s in rule.settings]
        return lines

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Alarm:
        """Inverse of `state_dict`."""
        return cls(**{**state, "evidence": tuple(Evidence(**evidence) for evidence in state["evidence"])})


def _named(text: str, about: str) -> str:
    return text.replace("NAME", about or "NAME")


def ask(rule: Rule, known: Known) -> tuple[Seen, tuple[str, ...]]:
    """(what the rule sees, nothing where it sees nothing; the metrics for want of which it was not asked)."""
    missing: tuple[str, ...] = ()
    for case in rule.cases:
        lacks = tuple(dict.fromkeys(name for signal in case for name in signal.lacks(known)))
        if lacks:
            missing = missing or lacks
            continue
        seen = []
        for signal in case:
            if not (found := signal(known)):
                return (), ()
            seen.append(found)
        return tuple(dict.fromkeys(evidence for found in seen for evidence in found)), ()
    return (), missing


class Examination:
    """Takes in the rows of a run one by one and keeps what was found.

    Args:
        every: training rows between two looks.
        held_out: metrics that should rise with the reward and that the policy is not trained on.
    """

    def __init__(self, every: int = 10, held_out: Sequence[str] = ()) -> None:
        if every < 1:
            raise UserError(f"the doctor's every is {every}; it is a number of rows, at least 1")
        self.every, self.held_out = every, tuple(held_out)
        self.history = History()
        self.alarms: list[Alarm] = []
        self.rows = 0
        self.first_step: int | None = None
        self.last_step = 0

    def add(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Take in a row; the alarms that begin with it."""
        kept = {name: value for name, value in values.items() if not name.startswith(IGNORED)}
        if not kept:
            return []
        self.history.add(step, kept)
        self.first_step = step if self.first_step is None else self.first_step
        self.last_step = max(self.last_step, step)
        if not trains(kept):
            return []
        self.rows += 1
        return self.look(step) if self.rows % self.every == 0 else []

    def look(self, step: int) -> list[Alarm]:
        """Ask every rule; the alarms that begin now. Those that are over get their end."""
        known = Known(self.history.series(), self.held_out)
        seen: dict[tuple[str, str], Seen] = {}
        for rule in RULES:
            for name in known.rewards if rule.each else ("",):
                if found := ask(rule, known.of(name))[0]:
                    seen[rule.name, name] = found
        now = {alarm.key for alarm in self.current}
        self.alarms = [
            alarm if alarm.until is not None or alarm.key in seen else _ended(alarm, step) for alarm in self.alarms
        ]
        begun = [
            Alarm(rule=rule, about=about, since=step, until=None, evidence=found)
            for (rule, about), found in seen.items()
            if (rule, about) not in now
        ]
        self.alarms += begun
        return begun

    def finish(self) -> list[Alarm]:
        """A last look, if rows have come since the one before; the alarms that begin with it."""
        return self.look(self.last_step) if self.rows % self.every else []

    @property
    def current(self) -> list[Alarm]:
        """Alarms that are not over."""
        return [alarm for alarm in self.alarms if alarm.until is None]

    # ------------------------------------------------------------------ what people read

    def report(self, title: str) -> str:
        """All alarms with evidence, cause and settings, and which rules saw nothing or could not be asked."""
        span = "no rows" if self.first_step is None else f"steps {self.first_step} to {self.last_step}"
        count = len(self.alarms)
        said = "no alarm" if not count else f"{count} alarm{'s' if count > 1 else ''}"
        lines = [f"{title}: {self.rows} training rows, {span}: {said}"]
        for alarm in sorted(self.alarms, key=lambda alarm: alarm.since):
            lines += ["", *alarm.block()]
        quiet, unasked = self._others()
        lines += ["", f"nothing seen: {', '.join(quiet) or 'none'}"]
        if unasked:
            lines += ["not asked, for want of", *(f"    {name:<24} {'; '.join(why)}" for name, why in unasked.items())]
        return "\n".join(lines) + "\n"

    def _others(self) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        """(rules that were asked and have given no alarm, name -> what the others lack)."""
        known, told = Known(self.history.series(), self.held_out), {alarm.rule for alarm in self.alarms}
        quiet, unasked = [], {}
        for rule in (rule for rule in RULES if rule.name not in told):
            names = known.rewards if rule.each else [""]
            missing = [ask(rule, known.of(name))[1] for name in names] or [("a reward",)]
            if () in missing:
                quiet.append(rule.name)
            else:
                unasked[rule.name] = missing[0]
        return quiet, unasked

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "alarms": [alarm.state_dict() for alarm in self.alarms],
            "rows": self.rows,
            "first_step": self.first_step,
            "last_step": self.last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self.alarms = [Alarm.of(alarm) for alarm in state["alarms"]]
        self.rows, self.first_step, self.last_step = state["rows"], state["first_step"], state["last_step"]


def _ended(alarm: Alarm, step: int) -> Alarm:
    return Alarm(rule=alarm.rule, about=alarm.about, since=alarm.since, until=step, evidence=alarm.evidence)
