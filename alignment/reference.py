"""The reference: the policy as it was before training, in the cheapest form that answers the same.

kind            what it is                                                     extra memory
adapter_off     a policy with new LoRA adapters, which are switched off        none
frozen_adapter  a policy with a pretrained adapter and a frozen copy of it     one adapter
cached          log-probs of a finite data set, computed before training       4 bytes a token, on disk and in RAM
                (and entropies, where they are asked for                       4 bytes more)
fp8             FP8 codes of the policy's start, for the policy to run with    a byte a weight, and a layer at a time
copy            a second model                                                 one model

At step 0 the KL to each of them is 0 and the DPO loss ln 2 (fp8: within what `alignment.fp8.LOGP_BOUND` makes of them),
also when training continues a pretrained adapter: the reference is then that adapter, not the base (the base would make
step 0 a large jump).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from alignment import distributed
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.frozen import (
    as_found,
    follow,
    peft_model,
    read_logps,
    read_states,
    read_stats,
    reference_parameter,
    starting_policy,
)
from alignment.full_kl import Head
from alignment.logprobs import LogProbEngine
from alignment.policy import PolicyConfig, model_digest
from alignment.reference_cache import (
    DamagedCacheError,
    LogpTable,
    cache_key,
    cache_path,
    read_table,
    row_keys,
    write_table,
)
from alignment.sharding import in_step
from alignment.spread import whole

log = logging.getLogger(__name__)

ReferenceKind = Literal["auto", "cached", "adapter_off", "frozen_adapter", "copy", "fp8"]
EngineFactory = Callable[[nn.Module], LogProbEngine]


class Reference(ABC):
    """Log-probs of the starting policy. Not a torch module: it adds nothing to a checkpoint, it is rebuilt from the
    configuration, and it follows the policy's device and dtype."""

    kind: ClassVar[str]

    @staticmethod
    def build(
        kind: ReferenceKind,
        policy: nn.Module,
        config: PolicyConfig,
        engine_factory: EngineFactory,
        *,
        finite_data: bool = False,
        entropy: bool = False,
    ) -> Reference:
        """Make the reference of a policy that is still as `load_policy(config)` returned it.

        Args:
            kind: `auto` takes the cheapest form that fits: adapter_off for new adapters, frozen_adapter for a
                pretrained one, else cached with `finite_data`, else copy.
            policy: the policy that is trained.
            config: what it was loaded from.
            engine_factory: makes the log-prob engine of a model.
            finite_data: whether every completion is known before training (a data set, not rollouts).
            entropy: whether cached values hold entropies too, one more number a token; other kinds compute them.

        Raises:
            UserError: unknown kind, or one that would not be the starting policy.
        """
        lora = config.lora
        if kind not in get_args(ReferenceKind):
            raise UserError(f"unknown reference '{kind}'; it is one of {', '.join(get_args(ReferenceKind))}")
        if kind == "auto":
            if lora is not None:
                kind = "adapter_off" if lora.pretrained is None else "frozen_adapter"
            else:
                kind = "cached" if finite_data else "copy"
        if kind in ("adapter_off", "frozen_adapter") and lora is None:
            raise UserError(f"reference={kind} needs policy.lora; without adapters use auto")
        if kind == "adapter_off" and lora is not None and lora.pretrained is not None:
            raise UserError(
                "reference=adapter_off with policy.lora.pretrained would compare with the base, not with the adapter "
                "training starts from; use frozen_adapter, cached or copy"
            )
        if kind == "fp8" and lora is not None:
            raise UserError("reference=fp8 codes a whole model; with policy.lora the adapters cost less: use auto")
        if kind == "fp8":
            from alignment.fp8_reference import Fp8Copy  # here: it is a Reference

            return Fp8Copy(policy, engine_factory)
        if kind == "adapter_off":
            return AdapterOff(policy, engine_factory)
        if kind == "frozen_adapter":
            return FrozenAdapter(policy, engine_factory)
        if kind == "copy":
            return FrozenCopy(policy, config, engine_factory)
        return Cached(policy, config, engine_factory, entropy=entropy)

    def trained(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Name -> (a parameter of the policy that is trained, the reference's own in its place). Raises UserError for a
        kind without weights of its own."""
        raise UserError(f"reference={self.kind} has no weights of its own; use copy, or frozen_adapter with LoRA")

    @abstractmethod
    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        """[C] float32 log-probs under the reference, its logits divided by `temperature`, without gradient; 0 at
        unscored tokens."""

    def token_stats(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        """([C] log-probs, [C] entropies in nats) at temperature 1 in one pass, float32 without gradient; 0 at unscored
        tokens. Raises UserError for a kind that does not know entropies."""
        raise UserError(f"reference={self.kind} has no token entropies; use copy, or another floor of the entropy")

    def states(self, batch: GroupBatch) -> tuple[Tensor, Head]:
        """([C, H] states that predict each token, without gradient; the head that makes logits of them). Raises
        UserError for a kind that keeps log-probs only."""
        raise UserError(f"reference={self.kind} has no states, which a full-vocabulary KL needs; use copy")

    def precompute(  # noqa: B027 (deliberately empty: only one kind has something to prepare)
        self,
        batches: Iterable[GroupBatch],
        cache_dir: Path,
        key_parts: Mapping[str, Any],
        micro_batch_tokens: int | None = None,
    ) -> None:
        """Prepare for a finite data set; every rank calls it with the same batches. Does nothing but in `Cached`."""


class AdapterOff(Reference):
    """The base model under new adapters."""

    kind = "adapter_off"

    def __init__(self, policy: nn.Module, engine_factory: EngineFactory) -> None:
        self._peft = peft_model(policy)
        self._engine = engine_factory(policy)

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        with as_found(self._peft), self._peft.disable_adapter():
            return read_logps(self._engine, batch, temperature)

    def token_stats(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        with as_found(self._peft), self._peft.disable_adapter():
            return read_stats(self._engine, batch)

    def states(self, batch: GroupBatch) -> tuple[Tensor, Head]:
        with as_found(self._peft), self._peft.disable_adapter():
            return read_states(self._engine, batch), Head.of(self._peft)


class FrozenAdapter(Reference):
    """A second adapter named `reference`: the first one's weights as training found them."""

    kind = "frozen_adapter"
    name = "reference"

    def __init__(self, policy: nn.Module, engine_factory: EngineFactory) -> None:
        self._peft = peft_model(policy)
        self._active = self._peft.active_adapter
        with torch.random.fork_rng(devices=[]), as_found(self._peft):
            self._peft.add_adapter(self.name, replace(self._peft.peft_config[self._active], inference_mode=True))
            for source, twin in self.trained().values():
                twin.data = whole(source).detach().clone()
                twin.requires_grad_(False)
        self._engine = engine_factory(policy)

    def trained(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        parameters = dict(self._peft.named_parameters())
        found = {}
        for name, source in parameters.items():
            twin = ".".join(self.name if part == self._active else part for part in name.split("."))
            if twin != name:
                found[name] = (source, parameters[twin])
        return found

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        with self._switched():
            return read_logps(self._engine, batch, temperature)

    def token_stats(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        with self._switched():
            return read_stats(self._engine, batch)

    def states(self, batch: GroupBatch) -> tuple[Tensor, Head]:
        with self._switched():
            return read_states(self._engine, batch), Head.of(self._peft)

    @contextmanager
    def _switched(self) -> Iterator[None]:
        with as_found(self._peft):
            self._peft.set_adapter(self.name, inference_mode=True)
            try:
                yield
            finally:
                self._peft.set_adapter(self._active)


class FrozenCopy(Reference):
    """A second model, loaded from the policy's configuration."""

    kind = "copy"

    def __init__(self, policy: nn.Module, config: PolicyConfig, engine_factory: EngineFactory) -> None:
        self._policy = policy
        self._model = starting_policy(config, like=policy)
        self._engine = engine_factory(self._model)
        self._trained = [p.requires_grad for p in policy.parameters()]

    def trained(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        follow(self._model, self._policy)
        # In order, not by name: a compiler or a sharder puts prefixes to the policy's names.
        both = zip(self._model.named_parameters(), self._policy.parameters(), self._trained, strict=True)
        return {name: (source, own) for (name, own), source, trained in both if trained}

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        follow(self._model, self._policy)
        return read_logps(self._engine, batch, temperature)

    def token_stats(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        follow(self._model, self._policy)
        return read_stats(self._engine, batch)

    def states(self, batch: GroupBatch) -> tuple[Tensor, Head]:
        follow(self._model, self._policy)
        return read_states(self._engine, batch), Head.of(self._model)


class Cached(Reference):
    """Log-probs computed by the starting policy before the first step, kept in a file that content finds again."""

    kind = "cached"

    def __init__(
        self, policy: nn.Module, config: PolicyConfig, engine_factory: EngineFactory, *, entropy: bool = False
    ) -> None:
        self._policy, self._config, self._engine_factory = policy, config, engine_factory
        self._entropy = entropy
        self._digest = model_digest(policy, config)  # of the start: a resumed run has other weights but the same file
        self._table: LogpTable | None = None

    def token_logps(self, batch: GroupBatch, temperature: float = 1.0) -> Tensor:
        if temperature != 1.0:
            raise UserError(f"cached reference log-probs are those at temperature 1, not {temperature}; use copy")
        return self._computed().lookup(batch)

    def token_stats(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        table = self._computed()
        return table.lookup(batch), table.lookup_entropies(batch)

    def _computed(self) -> LogpTable:
        if self._table is None:
            raise UserError("cached reference log-probs are not there yet: call precompute() before training")
        return self._table

    def precompute(
        self,
        batches: Iterable[GroupBatch],
        cache_dir: Path,
        key_parts: Mapping[str, Any],
        micro_batch_tokens: int | None = None,
    ) -> None:
        """Load the table of these rows, or compute it once and save it.

        Args:
            batches: every row that will be asked for; the same on every rank. Their order does not matter.
            cache_dir: folder of the cache files.
            key_parts: what else the values depend on: the tokenizer's digest, token limits, the trainer's precision.
            micro_batch_tokens: bound of tokens in memory at a time.
        """
        parts = list(batches)
        keys = [row_keys(batch) for batch in parts]
        if self._entropy:
            key_parts = {**key_parts, "entropy": True}
        key = cache_key(self._digest, key_parts, sorted({k for part in keys for k in part}))
        path = cache_path(cache_dir, key)
        self._table = _read_agreed(path, key)
        if self._table is not None:
            return
        log.info("reference log-probs: computing %d rows for %s", sum(map(len, keys)), path)
        self._table = self._compute(parts, micro_batch_tokens)
        if distributed.process() == 0:
            _keep(path, key, self._table)
        distributed.gather_from_processes(None)  # nobody goes on, and perhaps ends, while the file is being written

    def _compute(self, parts: list[GroupBatch], micro_batch_tokens: int | None) -> LogpTable:
        """Each rank computes every world-th batch; all ranks get all rows."""
        policy = self._policy
        if model_digest(policy, self._config) != self._digest:
            log.info("reference log-probs: training has moved the policy, loading its start")
            policy = starting_policy(self._config, like=policy)
        engine = self._engine_factory(policy)
        rows: dict[int, Tensor] = {}
        with as_found(policy):
            device = reference_parameter(policy).device
            mine = parts[distributed.rank() :: distributed.world_size()]
            own = (micro for batch in mine for micro in batch.to(device).split(micro_batch_tokens))
            for micro in in_step(policy, own, GroupBatch.from_groups([]).to(device)):
                values = read_stats(engine, micro) if self._entropy else (read_logps(engine, micro),)
                parts_of_rows = torch.split(torch.stack(values).cpu(), micro.completion_lengths.tolist(), dim=1)
                rows.update(zip(row_keys(micro), parts_of_rows, strict=True))
        gathered: dict[int, Tensor] = {}
        for part in distributed.all_gather_objects({k: v.numpy() for k, v in rows.items()}):
            assert isinstance(part, dict)
            gathered.update({k: torch.from_numpy(v) for k, v in part.items()})
        return LogpTable.from_rows(gathered)


def _read_agreed(path: Path, key: str) -> LogpTable | None:
    """The table if every process can read it; one that cannot see the file (another node) makes all compute it."""
    table = None
    if path.is_file():
        try:
            table = read_table(path, key)
        except DamagedCacheError as error:
            log.warning("reference log-probs: %s is damaged (%s) and will be computed again", path, error)
    return table if all(distributed.gather_from_processes(table is not None)) else None


def _keep(path: Path, key: str, table: LogpTable) -> None:
    try:
        write_table(path, key, table)
    except OSError as error:
        log.warning("reference log-probs: not kept for the next run, %s cannot be written: %s", path, error)

