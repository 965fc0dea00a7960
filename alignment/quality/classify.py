"""Any sequence classifier of transformers over texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from alignment.rewards.model import load_classifier

_BATCH = 16


def classify(name: str, texts: Sequence[str]) -> list[dict[str, float]]:
    """label -> probability of each text: a sigmoid for models of several labels at once or of one, else a softmax.

    Args:
        name: folder or hub id of a model with safetensors weights.
        texts: longer ones lose their end.

    Raises UserError where there is no classifier of that name.
    """
    from transformers import pipeline  # here: it takes a second, and most checks do without

    model, tokenizer = load_classifier(name, "float32")
    readable = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = min(int(n) for n in (tokenizer.model_max_length, readable, 1 << 20) if n is not None)
    # A decoder scores its last token that is no padding: without a padding token both agree on, one text at a time.
    pads = tokenizer.pad_token_id is not None and tokenizer.pad_token_id == model.config.get_text_config().pad_token_id
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run: Any = pipeline("text-classification", model=model, tokenizer=cast(Any, tokenizer), device=device)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # batches of similar lengths
    found = run(
        [texts[i] for i in order], top_k=None, truncation=True, max_length=most, batch_size=_BATCH if pads else 1
    )
    out: list[dict[str, float]] = [{} for _ in texts]
    for i, scores in zip(order, found, strict=True):
        out[i] = {str(score["label"]): float(score["score"]) for score in scores}
    return out
