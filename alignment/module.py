"""PolicyMixin: what every module shares about its model, on top of what `TrainingMixin` shares about training.

The policy is built once, in `configure_model`, after callbacks have registered their transforms and before Lightning
builds optimizers, restores a checkpoint or moves anything to a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from alignment import memory
from alignment.batches import GroupBatch
from alignment.chat import end_ids
from alignment.checkpoint import load_module
from alignment.compiled import check_attention, check_compiler, uncompiled
from alignment.errors import UserError
from alignment.logprobs import LogProbEngine
from alignment.memory_report import report
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig, base_model, check_vocabulary, load_policy, load_tokenizer
from alignment.protocols import SizedBatches, is_finite
from alignment.settings import as_config
from alignment.sharding import unsharded
from alignment.training import TrainingMixin
from alignment.transformer_engine import TransformerEngine
from alignment.transforms import Stage, Transform, Transforms


class PolicyMixin(TrainingMixin):
    """Base of modules that train a causal language model.

    Attributes, from `configure_model` on:
        policy: the transformers model, wrapped by peft when there are adapters.
        engine: computes token log-probs and hidden states of a GroupBatch under `policy`.

    Args:
        policy: which model, in what form; a mapping of its fields is accepted too.
        optim, micro_batch_tokens: see TrainingMixin.
    """

    policy: nn.Module
    engine: LogProbEngine

    def __init__(self, *, policy: PolicyConfig, optim: OptimConfig, micro_batch_tokens: int | None) -> None:
        super().__init__(optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.policy_config = as_config(PolicyConfig, policy)
        self.transforms = Transforms()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._built = False
        self._first_engine: LogProbEngine | None = None
        if self.policy_config.lora is not None:
            self.strict_loading = False  # checkpoints then hold what is trained, not the frozen base

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, loaded at first use: data modules need it before the model exists."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_config)
        return self._tokenizer

    def register_transform(self, stage: Stage, transform: Transform) -> None:
        """Add a model transform (float8, sharding, ...); call it in a callback's `setup`."""
        if self._built:
            raise UserError(f"the model exists already; register the transform '{stage}' in a callback's setup()")
        self.transforms.register(stage, transform)

    # ------------------------------------------------------------------ building

    def setup(self, stage: str) -> None:
        super().setup(stage)
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, TransformerEngine) and not self._built:
            self.register_transform("float8", plugin.convert_policy)

    def configure_model(self) -> None:
        """Build the policy, its engine and whatever the algorithm adds. Later calls return at once."""
        if self._built:
            return
        self._built = True
        if self._trainer is not None and "fully_shard" not in self.transforms.stages:  # it counts one process alone
            self._report_memory(self._trainer)
        self.policy = self.build_policy(self.policy_config)
        self.engine = self.build_engine(self.policy)
        lora = self.policy_config.lora
        self.dropout_on = self.policy_config.dropout or (lora is not None and lora.dropout > 0)
        self.build_parts()

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        """What the estimate of memory is made of. Without `micro_batch_tokens` a finite data set gives the bound."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        longest = 0
        if is_finite(data) and trainer.state.fn == TrainerFn.FITTING:
            longest = max((group.tokens for group in data.groups("train")), default=0)
        tokens = self.micro_batch_tokens
        if tokens is None:
            tokens = longest * data.batch_size if isinstance(data, SizedBatches) else 0
        optim = self.optim if trainer.state.fn == TrainerFn.FITTING else None
        policy = self.policy_config
        return memory.Plan(
            policy=policy,
            optim=optim,
            micro_batch_tokens=tokens,
            row_tokens=longest or None,
            masks=policy.attention != "flex_attention"
            and (self.target_device.type != "cpu" or policy.attention != "sdpa" or policy.gradient_checkpointing),
        )

    def _report_memory(self, trainer: L.Trainer) -> None:
        device = self.target_device
        free = memory.available(device, processes=trainer.num_devices)
        where = "this machine" if device.type == "cpu" else str(device)
        rank_zero_info(report(self.memory_plan(trainer), free, where))

    def build_policy(self, config: PolicyConfig, *, whole: bool = False) -> nn.Module:
        """A policy on the device it will train on, so that what is checked now is what runs later; `whole` leaves out
        sharding."""
        training = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        check_attention(config.attention, self.target_device, training=training)
        if config.compile:
            check_compiler(self.target_device, "policy.compile")
        policy = load_policy(config, self.transforms.copy("fully_shard") if whole else self.transforms)
        check_vocabulary(policy, self.tokenizer)
        return policy.to(self.target_device)

    def build_engine(self, policy: nn.Module) -> LogProbEngine:
        """A verified engine for `policy`. A reference is of the same make as the policy: one of them is verified."""
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer makes sure of a padding token"
        engine = LogProbEngine(policy, path=self.policy_config.logprob_path, pad_id=pad)
        engine.verify(like=self._first_engine)
        self._first_engine = self._first_engine or engine
        return engine

    def build_parts(self) -> None:
        """Heads, references and other parts of the algorithm. The policy is there; a checkpoint is not loaded yet."""

    @property
    def target_device(self) -> torch.device:
        """The trainer's device, or the module's own without a trainer."""
        return self.device if self._trainer is None else self._trainer.strategy.root_device

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Everything, or with LoRA only what is trained: the frozen base is rebuilt from the configuration."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self.policy_config.lora is None:
            return state
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in state.items() if name in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        own, saved = set(self.state_dict()), set(checkpoint["state_dict"])
        if missing := sorted(own - saved):
            raise UserError(f"the checkpoint lacks {len(missing)} weights this module trains, for example {missing[0]}")
        # With LoRA nothing else would say so: weights that have no place are left out in silence.
        if surplus := sorted(saved - own):
            raise UserError(
                f"the checkpoint has {len(surplus)} weights this module does not, for example {surplus[0]}; "
                "load it with the policy it was trained with"
            )

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, *, strict: bool | None = None, **kwargs: Any
    ) -> Self:
        """The module saved in a checkpoint folder, on the CPU; keyword arguments replace saved hyper-parameters."""
        return load_module(cls, Path(checkpoint_path), strict=strict, **kwargs)

    # ------------------------------------------------------------------ predict

    @torch.no_grad()
    def complete(self, batch: GroupBatch, max_new_tokens: int) -> list[list[int]]:
        """P greedy completions, one per prompt, as token ids up to and including what ends a reply."""
        with unsharded(self.policy), uncompiled(self.policy):
            return self._complete(batch, max_new_tokens)

    def _complete(self, batch: GroupBatch, max_new_tokens: int) -> list[list[int]]:
        prompts = [p.tolist() for p in torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())]
        if not prompts:
            return []
        width = max(len(p) for p in prompts)
        inner = base_model(self.policy)
        settings = inner.generation_config
        ends = end_ids(self.tokenizer, inner.config.eos_token_id, settings.eos_token_id if settings else None)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=batch.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=batch.device)
        output = self.policy.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=ends,
        )
        return [_until(row, ends) for row in output[:, width:].tolist()]

    def texts(self, batch: GroupBatch) -> list[dict[str, Any]]:
        """P mappings with the row's index, the prompt and the completions as text, special tokens included."""
        prompts = torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())
        completions = torch.split(batch.completion_ids, batch.completion_lengths.tolist())
        rows: list[dict[str, Any]] = [
            {"index": int(index), "prompt": self.tokenizer.decode(prompt.tolist()), "completions": []}
            for index, prompt in zip(batch.group_index.tolist(), prompts, strict=True)
        ]
        for group, completion in zip(batch.group_of.tolist(), completions, strict=True):
            rows[group]["completions"].append(self.tokenizer.decode(completion.tolist()))
        return rows

    def pair_rows(self, batch: GroupBatch, **values: Tensor) -> list[dict[str, Any]]:
        """P rows of a preference batch: texts, and `<name>_chosen`, `<name>_rejected` of each [N] tensor given."""
        rows = self.texts(batch)
        for row in rows:
            row["chosen"], row["rejected"] = row.pop("completions")
        for name, tensor in values.items():
            for row, chosen, rejected in zip(rows, *(side.tolist() for side in batch.pair(tensor)), strict=True):
                row |= {f"{name}_chosen": chosen, f"{name}_rejected": rejected}
        return rows


def _until(ids: list[int], ends: list[int]) -> list[int]:
    stop = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return ids[: stop + 1]
