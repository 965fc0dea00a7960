"""Scalar reward heads, alone or as an ensemble, on the state at a completion's last token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from alignment import randomness
from alignment.adapters import is_adapted
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.logprobs import LogProbEngine
from alignment.module import PolicyMixin
from alignment.policy import base_model

if TYPE_CHECKING:
    from peft import PeftModel

EnsembleKind = Literal["heads", "adapters", "copies"]

FIRST_ADAPTER = "default"


class RewardHeads(nn.Module):
    """E linear heads without bias, one score each. Where their states come from is the kind of ensemble:

    heads     one trunk for all: cheap, and the members differ in their heads only
    adapters  one frozen base with E LoRA adapters, drawn with different seeds
    copies    E whole models: E times the memory

    Heads are in fp32, drawn from N(0, 1 / (H + 1)) as in Stiennon et al. 2020 (arXiv 2009.01325), keyed by
    `policy.init_seed` and the member, so that equal trunks still start from different scores.
    """

    def __init__(self, module: PolicyMixin, members: int, kind: EnsembleKind) -> None:
        super().__init__()
        config = module.policy_config
        check_ensemble(module, members, kind)
        width = base_model(module.policy).config.get_text_config().hidden_size
        device = next(module.policy.parameters()).device
        self.kind = kind
        self.names = [FIRST_ADAPTER, *(f"member{i}" for i in range(1, members))]
        weights = [
            torch.randn(width, generator=randomness.generator(config.init_seed, "reward head", member))
            for member in range(members)
        ]
        self.weight = nn.Parameter((torch.stack(weights) / (width + 1) ** 0.5).to(device))
        self.trunks = nn.ModuleList()
        # Not registered: the module owns the policy already, and a second name would save it twice.
        self._engines: list[LogProbEngine] = [module.engine]
        self._adapted: list[PeftModel] = []
        if kind == "copies":
            self.trunks.extend(module.build_policy(config) for _ in range(members - 1))
            self._engines += [module.build_engine(trunk) for trunk in self.trunks]
        elif kind == "adapters":
            assert is_adapted(module.policy)
            self._adapted = [module.policy]
            self._add_adapters(config.init_seed)

    def _add_adapters(self, seed: int) -> None:
        policy = self._adapted[0]
        for member, name in enumerate(self.names[1:], start=1):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(randomness.derive(seed, "adapter", member))
                policy.add_adapter(name, policy.peft_config[FIRST_ADAPTER])
        self._activate(FIRST_ADAPTER)

    def _activate(self, name: str) -> None:
        policy = self._adapted[0]
        policy.set_adapter(name)
        policy.set_requires_grad(self.names)  # peft freezes the adapters that are not active: all of them are trained

    def forward(self, batch: GroupBatch) -> Tensor:
        """[N, E] fp32 scores. Raises ValueError for a completion without a token: it has no last token."""
        if bool((batch.completion_lengths == 0).any()):
            raise ValueError("a completion without tokens cannot be scored")
        last = batch.completion_lengths.cumsum(0) - 1
        if self.kind == "heads":
            return _project(self._last_states(self._engines[0], batch, last), self.weight)
        columns: list[Tensor] = []
        for member, name in enumerate(self.names):
            if self._adapted:
                self._activate(name)
            engine = self._engines[0 if self._adapted else member]
            columns.append(_project(self._last_states(engine, batch, last), self.weight[member : member + 1]))
        if self._adapted:
            self._activate(FIRST_ADAPTER)
        return torch.cat(columns, dim=1)

    @staticmethod
    def _last_states(engine: LogProbEngine, batch: GroupBatch, last: Tensor) -> Tensor:
        """[N, H] state after reading each completion's last token."""
        hidden = engine(batch, logps=False, hidden="at").hidden
        assert hidden is not None
        return hidden[last]


def _project(states: Tensor, weight: Tensor) -> Tensor:
    """[N, H], [E, H] -> [N, E] in fp32, also under bf16-mixed: two scores that differ by less than a bf16 step (0.4%
    of them) would be a tie."""
    with torch.autocast(states.device.type, enabled=False):
        return states.float() @ weight.float().T


def check_ensemble(module: PolicyMixin, members: int, kind: EnsembleKind) -> None:
    """Raise UserError for settings that do not make an ensemble."""
    config = module.policy_config
    if members < 1:
        raise UserError(f"members is {members}; a reward model has at least one")
    if kind not in ("heads", "adapters", "copies"):
        raise UserError(f"ensemble '{kind}' is not known; use heads, adapters or copies")
    if kind != "adapters":
        return
    if config.lora is None:
        raise UserError("ensemble: adapters needs policy.lora")
    if config.lora.pretrained is not None:
        raise UserError("ensemble: adapters draws new adapters; it does not go with policy.lora.pretrained")
    if config.gradient_checkpointing:
        raise UserError(
            "ensemble: adapters does not go with policy.gradient_checkpointing, which would recompute every member "
            "with the adapter that happens to be active; use ensemble: copies"
        )
