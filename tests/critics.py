"""A module with a critic, and a reward model for one to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from alignment.batches import GroupBatch
from alignment.critic import Critic, CriticConfig
from alignment.metrics import Metrics
from alignment.module import PolicyMixin
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.settings import as_config
from alignment.tiny import tiny_config
from alignment.update import Counts
from tests.toys import OPTIM

COPY, HEAD = CriticConfig(kind="copy"), CriticConfig()
KINDS = ("head", "copy", "reward_model")
LORA = PolicyConfig(lora=LoRAConfig(r=4))
UNTIED = PolicyConfig(
    arch={"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
)


class Valued(PolicyMixin, L.LightningModule):
    """The smallest module with a critic: log-probs go up, and values go to 1."""

    def __init__(
        self, policy: PolicyConfig, critic: CriticConfig, optim: OptimConfig = OPTIM, micro_batch_tokens: int = 64
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        self.critic_config = as_config(CriticConfig, critic)

    def build_parts(self) -> None:
        self.critic = Critic(self, self.critic_config)

    def values(self, batch: GroupBatch) -> Tensor:
        """[C], from whichever states the critic reads."""
        if not self.critic.shares_trunk:
            return self.critic(batch)
        return self.critic(batch, self.engine(batch, logps=False, hidden="before").hidden)

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        logps = self.engine(micro).logps
        assert logps is not None
        error = torch.where(micro.scored, (self.values(micro) - 1) ** 2, 0.0)
        return (error - logps).sum() / counts.tokens, {}


def built(policy: PolicyConfig, critic: CriticConfig) -> Valued:
    module = Valued(policy, critic)
    module.configure_model()
    return module


def classifier(folder: Path, tokenizer: PreTrainedTokenizerFast, labels: int = 1, **settings: Any) -> PreTrainedModel:
    """A saved Llama with a random head, and other weights than the tiny policy's."""
    config = tiny_config()
    config.update({"num_labels": labels, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForSequenceClassification(config).eval()
        nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def configs(reward_folder: Path) -> dict[str, CriticConfig]:
    return {
        "head": HEAD,
        "copy": COPY,
        "reward_model": CriticConfig(kind="reward_model", reward_model=str(reward_folder)),
    }
