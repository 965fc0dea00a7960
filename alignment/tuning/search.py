"""Optuna over `alignment fit`: one process a trial, a study in sqlite that goes on where it stopped."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from alignment.errors import UserError
from alignment.tuning.plan import MODES, Plan, wanted
from alignment.tuning.process import RunFailed, Stopped
from alignment.tuning.space import Dimension, Range, Space, Value

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

HEARTBEAT_SECONDS = 15
"""How often a running trial says that it is alive; one that was killed counts as failed after twice that."""
STARTUP_TRIALS = 5
"""Trials that are never pruned: of fewer a median says little."""
RUN = "run"


def optuna_module() -> Any:
    """Optuna, quiet. Raises UserError where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise UserError("alignment tune needs Optuna: pip install 'lightning-alignment[tune]'") from error
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(plan: Plan, *, prune: bool) -> Study:
    """The study of a plan, new or as it was left. Raises UserError where it was made for other objectives."""
    optuna = optuna_module()
    plan.folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{plan.folder / 'study.db'}", heartbeat_interval=HEARTBEAT_SECONDS,
        grace_period=2 * HEARTBEAT_SECONDS,
    )  # fmt: skip
    single = len(plan.objectives) == 1
    study: Study = optuna.create_study(
        study_name=plan.name,
        storage=storage,
        load_if_exists=True,
        directions=[MODES[mode] for mode in plan.objectives.values()],
        sampler=optuna.samplers.TPESampler(seed=plan.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS) if prune and single
        else optuna.pruners.NopPruner(),
    )  # fmt: skip
    before = study.user_attrs.get("objectives")
    if before is not None and before != dict(plan.objectives):
        raise UserError(f"study '{plan.name}' in {plan.folder} is for {before}; give another --name or --out")
    study.set_user_attr("objectives", dict(plan.objectives))
    return study


def suggest(trial: Trial, space: Space) -> dict[str, Value]:
    """Values for a trial."""
    return {key: _suggest(trial, key, dimension) for key, dimension in space.items()}


def _suggest(trial: Trial, key: str, dimension: Dimension) -> Value:
    if not isinstance(dimension, Range):
        return trial.suggest_categorical(key, dimension.values)
    if dimension.whole:
        return trial.suggest_int(key, int(dimension.low), int(dimension.high), log=dimension.log)
    return trial.suggest_float(key, dimension.low, dimension.high, log=dimension.log)


def done(study: Study) -> int:
    """Trials that count: finished or pruned."""
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)


def search(
    plan: Plan, study: Study, *, trials: int, jobs: int, parent: str | None, tell: Callable[[str], None]
) -> None:
    """Run trials until `trials` of the study count, `jobs` at a time.

    Trials that fail count towards a limit of their own: as many as were asked for. Raises UserError where none of the
    first ones went well, with what the last one said, and for an objective that is not logged.
    """
    optuna = optuna_module()
    mistakes: list[UserError] = []
    (metric,) = plan.objectives if len(plan.objectives) == 1 else (None,)

    def objective(trial: Trial) -> tuple[float, ...]:
        values = suggest(trial, plan.space)
        name = f"{plan.name}-{trial.number}"
        trial.set_user_attr(RUN, name)
        process = plan.process(name, values, parent)
        last: dict[str, float] = {}
        try:
            for step, row in process.rows():
                last |= row
                if metric is not None and metric in row and math.isfinite(row[metric]):
                    trial.report(row[metric], step)
                    if trial.should_prune():
                        tell(f"trial {trial.number} pruned at step {step}: {metric} {row[metric]:.4g}")
                        raise optuna.TrialPruned
            found = wanted(last, plan.objectives, name)
        except UserError as error:  # of every trial, and not of these values
            mistakes.append(error)
            study.stop()
            raise RunFailed(str(error)) from error
        except RunFailed as error:
            tell(f"trial {trial.number} failed: {error}")
            raise
        if not all(map(math.isfinite, found)):
            tell(f"trial {trial.number} diverged: {_words(plan, found)}")
            raise RunFailed(f"{name} diverged")
        tell(f"trial {trial.number}: {_words(plan, found)}")
        return tuple(found)

    def enough(study: Study, trial: FrozenTrial) -> None:
        if plan.stopping.is_set() or done(study) >= trials:
            study.stop()

    missing = trials - done(study)
    if missing > 0:
        study.optimize(
            objective, n_trials=2 * missing, n_jobs=jobs, catch=(RunFailed, Stopped), callbacks=[enough]
        )
    if mistakes:
        raise mistakes[0]


def _words(plan: Plan, values: list[float]) -> str:
    return ", ".join(f"{metric} {value:.4g}" for metric, value in zip(plan.objectives, values, strict=True))
