"""Looks for what goes wrong while a run trains, says what to change, and changes it where asked to."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alignment import runs
from alignment.diagnosis import PREFIX, Alarm, Examination
from alignment.diagnosis_rules import NAMES
from alignment.diagnosis_source import held_out_metrics, own_names
from alignment.errors import UserError
from alignment.events import record_event
from alignment.folders import run_folder
from alignment.rank_agreement import disagreement
from alignment.schedulable import Schedulable
from alignment.tracking import TrackingLogger
from alignment.watching import HasEntropyBonus, Observed
from callbacks.dynamic_beta import strength

HERE = "callbacks.Doctor"
CAUSE = "doctor"
REPORT = "doctor.txt"
Action = Literal["raise_kl", "raise_entropy", "lower_beta", "stop"]
FACTORS = {"raise_kl": 1.5, "lower_beta": 0.8}
"""Action -> what it multiplies the KL coefficient or beta by, each time. verl's and Ziegler's controllers move it by at
most a fifth a batch; an alarm is rarer. 0.8 is PlateauBeta's."""
BONUS = 0.01
"""What `raise_entropy` adds to the entropy coefficient, each time; RegressionGuard's."""


class Doctor(Callback):
    """Runs the rules of `alignment.diagnosis_rules` over what the run logs: reward hacking, entropy collapse, a policy
    that stays where it was, KL that runs away, dead groups, clip saturation, length drift, truncation, repetition, a
    critic that diverges, falling log-probs of chosen completions, loss spikes, waiting for data, ranks that disagree,
    a reward that is constant or never moves.

    An alarm is one line in the log, the event `doctor`, and the metric `doctor/RULE`: 1 from there on, 0 once its fault
    is no longer seen. The report is `doctor.txt` in the run's folder and among the artifacts of the MLflow run, and the
    same as `alignment doctor RUN` prints. It logs three things that rules need and nobody else measures:
    `time/data_share` and `time/data_seconds`, of the time between two steps the share and seconds a step that training
    waits for its next batch; on several processes `ranks/parameters_differ` and `ranks/grad_norm_spread`.

    It changes nothing unless `actions` says so.

    Args:
        every: logged rows of training (`trainer.log_every_n_steps`) between two looks.
        held_out: metrics that should rise with the reward and that the policy is not trained on. Null: the rewards of
            weight 0.
        actions: rule -> what to do when it gives an alarm: `raise_kl` (KL coefficient, or beta, x 1.5), `raise_entropy`
            (entropy coefficient + 0.01), `lower_beta` (beta, or the KL coefficient, x 0.8), `stop` (in order). Event
            `doctor_action`; the values are in force as `schedule/NAME`.
        patience: looks between two acts of a rule whose fault is still seen.
        times: most often that one rule acts.
    """

    def __init__(
        self,
        every: int = 10,
        held_out: list[str] | None = None,
        actions: dict[str, Action] | None = None,
        patience: int = 5,
        times: int = 4,
    ) -> None:
        self.actions, self.patience, self.times = dict(actions or {}), patience, times
        if patience < 1 or times < 1:
            raise UserError(f"{HERE}: patience is {patience} and times {times}; both are at least 1")
        if unknown := sorted(set(self.actions) - set(NAMES)):
            raise UserError(f"{HERE}: actions names {', '.join(unknown)}, no rule; there are {', '.join(NAMES)}")
        for rule, action in self.actions.items():
            if action not in get_args(Action):
                raise UserError(f"{HERE}: actions.{rule} is '{action}'; use {', '.join(get_args(Action))}")
        self.held_out = held_out
        self.examination = Examination(every, held_out or ())
        self.acted: dict[str, list[int]] = {}  # rule -> looks at which it acted
        self.looks = 0
        self._norm: float | None = None  # of this rank's last gradient
        self._checked = False  # whether the frozen weights have been compared
        self._mark: float | None = None  # when the last step ended, if nothing else has happened since
        self._began = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, Observed):
            raise UserError(f"{HERE} is for this project's modules, not for a {type(pl_module).__name__}; leave it out")
        if self.held_out is None:
            self.examination.held_out = held_out_metrics(_weightless(pl_module))
        for action in dict.fromkeys(self.actions.values()):
            if action != "stop":
                moved(pl_module, action).claim(CAUSE)

    # ------------------------------------------------------------------ what nobody else measures

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """The step before, and the wait since its end."""
        assert isinstance(pl_module, Observed)
        now = time.perf_counter()
        if self._mark is not None:
            times = (now - self._mark, now - self._began, 1.0)
            waited, total, one = torch.tensor(times, dtype=torch.float64).unbind()
            pl_module.note_own({"time/data_share": (waited, total), "time/data_seconds": (waited, one)})
        self._began = now

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Any) -> None:
        self._mark = None  # the wait that follows is one for the disk

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Any) -> None:
        self._norm = float(norms["total"])

    def _compare(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """The ranks' weights, where each holds all of them; the frozen ones once. A collective."""
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            return {}
        weights = [p for p in module.parameters() if p.requires_grad or not self._checked]
        self._checked = True
        return disagreement(weights, self._norm)

    # ------------------------------------------------------------------ looking

    def on_metrics(self, trainer: L.Trainer, module: L.LightningModule, values: Any, step: int) -> None:
        """All ranks take in the same values, so that all of them see and do the same."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        before = self.examination.rows
        begun = self.examination.add(step, own_names(values))
        if self.examination.rows == before or self.examination.rows % self.examination.every:
            return
        self.looks += 1
        self._tell(trainer, begun, step)
        self._act(trainer, module)
        if found := self._compare(trainer, module):
            assert isinstance(module, Observed)
            module.note_values(found)

    def _tell(self, trainer: L.Trainer, begun: list[Alarm], step: int) -> None:
        for alarm in begun:
            record_event(trainer, "doctor", alarm.line())
        active = {alarm.rule for alarm in self.examination.current}
        marks = {f"{PREFIX}{alarm.rule}": float(alarm.rule in active) for alarm in self.examination.alarms}
        for logger in trainer.loggers if marks and trainer.is_global_zero else ():
            logger.log_metrics(marks, step=step)

    def _act(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for rule in dict.fromkeys(alarm.rule for alarm in self.examination.current if alarm.rule in self.actions):
            done = self.acted.setdefault(rule, [])
            if len(done) < self.times and (not done or self.looks - done[-1] >= self.patience):
                done.append(self.looks)
                record_event(trainer, "doctor_action", f"{rule}: {self._do(trainer, module, self.actions[rule])}")

    def _do(self, trainer: L.Trainer, module: L.LightningModule, action: Action) -> str:
        """Do it, and say what it was. What all rules together have done is one factor, or one addition."""
        if action == "stop":
            trainer.should_stop = True
            return "training stops"
        value = moved(module, action)
        before = float(value.value)
        if action == "raise_entropy":
            value.add(CAUSE, BONUS * self._count(action))
        else:
            value.scale(CAUSE, math.prod(factor ** self._count(each) for each, factor in FACTORS.items()))
        return f"{value.name} {before:.4g} -> {value.value:.4g}"

    def _count(self, action: str) -> int:
        """How often this was done, by any rule."""
        return sum(len(done) for rule, done in self.acted.items() if self.actions.get(rule) == action)

    # ------------------------------------------------------------------ the report

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What goes wrong with the disk is a warning: training does not depend on it."""
        self._tell(trainer, self.examination.finish(), self.examination.last_step)
        if unknown := [name for name in self.held_out or () if name not in self.examination.history]:
            rank_zero_warn(f"{HERE}: held_out names {', '.join(unknown)}, which was not logged")
        if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
            return
        folder = run_folder(trainer)
        text = self.examination.report(f"run {runs.label(folder, runs.read_record(folder) or {})}")
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TrackingLogger):
                logger.log_text(text, REPORT)
        if not isinstance(trainer.loggers[0], TrackingLogger):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / REPORT).write_text(text, encoding="utf-8")
            except OSError as ex:
                rank_zero_warn(f"{HERE} cannot write {folder / REPORT}: {ex}")

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        acted = {rule: list(done) for rule, done in self.acted.items()}
        return {"examination": self.examination.state_dict(), "acted": acted, "looks": self.looks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.examination.load_state_dict(state_dict["examination"])
        self.acted = {rule: [int(look) for look in done] for rule, done in state_dict["acted"].items()}
        self.looks = int(state_dict["looks"])


def moved(module: L.LightningModule, action: str) -> Schedulable:
    """The value that an action moves. Raises UserError where there is none that it could move."""
    if action == "raise_entropy":
        if not isinstance(module, HasEntropyBonus) or not module.entropy_possible:
            raise UserError(f"{HERE}: raise_entropy needs a module with an entropy bonus (GRPO, GDPO, PPO, MORL)")
        return module.entropy.strength
    value = strength(module, None, HERE)
    if value.writer == "kl.target":
        raise UserError(f"{HERE}: {action} and kl.target would both move {value.name}; leave one of them out")
    if not value.configured and value.writer is None and not value.blocked:
        raise UserError(f"{HERE}: {action} multiplies {value.name}, which is 0; set it above 0")
    return value


def _weightless(module: L.LightningModule) -> list[str]:
    """Rewards that the policy is not trained on."""
    suite = getattr(module, "suite", None)
    pairs: Mapping[str, float] = {} if suite is None else dict(zip(suite.names, suite.weights.tolist(), strict=True))
    return [name for name, weight in pairs.items() if weight == 0]
