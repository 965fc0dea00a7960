"""Leaving in order when asked: a signal sets a flag, the next step boundary saves a checkpoint and exits."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from alignment import distributed, resume
from callbacks.checkpoint import Checkpoint

log = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGUSR2: 143, signal.SIGINT: 130}
STOP = "stop"
"""Note to the other ranks from one that was asked to leave."""


class Signals(Callback):
    """SIGTERM, SIGINT and SIGUSR1 save at the next step boundary and leave with exit code 143 (130 for SIGINT).

    Handlers only set a flag, so that no signal, first or second, interrupts a step or a save; ranks agree on it at each
    boundary. A module that samples completions asks for the flag meanwhile (`alignment.stopping`): its batch is then
    dropped, the state from before it is saved, and the resumed run begins with it. Lightning's own handlers, one of
    which runs a collective inside the handler, are replaced while fitting. Under SLURM the requeue signal saves where
    Lightning's automatic resume looks, and rank 0 requeues the job.

    Args:
        deadline: seconds from the signal within which the boundary must come; after that the run leaves at once, on the
            last checkpoint it has.
        requeue: whether to requeue the job under SLURM.
    """

    def __init__(self, deadline: float = 25.0, requeue: bool = True) -> None:
        self.deadline = deadline
        self.requeue = requeue
        self._former: dict[int, Any] = {}
        self._received: int | None = None
        self._step_before = 0
        self._saving = False
        self._overdue = False
        self._timer: threading.Timer | None = None

    # ------------------------------------------------------------------ handlers

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _install(self, trainer: L.Trainer) -> None:
        if self._former:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning("callbacks.Signals does nothing outside the main thread: Python delivers signals only there")
            return
        self._received, self._overdue = None, False
        environment = _slurm(trainer)
        extra = environment.requeue_signal if environment is not None else None
        for number in {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *([extra] if extra else [])}:
            self._former[number] = signal.signal(number, self._note)

    def _restore(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._overdue and not self._saving:
            raise SystemExit(_exit_code(self._received or number))
        if self._received is not None:
            return
        self._received = number
        name = signal.Signals(number).name
        # Not through logging: the handler may run while a log record is being written.
        os.write(2, f"\n{name}: saving at the next step boundary, then leaving\n".encode())
        self._timer = threading.Timer(self.deadline, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        self._overdue = True
        _thread.interrupt_main(signal.Signals(self._received or signal.SIGTERM))

    # ------------------------------------------------------------------ boundaries

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._leave_if_asked(trainer, pl_module, in_batch=True)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._leave_if_asked(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._leave_if_asked(trainer, pl_module)
        self._restore()

    def _leave_if_asked(self, trainer: L.Trainer, pl_module: L.LightningModule, *, in_batch: bool = False) -> None:
        number = self._agreed(trainer, pl_module.device)
        if number is not None:
            self._leave(trainer, number, in_batch=in_batch)

    def _leave(self, trainer: L.Trainer, number: int, *, in_batch: bool = False) -> NoReturn:
        self._saving = True
        if not (trainer.sanity_checking or trainer.fast_dev_run):  # type: ignore[attr-defined]
            if in_batch:
                # The batch's metrics would be written after this hook.
                trainer._logger_connector.on_batch_end()
                trainer._logger_connector.update_train_step_metrics()
            self._save(trainer, number)
        self._saving = False
        self._exit(trainer, number)

    def _exit(self, trainer: L.Trainer, number: int) -> NoReturn:
        if trainer.is_global_zero:
            distributed.remove_note(STOP)
        environment = trainer._accelerator_connector.cluster_environment
        if not trainer.is_global_zero and not environment.creates_processes_externally:
            # Lightning's launcher kills rank 0, which still has to leave with the code, when a child fails.
            raise SystemExit(0)
        raise SystemExit(_exit_code(number))

    # ------------------------------------------------------------------ inside a batch (alignment.stopping)

    def stop_requested(self) -> bool:
        """Whether this rank, or one that has asked here before, received a signal. No collective."""
        if not self._former:  # not fitting: signals are not ours
            return False
        if self._received is not None:
            distributed.leave_note(STOP)
            return True
        return distributed.has_note(STOP)

    def drop_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave from inside a training or validation step, with the state from before its batch saved."""
        number = self._agreed(trainer, pl_module.device)
        if number is None:
            return
        if trainer.training:
            assert trainer.global_step == self._step_before, "a batch can be dropped before its first update only"
            self._saving = True  # an overdue signal must not leave half of the batch put back
            if not resume.put_back(trainer):
                log.warning("the training loader cannot go back by a batch: leaving on the last checkpoint there is")
                self._exit(trainer, number)
        self._leave(trainer, number)

    def _agreed(self, trainer: L.Trainer, device: torch.device) -> int | None:
        """The signal any rank received, the same on every rank."""
        received = self._received
        if received is None and trainer.received_sigterm:
            # It came between Lightning's handlers and ours.
            received = signal.SIGTERM
        if distributed.processes() == 1:
            return received
        numbers = torch.zeros(signal.NSIG, device=device)
        if received is not None:
            numbers[received] = 1.0
        seen = distributed.sum_over_processes(numbers).nonzero().flatten().tolist()
        return int(seen[-1]) if seen else None

    def _save(self, trainer: L.Trainer, number: int) -> None:
        environment = _slurm(trainer)
        if self.requeue and environment is not None and number == environment.requeue_signal:
            trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(str(trainer.default_root_dir)))
            if trainer.is_global_zero:
                _requeue()
            return
        callback = trainer.checkpoint_callback
        if isinstance(callback, Checkpoint):
            callback.save_now(trainer)
            return
        folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        trainer.save_checkpoint(Path(folder or Path(trainer.default_root_dir) / "checkpoints") / "last.ckpt")


def _exit_code(number: int) -> int:
    return EXIT_CODES[signal.Signals(number)]


def _slurm(trainer: L.Trainer) -> SLURMEnvironment | None:
    environment = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None


def _requeue() -> None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None else os.environ["SLURM_JOB_ID"]
    done = subprocess.run(["scontrol", "requeue", job], check=False, capture_output=True, text=True)
    if done.returncode:
        log.error("scontrol could not requeue job %s: %s", job, done.stderr.strip())
