"""The critic of PPO: what a state is worth, as one number for each completion token (or several, of as many scores).

    V(s_t) = w . h_t        h_t  the trunk's state before completion token t, the prompt's last state for the first one

kind          trunk                                     head           extra memory
head          the policy's own                          zero           H values
copy          a second one, as the policy starts        zero           one trunk, trained as the policy is
reward_model  a reward model's, trained in full         its score      one trunk of its size, trained in full

A head of zeros says V = 0 at first, so that the first advantages are pure rewards. Shared trunk: Ziegler et al. 2019
(arXiv 1909.08593). A trunk of its own, started from the reward model: Stiennon et al. 2020 (arXiv 2009.01325), Ouyang
et al. 2022 (arXiv 2203.02155).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alignment.batches import GroupBatch
from alignment.causal_lm import decoder_of
from alignment.errors import UserError
from alignment.logprobs import LogProbEngine
from alignment.policy import PolicyConfig, base_model, prepare
from alignment.rewards.model import load_classifier
from alignment.sharding import sharding_of

if TYPE_CHECKING:
    from alignment.module import PolicyMixin

CriticKind = Literal["head", "copy", "reward_model"]


@dataclass(kw_only=True)
class CriticConfig:
    """What estimates the value of a state.

    Args:
        kind: `head`: a linear head on the policy's own trunk. `copy`: a trunk of its own that starts from the policy's
            weights, with its own LoRA if the policy has one. `reward_model`: trunk and head of a reward model, trained
            in full also beside LoRA.
        reward_model: for kind `reward_model`: folder or hub id of a sequence classifier with one output and the
            policy's vocabulary. `alignment export` writes a trained RewardModel in this form.
    """

    kind: CriticKind = "head"
    reward_model: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CriticKind):
            raise UserError(f"critic.kind is one of {', '.join(get_args(CriticKind))}; got '{self.kind}'")
        if self.kind == "reward_model" and not self.reward_model:
            raise UserError("critic.kind=reward_model needs critic.reward_model: folder or hub id of a reward model")
        if self.kind != "reward_model" and self.reward_model is not None:
            raise UserError(f"critic.reward_model goes with critic.kind=reward_model; got critic.kind={self.kind}")


class Critic(nn.Module):
    """Values of the states before completion tokens. The head is in fp32, a trunk of its own in the policy's dtype.

    Args:
        module: has its policy and engine. Whatever part of it the critic reads stays registered there alone.
        config: see CriticConfig.
        outputs: J, values of a state.

    Attributes:
        shares_trunk: whether `forward` is given the policy's states: there is no trunk here.

    Raises UserError for a reward model that cannot be a critic of this policy.
    """

    def __init__(self, module: PolicyMixin, config: CriticConfig, outputs: int = 1) -> None:
        super().__init__()
        self.shares_trunk = config.kind == "head"
        self._engine: LogProbEngine | None = None
        device = next(module.policy.parameters()).device
        if config.reward_model is not None:
            if outputs != 1:
                raise UserError(f"critic.kind=reward_model gives 1 value, not {outputs}; use critic.kind head or copy")
            trunk, head = _reward_parts(module, config.reward_model)
            self.trunk = trunk.to(device)
            self._engine = _engine(module, trunk, config.reward_model)
        else:
            head = zero_head(base_model(module.policy), outputs)
            if config.kind == "copy":
                # The LM head stays behind: an untied one would be trained by nothing and saved with every checkpoint.
                self.trunk = decoder_of(base_model(module.build_policy(module.policy_config, whole=True)))
                if (sharding := sharding_of(module.policy)) is not None:
                    sharding(self.trunk)
                self._engine = module.build_engine(self.trunk)
        self.head = head.to(device, torch.float32).train()

    def forward(self, batch: GroupBatch, policy_states: Tensor | None = None) -> Tensor:
        """[C] fp32 value of the state before each completion token, or [C, J]; exactly 0 at unscored tokens.

        Without a scored token nothing runs (but a sharded trunk) and the zeros have no graph. Gradients reach the
        trunk, also the policy's own: detach `policy_states` to keep the value loss out of it.

        Args:
            policy_states: [C, H] states before each token (`engine(batch, hidden="before").hidden`), exactly for a
                critic that shares the policy's trunk.
        """
        assert (policy_states is not None) == self.shares_trunk, "policy_states go with a shared trunk, and only there"
        scored, outputs = batch.scored.nonzero()[:, 0], self.head.out_features
        shape = (len(batch.scored),) if outputs == 1 else (len(batch.scored), outputs)
        values = torch.zeros(shape, device=batch.device)
        if scored.numel() == 0 and not (self._engine is not None and self._engine.sharded):
            return values  # a sharded trunk runs, since other ranks wait for it
        states = self._engine(batch, logps=False, hidden="before").hidden if self._engine is not None else policy_states
        assert states is not None
        # Not in bf16 under autocast: it has 8 bits, and an advantage is the difference of two near values.
        with torch.autocast(states.device.type, enabled=False):
            found = self.head(states[scored].float())
            return values.index_put((scored,), found[:, 0] if outputs == 1 else found)


# ------------------------------------------------------------------------------------------------------- starting parts


def zero_head(policy: PreTrainedModel, outputs: int = 1) -> nn.Linear:
    """V = 0 everywhere; without bias, as the heads of reward models."""
    # As wide as the states, which is not everywhere the configuration's hidden size (OPT-350m).
    width = policy.get_output_embeddings().weight.shape[1]  # type: ignore[no-untyped-call]
    head = nn.Linear(width, outputs, bias=False)
    nn.init.zeros_(head.weight)
    return head


def _reward_parts(module: PolicyMixin, name: str) -> tuple[nn.Module, nn.Linear]:
    """A reward model's trunk, prepared as the policy is but for LoRA and quantisation, and its head."""
    config = module.policy_config
    dtype = reward_dtype(config) or base_model(module.policy).dtype
    classifier, tokenizer = load_classifier(name, dtype, config.attention)
    trunk, head = split_classifier(classifier, name)
    _check_ids(module.tokenizer, tokenizer, trunk, name)
    return prepare(trunk, config, module.transforms), head


def reward_dtype(config: PolicyConfig) -> torch.dtype | None:
    """Of a reward model's trunk beside this policy: the policy's own; None for `auto`."""
    if config.torch_dtype == torch.float16:
        raise UserError(
            "critic.kind=reward_model trains weights in the policy's dtype, and float16 cannot be trained: "
            "use policy.dtype bfloat16 or float32"
        )
    return config.torch_dtype


def split_classifier(classifier: PreTrainedModel, name: str) -> tuple[PreTrainedModel, nn.Linear]:
    """Trunk and head of a sequence classifier. Raises UserError unless one linear `score` on the trunk's states is all
    there is above it."""
    trunk, head = classifier.base_model, dict(classifier.named_children()).get("score")
    if not isinstance(head, nn.Linear) or not isinstance(trunk, PreTrainedModel):
        raise UserError(
            f"reward model '{name}' is a {type(classifier).__name__}, whose head is not one linear layer `score`; "
            "a critic starts from a decoder with such a head"
        )
    if head.out_features != 1:
        raise UserError(
            f"reward model '{name}' has {head.out_features} outputs and a value is one number: use one with a single "
            "output (a RewardModel with aggregation mean is exported as such)"
        )
    return trunk, head


def _check_ids(
    policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, trunk: PreTrainedModel, name: str
) -> None:
    """The critic reads the policy's ids: each must be the same token there. Further tokens there do no harm."""
    known = reward.get_vocab()
    for token, index in sorted(policy.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != index:
            there = f"id {known[token]}" if token in known else "missing"
            raise UserError(
                f"reward model '{name}' has another vocabulary than the policy: token {index}, {token!r}, is {there} "
                "there; a critic needs a reward model trained with the policy's tokenizer"
            )
    rows = cast(nn.Embedding, trunk.get_input_embeddings()).num_embeddings
    if len(policy) > rows:
        raise UserError(f"reward model '{name}' embeds {rows} tokens and the policy's tokenizer has {len(policy)}")


def _engine(module: PolicyMixin, trunk: nn.Module, name: str) -> LogProbEngine:
    try:
        return module.build_engine(trunk)
    except ValueError as error:
        raise UserError(f"reward model '{name}' cannot be a critic: {error}") from error
