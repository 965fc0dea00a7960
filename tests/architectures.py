"""Small random models of many architectures, built from their transformers configs, and ragged batches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf

from alignment.batches import Group, GroupBatch

VOCAB = 97
WINDOW = 8  # shorter than every prompt of `ragged_batch` but one

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LOCAL_GLOBAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GPT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

DENSE: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_COMMON),
    "llama-tied": lambda: hf.LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**_COMMON),
    "qwen2-window": lambda: hf.Qwen2Config(
        **_COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**_COMMON, head_dim=8),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_COMMON, **_LOCAL_GLOBAL, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=3.0
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **_COMMON,
        **_LOCAL_GLOBAL,
        head_dim=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=3.0,
        attn_implementation="eager",
    ),
    "mistral": lambda: hf.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "phi3": lambda: hf.Phi3Config(**_COMMON, sliding_window=WINDOW),
    "gpt-neox": lambda: hf.GPTNeoXConfig(
        **_GPT, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    ),
    "gpt2": lambda: hf.GPT2Config(**_GPT, **_NO_DROPOUT, n_embd=32, n_layer=3, n_head=4, n_positions=128),
    "olmo2": lambda: hf.Olmo2Config(**_COMMON),
    "smollm3": lambda: hf.SmolLM3Config(**_COMMON),
    "granite": lambda: hf.GraniteConfig(**_COMMON, logits_scaling=2.0),
    "cohere2": lambda: hf.Cohere2Config(**_COMMON, **_LOCAL_GLOBAL),
    "llama-eager": lambda: hf.LlamaConfig(**_COMMON, attn_implementation="eager"),
}
MIXTURES: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **_COMMON, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: hf.MixtralConfig(**_COMMON, num_local_experts=4),
    "llama4-chunked": lambda: hf.Llama4TextConfig(
        **_COMMON,
        head_dim=8,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        intermediate_size_mlp=32,
        no_rope_layers=[1, 1, 0],
    ),
}
PLAIN_ONLY: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "bloom (alibi)": lambda: hf.BloomConfig(**_GPT, hidden_size=32, n_layer=2, n_head=4),
    "mamba (recurrent)": lambda: hf.MambaConfig(**_GPT, hidden_size=32, num_hidden_layers=2),
    "falcon (alibi)": lambda: hf.FalconConfig(
        **_GPT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "qwen3-next (linear attention)": lambda: hf.Qwen3NextConfig(
        **_COMMON,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}


def build(config: hf.PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> hf.PreTrainedModel:
    """A model in train mode with weights large enough that attention matters (a fresh model hardly looks back)."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).train()


def token_ids(n: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def ragged_batch() -> GroupBatch:
    """1 to 3 completions a group, one of them empty, one not scored, one with a gap; one prompt of a single token."""
    gap = [True, True, False, False, True, True, True]
    return GroupBatch.from_groups(
        [
            Group(prompt=token_ids(21, 1), completions=[token_ids(7, 2), token_ids(12, 3)], scored=[gap, [True] * 12]),
            Group(prompt=token_ids(1, 4), completions=[token_ids(4, 5)]),
            Group(prompt=token_ids(9, 6), completions=[token_ids(5, 7), [], token_ids(3, 8)]),
            Group(prompt=token_ids(10, 9), completions=[token_ids(3, 10)], scored=[[False] * 3]),
        ]
    )
