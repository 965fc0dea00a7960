"""Rewards for text about sound and pictures: word error rate of a transcript, CLIPScore of a caption."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import UserError
from alignment.rewards.extra import needed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NO_WORD = re.compile(r"[^\w\s']")


class WordErrorRate:
    """1 - WER of a completion against the row's transcript, not below 0: WER = (substitutions + deletions + insertions)
    / words of the transcript, by jiwer (extra `rewards`). Abstains where the row has no transcript.

    Args:
        column: data column with the right transcript.
        plain: compare words without regard to case and punctuation (apostrophes stay).
    """

    def __init__(self, column: str = "transcript", plain: bool = True) -> None:
        self._rate = needed("jiwer", "jiwer").wer
        self.needs_columns = (column,)
        self.column, self.plain = column, plain

    def __call__(self, completion: str, columns: Mapping[str, Any]) -> float | None:
        expected = columns[self.column]
        reference = None if expected is None else self._words(str(expected))
        if not reference:
            return None
        return max(0.0, 1 - float(self._rate(reference, self._words(completion))))

    def _words(self, text: str) -> str:
        return " ".join((_NO_WORD.sub(" ", text.casefold()) if self.plain else text).split())


class CLIPScore:
    """Cosine of a completion and the row's picture under a CLIP model, 0 where negative: torchmetrics' CLIPScore over
    100 (Hessel et al. 2021, arXiv 2104.08718, without its factor 2.5). Abstains on a blank completion and where the row
    has no picture. Text beyond what the model reads (77 tokens) is cut off.

    Args:
        name: local folder or hub id of a CLIP model with safetensors weights.
        column: data column with the picture: a path below `folder`, or a mapping with `bytes` or `path`, as `datasets`
            keeps pictures. Rows are not trusted: a path that leads out of the folder is a fault of its row.
        folder: where the pictures are.
        device: null: the current GPU if there is one (workers see none), else the CPU.
    """

    def __init__(self, name: str, column: str = "image", folder: str = ".", device: str | None = None) -> None:
        from alignment.rewards.model import place_of

        root = Path(folder).expanduser()
        if not root.is_dir():
            raise UserError(f"no folder '{folder}' with pictures")
        self._root, self._place = root.resolve(), place_of(device)
        self._model, self._processor = _load_clip(name, self._place)
        self.needs_columns = (column,)
        self.column = column

    def __call__(self, completions: list[str], columns: list[Mapping[str, Any]]) -> list[float | Exception | None]:
        return [self._score(text, row.get(self.column)) for text, row in zip(completions, columns, strict=True)]

    def _score(self, text: str, picture: Any) -> float | Exception | None:
        import torch
        from torchmetrics.functional.multimodal import clip_score

        if picture is None or not text.strip():
            return None
        try:
            pixels = self._pixels(picture).to(self._place)
        except (OSError, ValueError, SyntaxError) as error:  # PIL raises each of them for what is no picture
            return error
        with torch.inference_mode():
            return float(clip_score(pixels, text, self._loaded)) / 100

    def _loaded(self) -> Any:
        """Model and processor, which torchmetrics would load anew for each call."""
        return self._model, self._processor

    def _pixels(self, picture: Any) -> Tensor:
        """[3, height, width] uint8. Raises OSError, ValueError or SyntaxError for what is no picture of the folder."""
        import numpy as np
        import torch
        from PIL import Image

        source: Any = picture
        if isinstance(picture, Mapping):
            source = picture.get("bytes") or picture.get("path")
        if isinstance(source, bytes):
            source = io.BytesIO(source)
        elif isinstance(source, str):
            source = (self._root / source).resolve()
            if not source.is_relative_to(self._root):
                raise ValueError(f"column '{self.column}' names a file outside of {self._root}")
        else:
            raise ValueError(f"column '{self.column}' holds a {type(source).__name__}, neither a path nor bytes")
        try:
            with Image.open(source) as image:
                return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        except Image.DecompressionBombError as error:
            raise ValueError(f"column '{self.column}': {error}") from error


class _Features:
    """A CLIP model in the form that torchmetrics calls: features are tensors, which transformers 5 wraps."""

    def __init__(self, model: Any) -> None:
        self._model, self.config = model, model.config

    def to(self, device: torch.device) -> _Features:
        self._model.to(device)
        return self

    def get_image_features(self, pixel_values: Tensor) -> Any:
        return self._model.get_image_features(pixel_values=pixel_values).pooler_output

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self._model.get_text_features(input_ids=input_ids, attention_mask=attention_mask).pooler_output


class _Processor:
    """What torchmetrics calls a processor. The tokenizer cuts text, and keeps the end of text, where CLIP reads."""

    def __init__(self, images: Any, tokenizer: Any, longest: int) -> None:
        self._images, self._tokenizer, self._longest = images, tokenizer, longest

    def __call__(self, text: Any = None, images: Any = None, **settings: Any) -> Any:
        if images is not None:
            return self._images(images=images, return_tensors="pt")
        return self._tokenizer(text, padding=True, truncation=True, max_length=self._longest, return_tensors="pt")


def _load_clip(name: str, place: torch.device) -> tuple[_Features, _Processor]:
    """Raises UserError for what is no CLIP model."""
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    from alignment.sources import loading, locate

    source = locate(name)
    load: Any = CLIPModel.from_pretrained
    load_images: Any = AutoImageProcessor.from_pretrained
    with loading(f"CLIP model '{name}'"):
        model, report = load(source.location, use_safetensors=True, output_loading_info=True)
        images = load_images(source.location)
        tokenizer = AutoTokenizer.from_pretrained(source.location)
    if report["missing_keys"]:
        raise UserError(f"'{name}' is no CLIP model: it lacks {sorted(report['missing_keys'])[0]}")
    model.to(place).eval().requires_grad_(False)
    return _Features(model), _Processor(images, tokenizer, int(model.config.text_config.max_position_embeddings))
