"""A language model for the support world alone, from random weights: `python -m alignment.quickstart --model tiny`.

Its vocabulary is closed: the words of the world, and the syllables of product names, so that a name never seen in
training is still spelt. With a few hundred words instead of bytes a prompt has about 50 tokens, and a Llama of two
layers learns to speak like an agent within a minute on two cores.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alignment import world

PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = "<pad>", "<unk>", "<system>", "<user>", "<assistant>", "<end>"
_SPECIALS = (PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END)
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def world_tokenizer() -> PreTrainedTokenizerFast:
    """Words and punctuation of the world, product names in two syllables; anything else is `<unk>`."""
    words = sorted({word for text in world.texts() for word in re.findall(r"\w+|[^\w\s]", text)})
    first, last = world.syllables()
    pieces = [*_SPECIALS, *words, *(s for s in first if s not in words), *(f"##{s}" for s in last)]
    core = Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token=UNKNOWN))
    core.normalizer = normalizers.Strip()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def world_model(vocabulary: int, seed: int = 0) -> LlamaForCausalLM:
    """A two-layer Llama of about 250,000 parameters; the global random state stays as it was."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=_SPECIALS.index(END),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_world_model(folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer as a transformers folder, over an earlier one, and return it."""
    tokenizer = world_tokenizer()
    world_model(len(tokenizer), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
