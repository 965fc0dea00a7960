"""Callbacks by hand: a trainer that only records, and a module with heads that only holds what callbacks see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from alignment.checkpoint import SafeCheckpointIO
from alignment.head_config import FusionConfig
from alignment.head_steps import HeadSteps
from alignment.penalties import EntropyConfig, EntropyTerm
from alignment.schedulable import LR, Moved, Schedulable, Schedulables
from tests.loops import Rows
from tests.rl_toys import prompts
from tests.toys import FixedData, trainer


class Trained(SimpleNamespace):
    """What callbacks ask of a trainer; `events` lists the names of what they recorded."""

    def __init__(self) -> None:
        self.rows = Rows()
        validation = SimpleNamespace(_combined_loader=None)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0, val_loop=validation))
        super().__init__(is_global_zero=True, fit_loop=loop, loggers=[self.rows], global_step=0, callback_metrics={})
        self.sanity_checking, self.state = False, SimpleNamespace(fn=TrainerFn.FITTING)
        self.callbacks: list[L.Callback] = []
        self.enable_validation = True

    @property
    def events(self) -> list[str]:
        return [name.removeprefix("event/") for _, row in self.rows.rows for name, _ in row]


class Headed:
    """A module with heads a, b, ... of equal weight."""

    fusion_entropy = Moved("fusion.entropy")

    def __init__(self, *names: str, every: int = 1) -> None:
        self.weights = dict.fromkeys(names, 1.0)
        self.fusion_config = FusionConfig()
        self.schedulables = Schedulables()
        self.fusion_entropy = self.fusion_config.entropy
        for name in names:
            self.schedulables.register(Schedulable(f"{LR}/{name}", 1.0))
        self.frozen: set[str] = set()
        self.only: str | None = None
        self.head_steps = HeadSteps(every, "mean")
        self.alpha = dict.fromkeys(names, 1 / len(names))
        self.flat = dict.fromkeys(names, 0.0)
        self.clipped = dict.fromkeys(names, 0.0)
        self.entropy = EntropyTerm(EntropyConfig())
        self.entropy_possible = True
        self.scaled: list[tuple[str, float]] = []
        self.noted: list[dict[str, float]] = []

    def claim_head(self, name: str, cause: str) -> None:
        self.schedulables[f"{LR}/{name}"].claim(cause)

    def scale_head(self, name: str, cause: str, factor: float) -> None:
        self.schedulables[f"{LR}/{name}"].scale(cause, factor)
        self.scaled.append((name, factor))

    def note_values(self, values: Mapping[str, float]) -> None:
        self.noted.append(dict(values))


def weights(module: Any) -> dict[str, list[float]]:
    """Every parameter, to compare bit for bit."""
    return {name: p.detach().flatten().tolist() for name, p in module.named_parameters()}


class Leave(L.Callback):
    """Saves after some batches and ends the run."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if module.batches_seen == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def ends(
    folder: Path,
    after: int,
    module: Callable[[], Any],
    callbacks: Callable[[], Sequence[L.Callback]],
    look: Callable[[Any], Any],
) -> list[Any]:
    """What `look` sees of the module and its rates after six batches, each an epoch with a validation: of a whole run,
    of one that leaves, of its resume."""
    saved, found = folder / "here.ckpt", []
    for leave, start in ((None, None), (after, None), (None, saved)):
        own, data = module(), FixedData(prompts(4), batch_size=4)
        extra = [] if leave is None else [Leave(leave, saved)]
        run = trainer(
            folder,
            callbacks=[*callbacks(), *extra],
            plugins=[SafeCheckpointIO()],
            limit_val_batches=1,
            num_sanity_val_steps=0,
            max_epochs=6,
        )
        run.fit(own, datamodule=data, ckpt_path=start)
        rates = [(group["name"], group["lr"]) for group in run.optimizers[0].param_groups]
        found.append((look(own), rates))
    return found
