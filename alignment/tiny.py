"""A small Llama and its tokenizer, built from nothing in well under a second: `policy.name: tiny`.

They exist so that tests and smoke configs need no file, no network and no minutes. The tokenizer round-trips any text:
it knows the 256 bytes, the beginnings of some common words, and a chat template of the ChatML kind. Padding and end of
text are different tokens, as they should be everywhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, START, EOS = "<pad>", "<bos>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, BOS, START, EOS)
VOCAB_SIZE = 512

# Every message is one <|im_start|>role\ncontent<|im_end|> block; the template writes the one BOS, the tokenizer none.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_PAIRS = (
    "in er on re an th es en or ti st ar al it le ou nd ed ng ly to ha ve is me as ur ll he se ea ro io ne co ra li ic "
    "om us no ce ma ta si Th Yo pe ch sh wo"
)
_WORDS = (
    "the you your for and that this with can have will help please thank sorry happy would like order return product "
    "battery warranty days hours work does how what when where which are is it in of to on a be not no yes our we from "
    "support contact charge water cable model price month year free box store device reply question answer know"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with 512 entries: 4 specials, 256 bytes, then merges for common words and letter pairs.

    pad 0, bos 1, `<|im_start|>` 2, eos `<|im_end|>` 3. `decode(encode(text)) == text` for every string.
    """
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for left, right in _merge_candidates():
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _merge_candidates() -> list[tuple[str, str]]:
    """Merges in rank order: word beginnings grow letter by letter from the space ("Ġ" in byte-level spelling), so a
    word is cut at its longest known beginning; letter pairs shorten the rest."""
    words = [("Ġ" + word[:i], word[i]) for word in _WORDS.split() for i in range(len(word))]
    pairs = [(pair[0], pair[1]) for pair in _PAIRS.split()]
    return words + pairs


def tiny_config(vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    """Two Llama layers, about 250,000 parameters with the tiny tokenizer."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )


def tiny_model(seed: int = 0, vocab_size: int = VOCAB_SIZE, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model of `tiny_config` with weights drawn from `seed`; random state stays as it was."""
    # Drawn on the CPU in fp32 whatever the surrounding device or dtype context, so that a seed is one set of weights.
    # Seeding the CPU generator alone: torch.manual_seed would also reseed every accelerator.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model: LlamaForCausalLM = LlamaForCausalLM._from_config(  # type: ignore[no-untyped-call]
            tiny_config(vocab_size), dtype=torch.float32
        )
    nn.Module.to(model, dtype)
    return model


def save_tiny(folder: str | Path, seed: int = 0) -> Path:
    """Write model and tokenizer as an ordinary transformers folder and return it."""
    folder = Path(folder)
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
