"""FP8 twice: past policies kept as codes, and linear layers that multiply in FP8."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from alignment import float8
from alignment.errors import UserError
from alignment.fp8 import Fp8Archive, logp_error
from alignment.protocols import HasEngine, TakesTransforms

START = "start"


class Fp8PolicyArchive(Callback):
    """Keeps past policies as FP8 codes, a quarter of their bytes in fp32: the start, and one every so many steps.

    They are in `archive` (`alignment.fp8.Fp8Archive`) under `start` and `step-N`, to be evaluated without a second copy
    of the model, to go back to, to be mixed; and in the checkpoint, from where `alignment export --archived step-N`
    makes a model of one. With LoRA they are what is trained. Nothing reads them during training.
    Logs `fp8/archive_bytes`, `fp8/archived` (how many) and, of this project's modules, `fp8/logp_error`: the mean
    distance in nats between log-probs of the last archived policy and those of its codes, on a small batch.

    Any LightningModule will do. Weights sharded by FSDP2 are gathered a tensor at a time; every rank keeps all codes.

    Args:
        every_n_steps: optimizer steps from one policy to the next, at the end of the first batch at or past each
            multiple.
        keep: how many of them are kept, the last ones; the start is kept besides.
        start: whether it is.
        per: one scale for each `tensor`, or for each `row` of a matrix, which is closer where rows differ in
            size, for 4 bytes a row.
        place: the codes are in `host` memory, or on the `device`, from where they are faster to use.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        keep: int = 4,
        start: bool = True,
        per: Literal["tensor", "row"] = "tensor",
        place: Literal["host", "device"] = "host",
    ) -> None:
        if every_n_steps < 1:
            raise UserError(f"callbacks.Fp8PolicyArchive: every_n_steps is {every_n_steps}; it is at least 1")
        self.every_n_steps, self.start = every_n_steps, start
        self.archive = Fp8Archive(keep=keep, per=per, place=place)
        self._last = 0  # global_step when one was archived, or was found not to be due
        self._error: float | None = None

    # ------------------------------------------------------------------ archiving

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.archive.to(pl_module.device)  # a checkpoint brings them on the host
        if self.start and START not in self.archive.names:
            self._store(START, pl_module, pinned=True)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step // self.every_n_steps > self._last // self.every_n_steps:
            self._store(f"step-{step}", pl_module)
        self._last = step
        if self.archive.names:
            pl_module.log("fp8/archive_bytes", float(self.archive.nbytes()), batch_size=1)
            pl_module.log("fp8/archived", float(len(self.archive.names)), batch_size=1)
        if self._error is not None:
            pl_module.log("fp8/logp_error", self._error, batch_size=1)

    def _store(self, name: str, module: L.LightningModule, *, pinned: bool = False) -> None:
        try:
            self.archive.store(name, module, pinned=pinned)
        except UserError as error:  # weights that are not finite, with which no run is ended here: that is a guard's
            rank_zero_warn(f"{name} is not archived: {error}")
            return
        if isinstance(module, HasEngine):
            self._error = logp_error(self.archive, name, module, module.engine)["mean"]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {"archive": self.archive.state_dict(), "last": self._last, "error": self._error}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.archive.load_state_dict(state_dict["archive"])
        self._last, self._error = int(state_dict["last"]), state_dict["error"]


class Fp8Training(Callback):
    """Linear layers of the policy multiply in FP8 during training (torchao, extra `fp8`); see `alignment.float8`.

    On GPUs from compute capability 8.9 on (Ada, Hopper, Blackwell) the products are FP8's own, which is faster with
    `policy.compile` and layers of a few thousand; anywhere else they are emulated, which rounds the same way and is
    slower. The LM head and adapters stay as they are. Weights, checkpoints and exports are those of an ordinary model;
    `validate`, `test` and `predict` by themselves compute in the ordinary precision.

    Args:
        recipe: scales for each `rowwise` (token, and output of the weight) or `tensorwise`: faster, coarser, and a
            token's log-prob depends on the batch it is in.
        skip: names of layers, or of modules they are in, that stay as they are: a router (`gate`), `down_proj`.
        emulate: force or forbid emulation. Null: where there is no FP8.
    """

    def __init__(
        self,
        recipe: Literal["rowwise", "tensorwise"] = "rowwise",
        skip: list[str] | None = None,
        emulate: bool | None = None,
    ) -> None:
        if recipe not in ("rowwise", "tensorwise"):
            raise UserError(f"callbacks.Fp8Training: recipe is '{recipe}'; it is rowwise or tensorwise")
        self.recipe, self.skip, self.emulate = recipe, tuple(skip or ()), emulate
        self._module: L.LightningModule | None = None  # the one it has registered with

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or pl_module is self._module:
            return
        if not isinstance(pl_module, TakesTransforms):
            raise UserError(
                f"callbacks.Fp8Training is for this project's modules, not for a {type(pl_module).__name__}; leave it "
                "out"
            )
        if (quantization := pl_module.policy_config.quantization) != "none":
            raise UserError(
                f"callbacks.Fp8Training needs the linear layers that policy.quantization={quantization} replaces; set "
                "it to none, or leave the callback out"
            )
        float8.check_torchao()
        emulate = self._emulates(trainer, pl_module)
        pl_module.register_transform(
            "float8", lambda model: float8.to_float8(model, self.recipe, self.skip, emulate=emulate)
        )
        self._module = pl_module

    def _emulates(self, trainer: L.Trainer, module: TakesTransforms) -> bool:
        """Whether products are emulated. Raises UserError where that is forbidden and needed."""
        device = trainer.strategy.root_device
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= float8.FIRST_CAPABILITY
        if self.emulate is False and not able:
            raise UserError(f"callbacks.Fp8Training: {device} has no FP8 products, and emulate is false; leave it out")
        if self.emulate or not able:
            rank_zero_info(f"FP8 training is emulated on {device}: rounded the same way, and slower than without")
            return True
        half = module.policy_config.dtype == "bfloat16" or trainer.precision == "bf16-mixed"
        if self.recipe == "rowwise" and not half:
            raise UserError(
                "callbacks.Fp8Training: rowwise products come out in bfloat16; set trainer.precision to bf16-mixed, or "
                "recipe to tensorwise"
            )
        return False
