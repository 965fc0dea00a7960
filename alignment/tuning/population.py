"""Population-based training: Jaderberg et al. 2017, arXiv 1711.09846.

Several runs train side by side. After every `interval` batches each is validated; the worst quarter continues from the
checkpoint of one of the best quarter, with that one's values, each times 0.8 or 1.25 (choices: one step along the
list). So values move while the best run trains. The learning rate is constant between two moves: a schedule over a
run's length would have none.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.tuning.plan import Plan, wanted
from alignment.tuning.process import RunFailed
from alignment.tuning.space import Dimension, Range, Space, Value
from alignment.whole_file import write_whole

FACTORS = (0.8, 1.25)
SHARE = 0.25
"""Of the population that is replaced, and that it is replaced by."""
STATE = "population.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run of the population.

    Args:
        values: in force. score: at the last validation, None before it or where the run failed.
        checkpoint: folder of its state. history: (values, score) of each part it went through, its ancestors' included.
    """

    values: Mapping[str, Value]
    score: float | None = None
    checkpoint: str | None = None
    history: Sequence[Mapping[str, Any]] = field(default_factory=list)


def first(plan: Plan, size: int) -> list[Member]:
    """Values drawn from the space."""
    sources = [random.Random(f"{plan.seed} {number}") for number in range(size)]
    return [Member(values={key: d.draw(source) for key, d in plan.space.items()}) for source in sources]


def explore(values: Mapping[str, Value], space: Space, source: random.Random) -> dict[str, Value]:
    """Every value moved a little, within its dimension."""
    return {key: _moved(values[key], dimension, source) for key, dimension in space.items()}


def _moved(value: Value, dimension: Dimension, source: random.Random) -> Value:
    if isinstance(dimension, Range):
        return dimension.within(value * source.choice(FACTORS))
    place = dimension.values.index(value) + source.choice((-1, 1))
    return dimension.values[min(max(place, 0), len(dimension.values) - 1)]


def select(members: Sequence[Member], space: Space, mode: str, source: random.Random) -> list[Member]:
    """The next generation, in the same places: the worst quarter replaced. Failed runs are worse than all others."""
    worst = -math.inf if mode == "max" else math.inf
    order = sorted(
        range(len(members)),
        key=lambda i: worst if (score := members[i].score) is None else score,
        reverse=mode == "max",
    )
    count = max(1, round(SHARE * len(members)))
    best = [i for i in order[:count] if members[i].score is not None]
    if not best:
        raise RunFailed("every run of the population failed")
    replaced = {*order[-count:], *(i for i, member in enumerate(members) if member.score is None)} - set(best)
    found = list(members)
    for i in sorted(replaced):
        parent = members[source.choice(best)]
        found[i] = replace(parent, values=explore(parent.values, space, source), score=None)
    return found


def evolve(
    plan: Plan, *, size: int, rounds: int, interval: int, jobs: int, parent: str | None, tell: Callable[[str], None]
) -> list[Member]:
    """Train the population for `rounds` parts of `interval` batches, from where it was left. Returns it, best first.

    Raises UserError for an objective that is not logged, RunFailed where every run failed, Stopped when asked to end;
    what was finished is kept.
    """
    ((metric, mode),) = plan.objectives.items()
    state = plan.folder / STATE
    number, members = _load(state, plan, size, interval) if state.exists() else (0, first(plan, size))
    while number < rounds:
        if number:
            members = select(members, plan.space, mode, random.Random(f"{plan.seed} round {number}"))

        def train(i: int, number: int = number, members: Sequence[Member] = tuple(members)) -> Member:
            return _part(plan, members[i], f"{plan.name}-{i}-{number}", number, interval, metric, parent, tell)

        with ThreadPoolExecutor(jobs) as pool:
            members = list(pool.map(train, range(size)))
        number += 1
        _save(state, plan, interval, number, members)
        scores = [member.score for member in members if member.score is not None]
        if not scores:
            raise RunFailed(f"every run of the population failed; what they said is in {plan.folder / 'logs'}")
        tell(f"round {number} of {rounds}: best {metric} {max(scores) if mode == 'max' else min(scores):.4g}")
    alive = [member for member in members if member.score is not None]
    return sorted(alive, key=lambda member: member.score or 0.0, reverse=mode == "max")


def _part(
    plan: Plan, member: Member, name: str, number: int, interval: int, metric: str, parent: str | None,
    tell: Callable[[str], None],
) -> Member:  # fmt: skip
    """The member after one more part."""
    more = [
        f"--trainer.limit_train_batches={interval}",
        f"--trainer.max_epochs={number + 1}",
        "--trainer.max_steps=-1",
        "--trainer.check_val_every_n_epoch=1",
        "--model.optim.schedule=constant",
    ]
    if member.checkpoint is not None:
        more.append(f"--ckpt_path={member.checkpoint}")
    process = plan.process(name, member.values, parent, *more)
    last: dict[str, float] = {}
    try:
        for _, row in process.rows():
            last |= row
        (score,) = wanted(last, plan.objectives, name)
        checkpoint = str(process.checkpoint())
    except RunFailed as error:
        tell(f"{name} failed: {error}")
        return replace(member, score=None)
    if not math.isfinite(score):
        tell(f"{name} diverged: {metric} {score}")
        return replace(member, score=None)
    part = {"values": dict(member.values), "score": score}
    return replace(member, score=score, checkpoint=checkpoint, history=[*member.history, part])


def _save(path: Path, plan: Plan, interval: int, number: int, members: Sequence[Member]) -> None:
    """A study that is killed goes on from the last whole round."""
    text = json.dumps({**_kind(plan, interval), "round": number, "members": [asdict(m) for m in members]}, indent=1)
    write_whole(path, text.encode("utf-8"))


def _kind(plan: Plan, interval: int) -> dict[str, Any]:
    return {"objectives": dict(plan.objectives), "keys": sorted(plan.space), "interval": interval}


def _load(path: Path, plan: Plan, size: int, interval: int) -> tuple[int, list[Member]]:
    saved = json.loads(path.read_text(encoding="utf-8"))
    members = [Member(**values) for values in saved["members"]]
    if len(members) != size or any(saved[key] != value for key, value in _kind(plan, interval).items()):
        raise UserError(f"{path} is of another population; give another --name or --out, or the settings it has")
    return saved["round"], members
