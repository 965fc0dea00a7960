"""The built-in model and tokenizer: deterministic, quick, and ordinary transformers objects."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.tiny import VOCAB_SIZE, save_tiny, tiny_model, tiny_tokenizer

TEXTS = ["hello the world", "  two  spaces\n\ttabs ", "ünïcode 🎉 中文 \u200b", "don't ,x . y", "", "\x00\r\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_random_unicode_round_trips() -> None:
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    for _ in range(50):
        text = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA0, 0xD7FF)])) for _ in range(40))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_specials_are_distinct_and_the_vocabulary_is_full() -> None:
    tokenizer = tiny_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 3)
    assert len(tokenizer) == VOCAB_SIZE == tiny_model().config.vocab_size


def test_the_chat_template_handles_system_messages_and_the_generation_prompt() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    full = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "Yo"}], tokenize=False)
    assert prompt == (
        "<bos><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert full == prompt + "Yo<|im_end|>\n"


def test_the_template_marks_assistant_tokens() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "Yo<|im_end|>"


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = tiny_model(seed=5)
    assert torch.equal(torch.get_rng_state(), before), "building the model moved the global random state"
    torch.manual_seed(2)
    b, c = tiny_model(seed=5), tiny_model(seed=6)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_it_is_built_in_less_than_a_second() -> None:
    start = time.process_time()
    tiny_model()
    tiny_tokenizer()
    assert time.process_time() - start < 1.0


def test_the_saved_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("please help")["input_ids"]])
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert torch.equal(model(ids).logits, tiny_model(seed=3)(ids).logits)
