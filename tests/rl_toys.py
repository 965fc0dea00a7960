"""Small online runs: prompts, rewards called in this process, scripted rollouts, and what updates see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from alignment.batches import Group, GroupBatch
from alignment.logprobs import LogProbEngine, TokenStats
from alignment.online import OnlineMixin
from alignment.policy import PolicyConfig, load_policy
from alignment.policy_losses import PolicyTokens
from alignment.rewards import RewardSpec
from alignment.rollout import Rollout, SamplingConfig, assemble
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

SAMPLING = SamplingConfig(max_tokens=6, stop_ids=list(range(4, 110)))
"""Completions of 1 to 6 tokens: each token ends one with a probability of about a fifth."""


def prompts(count: int, **columns: Sequence[Any]) -> list[Group]:
    """Prompts of 2 to 8 tokens, with these columns, a value for each."""
    return [
        Group(
            prompt=group.prompt,
            completions=(),
            columns={name: values[i] for name, values in columns.items()},
            index=group.index,
        )
        for i, group in enumerate(groups(count, 1))
    ]


def odd(completion: str, completion_ids: list[int]) -> float:
    """Share of odd ids."""
    return sum(i % 2 for i in completion_ids) / max(1, len(completion_ids))


def odd_in_some(completion: str, completion_ids: list[int], alive: bool) -> float:
    """The same where the prompt's column says so, else 1 for every completion."""
    return odd(completion, completion_ids) if alive else 1.0


def here(reward: Callable[..., Any] = odd, **settings: Any) -> RewardSpec:
    """A reward called in this process."""
    return RewardSpec(reward=reward, in_process=True, **settings)


def online(kind: type[OnlineMixin], **settings: Any) -> Any:
    """A module with small settings, those given in place of them."""
    defaults: dict[str, Any] = {
        "policy": TINY,
        "rewards": {"odd": here()},
        "completions": 4,
        "sampling": SAMPLING,
        "optim": OPTIM,
    }
    return kind(**(defaults | settings))


class Watch(L.Callback):
    """What each update was given and made: gradients before clipping, means of its metrics; and what was logged."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.updates: list[dict[str, float]] = []
        self.logged: list[dict[str, float]] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        note = module.note_update

        def watched(*, metrics: Any, loss: float, **values: float) -> None:
            means = {name: float(total / count) for name, (total, count) in metrics.items()}
            self.updates.append({**means, "loss": loss, **values})
            note(metrics=metrics, loss=loss, **values)  # type: ignore[operator]

        module.note_update = watched  # type: ignore[assignment]

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Any) -> None:
        parts = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([torch.zeros(0), *parts]))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(
    module: L.LightningModule, folder: Path, data: L.LightningDataModule | None = None, **settings: Any
) -> tuple[Watch, L.Trainer]:
    """Train on four prompts a batch, two batches unless the settings say otherwise."""
    watch = Watch()
    data = data or FixedData(prompts(8), batch_size=4)
    callbacks = [watch, *settings.pop("callbacks", [])]
    settings = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": callbacks, **settings}
    run = trainer(folder, **settings)
    run.fit(module, datamodule=data)
    return watch, run


class Script:
    """A RolloutEngine that answers every prompt with the same completions, whose log-probs are the policy's."""

    def __init__(
        self, engine: LogProbEngine, completions: Sequence[Sequence[int]], truncated: Sequence[bool] | None = None
    ) -> None:
        self.engine = engine
        self.completions = [list(ids) for ids in completions]
        self.truncated = list(truncated or [False] * len(completions))
        self.synced: list[int] = []

    def sync(self, model: Any, version: int) -> None:
        self.synced.append(version)

    def generate(self, prompts: Sequence[Group], n: int, sampling: SamplingConfig, **keys: Any) -> Rollout:
        said = [self.completions[:n]] * len(prompts)
        batch = GroupBatch.from_groups([replace(p, completions=s) for p, s in zip(prompts, said, strict=True)])
        with torch.no_grad():
            logps = self.engine(batch, temperature=sampling.score_temperature).logps
        assert logps is not None
        cut = torch.tensor(self.truncated[:n] * len(prompts), dtype=torch.bool)
        return assemble(prompts, said, logps, cut, self.synced[-1], "cpu")


def scripted(module: Any, completions: Sequence[Sequence[int]], truncated: Sequence[bool] | None = None) -> Any:
    """The module, built, and saying only this."""
    module.configure_model()
    module.rollout = Script(module.engine, completions, truncated)
    return module


class SaidBefore:
    """An engine whose log-probs are given; entropies are 1 at every scored token."""

    def __init__(self, logps: Sequence[float] | Tensor) -> None:
        self.logps = torch.as_tensor(logps, dtype=torch.float32).clone().requires_grad_()

    def __call__(self, batch: GroupBatch, **asked: Any) -> TokenStats:
        scored = torch.where(batch.scored, self.logps, 0.0)
        hidden = torch.zeros(len(scored), 1) if asked.get("hidden") else None
        return TokenStats(logps=scored, entropy=batch.scored.float(), hidden=hidden)


def moved(module: Any, size: float = 0.02) -> Any:
    """The module, built, its trainable weights moved away from where its reference is."""
    module.configure_model()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.policy.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=draw) * size)
    return module


def pretrained_adapter(policy: PolicyConfig, folder: Path) -> Path:
    """A folder with an adapter that is not zero."""
    model = load_policy(policy)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05, generator=draw)
    model.save_pretrained(str(folder))  # type: ignore[operator]
    return folder


def ones(tokens: PolicyTokens) -> Tensor:
    """A user's loss: 1 for every token, with a gradient."""
    return 1 + 0 * tokens.logps


def pushed(tokens: PolicyTokens, *, push: float) -> Tensor:
    """One with a setting that has no default."""
    return -push * tokens.advantages * tokens.ratio()


def detached(tokens: PolicyTokens) -> Tensor:
    """One that forgot its gradient."""
    return (-tokens.advantages * tokens.ratio()).detach()
