"""Small models for rewards, made so that what they give can be worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from alignment.tiny import tiny_tokenizer

WORDS = ["[PAD]", "<s>", "[UNK]", "a", "red", "green", "square", "</s>"]
"""What the small CLIP model reads; its end of text is not id 2, which transformers takes for an old mistake."""
LONGEST = 8
COLOURS = {"red": (200, 10, 10), "green": (10, 200, 10)}


def save_classifier(folder: Path, probabilities: dict[str, float], several: bool = False) -> str:
    """A classifier with these probabilities of its labels for whatever it reads; returns its name."""
    config = BertConfig(vocab_size=512, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    config.num_labels = len(probabilities)
    config.id2label = dict(enumerate(probabilities))
    config.label2id = {label: i for i, label in config.id2label.items()}
    config.problem_type = "multi_label_classification" if several else "single_label_classification"
    model = BertForSequenceClassification(config)
    odds = [math.log(p / (1 - p)) if several else math.log(p) for p in probabilities.values()]
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor(odds))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def save_counts(folder: Path, words: list[str]) -> str:
    """A sentence-transformers model whose embedding is the mean of one-hot words: cosines are those of word counts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    vocabulary = ["[UNK]", *words]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    weights = torch.eye(len(vocabulary))
    weights[0] = 0
    embedding = StaticEmbedding(tokenizer, embedding_weights=weights)
    SentenceTransformer(modules=[embedding], device="cpu").save_pretrained(str(folder), create_model_card=False)
    return str(folder)


def save_clip(folder: Path) -> str:
    """A CLIP model of random weights that reads 8 tokens and pictures of 8 x 8."""
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": len(WORDS), "max_position_embeddings": LONGEST}
    text |= {"bos_token_id": 1, "eos_token_id": WORDS.index("</s>"), "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config={**tower, "image_size": 8, "patch_size": 4}, projection_dim=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).eval().save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    ends = [("<s>", 1), ("</s>", WORDS.index("</s>"))]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="</s>").save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(folder)
    return str(folder)


def save_pictures(folder: Path) -> None:
    """red.png and green.png, 8 x 8 of one colour."""
    folder.mkdir(exist_ok=True)
    for name, colour in COLOURS.items():
        Image.new("RGB", (8, 8), colour).save(folder / f"{name}.png")


def clip_cosine(folder: str, words: list[str], colour: str) -> float:
    """Of the two towers themselves, the picture normalised with the constants of OpenAI's CLIP."""
    model = CLIPModel.from_pretrained(folder).eval()
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.tensor((np.array(COLOURS[colour]) / 255 - mean) / std, dtype=torch.float32)
    text = ["<s>", *words, "</s>"]
    with torch.no_grad():
        seen = model.visual_projection(model.vision_model(pixels[None, :, None, None].expand(1, 3, 8, 8)).pooler_output)
        ids = torch.tensor([[WORDS.index(word) for word in text]])
        read = model.text_projection(model.text_model(ids).last_hidden_state[0, -1])[None]
        return torch.nn.functional.cosine_similarity(seen, read).item()
