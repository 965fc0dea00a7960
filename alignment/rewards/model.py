"""Learned rewards: sequence classifiers, ours or anybody's, alone or as an ensemble. Run them `in_process`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from alignment.errors import UserError
from alignment.losses import Aggregation, aggregate
from alignment.sources import loading, locate

Reads = Literal["ids", "text", "completion"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class SequenceClassifier:
    """Score of each completion under one or several `AutoModelForSequenceClassification` models.

    A score does not depend on the batch, the padding or the tokenizer's choice of padding token. A completion without a
    token has no score: the reward abstains.

    Args:
        name: folder or hub id of a model with safetensors weights, or a list of them: an ensemble. `alignment export`
            writes a trained RewardModel in this form.
        label: which output is the score. Null: the only one. A label's name or number: its probability. `members`: each
            output is a member of an ensemble.
        aggregation: one score from several members: `mean`, `min`, or `uwo` (mean minus penalty times variance).
        uncertainty_penalty: the penalty of `uwo`.
        reads: `ids`: the tokens of prompt and completion as sampled, for a model with the policy's tokenizer. `text`:
            prompt and completion in one text. `completion`: the completion's text alone.
        max_tokens: longer inputs lose their beginning. Null: what the model can read.
        batch_tokens: upper bound of tokens in one forward, padding included.
        dtype: number format of the weights; scores are float32.
        device: null: the current GPU if there is one (workers see none), else the CPU.
    """

    def __init__(
        self,
        name: str | Sequence[str],
        label: str | int | None = None,
        aggregation: Aggregation = "mean",
        uncertainty_penalty: float = 0.5,
        reads: Reads = "ids",
        max_tokens: int | None = None,
        batch_tokens: int = 8192,
        dtype: DType = "auto",
        device: str | None = None,
    ) -> None:
        if reads not in ("ids", "text", "completion"):
            raise UserError(f"reads is '{reads}'; use ids, text or completion")
        names = [name] if isinstance(name, str) else list(name)
        if not names:
            raise UserError("no model is named")
        self.members = [Classifier(n, reads, max_tokens, batch_tokens, dtype, device) for n in names]
        self.columns = [member.column(label) for member in self.members]
        self.aggregation, self.uncertainty_penalty = aggregation, uncertainty_penalty
        self.reads = reads

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        prompt_ids: list[list[int]] | None = None,
        completion_ids: list[list[int]] | None = None,
    ) -> list[float | None]:
        if self.reads == "ids":
            if prompt_ids is None or completion_ids is None:
                raise ValueError("the samples have no token ids; use reads: text")
            rows: list[list[int] | str] = [p + c for p, c in zip(prompt_ids, completion_ids, strict=True)]
            kept = [i for i, c in enumerate(completion_ids) if c]
        else:
            alone = self.reads == "completion"
            rows = [c if alone else p + c for p, c in zip(prompts, completions, strict=True)]
            kept = [i for i, c in enumerate(completions) if c]
        values: list[float | None] = [None] * len(rows)
        if kept:
            scored = [rows[i] for i in kept]
            scores = torch.cat([m.scores(scored, c) for m, c in zip(self.members, self.columns, strict=True)], dim=1)
            for i, score in zip(
                kept, aggregate(scores, self.aggregation, self.uncertainty_penalty).tolist(), strict=True
            ):
                values[i] = score
        return values


class Classifier:
    """One model with its tokenizer; see SequenceClassifier for the settings."""

    def __init__(
        self,
        name: str,
        reads: Reads,
        max_tokens: int | None = None,
        batch_tokens: int = 8192,
        dtype: DType = "auto",
        device: str | None = None,
    ) -> None:
        place = place_of(device)
        self.name, self.batch_tokens = name, batch_tokens
        self.model, self.tokenizer = load_classifier(name, dtype)
        self.model.to(place).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.tokenizer.truncation_side = "left"
        # Of a model that reads ids the tokenizer is not asked: the ids are the policy's.
        readable = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limits = [max_tokens, readable, None if reads == "ids" else self.tokenizer.model_max_length]
        self.max_tokens = min(int(n) for n in [*limits, 1 << 20] if n is not None)

    def column(self, label: str | int | None) -> int | None:
        """The output that is the score; None: each is. Raises UserError for a label that the model does not have."""
        outputs = int(self.model.config.num_labels or 1)
        names = cast(dict[str | int | None, int], dict(self.model.config.label2id or {}))
        if label == "members" or (label is None and outputs == 1):
            return None
        folded = {str(name).casefold(): number for name, number in names.items()}
        column = names.get(label, folded.get(label.casefold(), label) if isinstance(label, str) else label)
        if isinstance(column, int) and 0 <= column < outputs and outputs > 1:
            return column
        choices = ", ".join(f"'{n}'" for n in names)
        given = f"has no label '{label}'" if label is not None else f"has {outputs} outputs"
        raise UserError(f"reward model '{self.name}' {given}; set label to one of {choices}, or to members")

    def scores(self, rows: Sequence[list[int] | str], column: int | None) -> Tensor:
        """[N, 1] probabilities of an output, or [N, outputs] scores; float32 on the CPU."""
        return self.logits(rows) if column is None else self.probabilities(rows)[:, column, None]

    def probabilities(self, rows: Sequence[list[int] | str]) -> Tensor:
        """[N, outputs], float32 on the CPU: of labels that exclude each other, or, where the model says that a text may
        have several (`problem_type: multi_label_classification`), of each by itself."""
        several = self.model.config.problem_type == "multi_label_classification"
        return self.logits(rows).sigmoid() if several else self.logits(rows).softmax(dim=1)

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int] | str]) -> Tensor:
        """[N, outputs], float32 on the CPU."""
        encoded = [self._encoded(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (-len(encoded[i]), i))
        scores: list[tuple[int, Tensor]] = []
        batch: list[int] = []
        for i in order:
            if batch and (len(batch) + 1) * len(encoded[batch[0]]) > self.batch_tokens:
                scores += zip(batch, self._forward([encoded[j] for j in batch]), strict=True)
                batch = []
            batch.append(i)
        scores += zip(batch, self._forward([encoded[j] for j in batch]), strict=True)
        return torch.stack([score for _, score in sorted(scores, key=lambda s: s[0])])

    def _encoded(self, row: list[int] | str) -> list[int]:
        if isinstance(row, str):
            ids = cast(list[int], self.tokenizer(row, truncation=True, max_length=self.max_tokens)["input_ids"])
            bos = self.tokenizer.bos_token_id  # the text of a rendered prompt may begin with one already
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        if max(row) >= (size := cast(nn.Embedding, self.model.get_input_embeddings()).num_embeddings):
            raise ValueError(f"token {max(row)} is beyond the {size} of reward model '{self.name}'; use reads: text")
        return row[-self.max_tokens :]

    def _forward(self, rows: Sequence[list[int]]) -> Tensor:
        """[rows, outputs], float32 on the CPU."""
        width, config = len(rows[0]), self.model.config.get_text_config()
        # Decoders score the last token that is not padding, by its id: it must not be the id a row ends with.
        ends = {row[-1] for row in rows}
        own = self.tokenizer.pad_token_id
        pad = own if own is not None and own not in ends else next(i for i in range(len(ends) + 1) if i not in ends)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self.model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.model.device)
        before, config.pad_token_id = config.pad_token_id, pad
        try:
            return cast(Tensor, self.model(input_ids=ids, attention_mask=mask).logits.float().cpu())
        finally:
            config.pad_token_id = before


def place_of(device: str | None) -> torch.device:
    """The device named, else the current GPU if there is one, else the CPU. Raises UserError for a GPU that is not
    there, as none is in a reward worker."""
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"device '{device}' is not one of torch's; use cpu, cuda or cuda:NUMBER") from error
    if place.type == "cuda" and (not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count()):
        raise UserError(
            f"device is '{device}', which is not seen here; reward workers see no GPU: set in_process: true, or "
            "device: cpu"
        )
    return place


def load_classifier(
    name: str, dtype: DType | torch.dtype, attention: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier and its tokenizer, from a folder or hub id with safetensors weights.

    Args:
        attention: attention implementation of transformers; None: its own choice.

    Raises:
        UserError: nothing of the kind there, no trained head, or a part of the head that transformers would leave out.
    """
    if (Path(name) / "manifest.json").is_file():
        raise UserError(f"'{name}' is a checkpoint; write the reward model with `alignment export` first")
    source = locate(name)
    with loading(f"reward model '{name}'"):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            source.location,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source.location)
    if report["missing_keys"]:
        raise UserError(f"'{name}' is no sequence classifier: it lacks {sorted(report['missing_keys'])[0]}")
    if unused := sorted(key for key in report["unexpected_keys"] if key.startswith("score.")):
        raise UserError(f"'{name}' has {unused[0]}, for which {type(model).__name__} of transformers has no place")
    return model, tokenizer
