"""The shared-prefix path against the plain one, over architectures, precisions, adapters and odd batches."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from alignment.batches import Group, GroupBatch
from alignment.logprobs import BF16_BOUND, LogProbEngine
from alignment.probe import obstacle
from tests.architectures import DENSE, MIXTURES, PLAIN_ONLY, build, ragged_batch, token_ids

ARCHITECTURES = {**DENSE, **MIXTURES}
every_architecture = pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)


def engines(model: nn.Module) -> tuple[LogProbEngine, LogProbEngine]:
    return LogProbEngine(model, path="plain"), LogProbEngine(model, path="shared", tile_bytes=1 << 11)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("alignment")]


def gradients(model: nn.Module) -> torch.Tensor:
    out = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return out


@every_architecture
@pytest.mark.parametrize("hidden", ["before", "at"])
def test_shared_equals_plain_in_fp32(config, hidden):
    model, batch = build(config()), ragged_batch()
    mix = torch.linspace(-1.0, 1.5, len(batch.completion_ids))
    seen = []
    for engine in engines(model):
        out = engine(batch, entropy=True, hidden=hidden, temperature=0.8)
        (mix * out.logps + mix.flip(0) * out.entropy + mix * out.hidden.square().mean(-1)).sum().backward()
        seen.append((out, gradients(model)))
    (plain, plain_gradient), (shared, shared_gradient) = seen
    for a, b in ((plain.logps, shared.logps), (plain.entropy, shared.entropy), (plain.hidden, shared.hidden)):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=0)
    assert torch.cosine_similarity(plain_gradient.double(), shared_gradient.double(), dim=0) >= 0.999999
    torch.testing.assert_close(shared_gradient.norm(), plain_gradient.norm(), rtol=1e-5, atol=0)


@every_architecture
def test_shared_equals_plain_in_bf16(config):
    model, batch = build(config(), dtype=torch.bfloat16), ragged_batch()
    with torch.no_grad():
        plain, shared = (engine(batch) for engine in engines(model))
    assert shared.logps.dtype == torch.float32
    torch.testing.assert_close(shared.logps, plain.logps, atol=BF16_BOUND, rtol=0)


def test_plain_equals_one_causal_run_per_completion():
    """The oracle against the model itself: no batch, no padding, no mask."""
    model, batch = build(DENSE["gemma3"]()), ragged_batch()
    out = LogProbEngine(model, path="plain")(batch, entropy=True, temperature=0.8)
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    completions = batch.completion_ids.split(batch.completion_lengths.tolist())
    expected_logps, expected_entropy = [], []
    for group, completion in zip(batch.group_of.tolist(), completions, strict=True):
        ids = torch.cat([prompts[group], completion])
        log_p = (model(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)[len(prompts[group]) - 1 : -1]
        expected_logps.append(log_p[torch.arange(len(completion)), completion])
        expected_entropy.append(-(log_p.exp() * log_p).sum(-1))
    expected_logps, expected_entropy = torch.cat(expected_logps), torch.cat(expected_entropy)
    torch.testing.assert_close(out.logps, torch.where(batch.scored, expected_logps, 0), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy, torch.where(batch.scored, expected_entropy, 0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["plain", "shared"])
def test_unscored_tokens_have_exactly_zero_and_no_gradient(path):
    model, batch = build(DENSE["llama"]()), ragged_batch()
    out = LogProbEngine(model, path=path)(batch, entropy=True)
    assert (out.logps[~batch.scored] == 0).all()
    assert (out.entropy[~batch.scored] == 0).all()
    assert (out.logps[batch.scored] < 0).all()
    out.logps[~batch.scored].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("path", ["plain", "shared"])
def test_hidden_before_predicts_and_hidden_at_has_read(path):
    model, batch = build(DENSE["llama"]()), ragged_batch()
    engine = LogProbEngine(model, path=path)
    before = engine(batch, logps=False, hidden="before").hidden
    at = engine(batch, logps=False, hidden="at").hidden
    first = torch.cat([torch.tensor([True]), batch.row_of().diff() != 0])
    torch.testing.assert_close(before[1:][~first[1:]], at[:-1][~first[1:]], atol=1e-6, rtol=0)
    log_p = model.lm_head(before).log_softmax(-1)
    expected = log_p[torch.arange(len(before)), batch.completion_ids]
    torch.testing.assert_close(engine(batch).logps[batch.scored], expected[batch.scored], atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["plain", "shared"])
def test_nothing_to_compute_gives_zeros_without_running_the_model(path):
    model = build(DENSE["llama"]())
    engine = LogProbEngine(model, path=path)
    engine.verify()
    model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    model.model.register_forward_hook(lambda *_: pytest.fail("the trunk ran"))
    nothing = engine(GroupBatch.from_groups([]), entropy=True, hidden="at")
    assert nothing.logps.shape == nothing.entropy.shape == (0,)
    assert nothing.hidden.shape == (0, 32)
    empty = engine(GroupBatch.from_groups([Group(prompt=[5], completions=[[], []])]), hidden="before")
    assert empty.logps.shape == (0,)
    assert empty.hidden.shape == (0, 32)
    unscored = engine(GroupBatch.from_groups([Group(prompt=[5], completions=[[7, 8]], scored=[[False, False]])]))
    assert unscored.logps.tolist() == [0.0, 0.0]
    assert unscored.entropy is None
    assert unscored.hidden is None


def test_the_vocabulary_is_projected_at_scored_positions_only():
    """Two of 47 completion tokens scored: neither path makes logits for the other positions."""
    model = build(DENSE["llama"]())
    scored = [[True, True] + [False] * 18, [False] * 27]
    batch = GroupBatch.from_groups([Group(prompt=token_ids(9, 0), completions=[[5] * 20, [6] * 27], scored=scored)])
    seen = []
    model.lm_head.register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape[:-1]))
    LogProbEngine(model, path="plain")._plain(batch, batch.scored.nonzero()[:, 0], False, None, 1.0)
    assert seen == [(2, 2)]  # two rows, the two columns that some row scores


# ---------------------------------------------------------------------- wrappers and modes


def lora(model: nn.Module, **options) -> peft.PeftModel:
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def test_lora_trains_on_the_shared_path_and_can_be_switched_off():
    base = build(DENSE["llama"]())
    batch = ragged_batch()
    with torch.no_grad():
        without = LogProbEngine(base, path="shared")(batch).logps
    model = lora(base, target_modules="all-linear")
    plain, shared = engines(model)
    out = []
    for engine in (plain, shared):
        logps = engine(batch).logps
        logps.sum().backward()
        out.append((logps, gradients(model)))
    assert shared.path == "shared"
    torch.testing.assert_close(out[1][0], out[0][0], atol=1e-5, rtol=0)
    assert torch.cosine_similarity(out[0][1], out[1][1], dim=0) >= 0.999999
    assert (out[1][0] - without).abs().max() > 0.1
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(shared(batch).logps, without)


def test_a_wrapped_head_takes_the_plain_path(caplog):
    model = lora(build(DENSE["llama"]()), target_modules=["q_proj", "lm_head"])
    engine = LogProbEngine(model)
    with caplog.at_level(logging.WARNING):
        out = engine(ragged_batch()).logps
    assert engine.path == "plain"
    assert "LM head" in engine.reason
    assert len(warnings_of(caplog)) == 1
    out.sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "lm_head.lora" in n)


def test_gradient_checkpointing_changes_nothing():
    model, batch = build(DENSE["llama"]()), ragged_batch()
    engine = LogProbEngine(model, path="shared")
    engine(batch).logps.sum().backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine(batch).logps.sum().backward()
    torch.testing.assert_close(gradients(model), expected, atol=1e-6, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    model, batch = build(DENSE["llama"]()), ragged_batch()
    model.lm_head.weight.requires_grad_(False)
    LogProbEngine(model, path="shared")(batch).logps.sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base(bits, tmp_path):
    build(DENSE["llama"]()).save_pretrained(tmp_path)
    quantisation = hf.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantisation, dtype=torch.float32)
    plain, shared = engines(lora(model.train(), target_modules=["q_proj", "v_proj"]))
    a, b = (engine(ragged_batch()).logps for engine in (plain, shared))
    torch.testing.assert_close(b, a, atol=QUANTISED_BOUND[bits], rtol=0)
    b.sum().backward()


# 4-bit weights are multiplied in fp32; 8-bit rounds every activation row to 8 bits, rarely to another step
QUANTISED_BOUND = {4: 1e-4, 8: 5e-2}


def test_a_trunk_without_head_gives_states_only():
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(DENSE["llama"]())
    plain, shared = engines(model)
    a, b = (engine(ragged_batch(), logps=False, hidden="at").hidden for engine in (plain, shared))
    torch.testing.assert_close(b, a, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="no LM head"):
        shared(ragged_batch())


# ---------------------------------------------------------------------- detection


@pytest.mark.parametrize("config", PLAIN_ONLY.values(), ids=PLAIN_ONLY)
def test_what_cannot_share_a_prompt_is_detected_and_said_once(config, caplog):
    engine = LogProbEngine(build(config()))
    with caplog.at_level(logging.WARNING, logger="alignment"):
        first = engine(ragged_batch()).logps
        second = engine(ragged_batch()).logps
    assert engine.path == "plain"
    (warning,) = warnings_of(caplog)
    assert engine.reason in warning
    assert torch.equal(first, second)


class Deaf(nn.Module):
    """An attention layer that drops the mask it is given and is causal by itself."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args, attention_mask=None, **kwargs):
        width = kwargs["hidden_states"].shape[1]
        return self.attention(*args, attention_mask=torch.ones(1, 1, width, width).bool().tril(), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_ignores_the_mask_is_found_by_the_probe(dtype, caplog):
    model = build(DENSE["llama"](), dtype=dtype)
    model.model.layers[1].self_attn = Deaf(model.model.layers[1].self_attn)
    engine = LogProbEngine(model)
    with caplog.at_level(logging.WARNING, logger="alignment"):
        engine.verify()
        engine.verify()
    assert engine.path == "plain"
    assert "hidden states differ" in engine.reason
    assert len(warnings_of(caplog)) == 1
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM: its hidden states differ"):
        LogProbEngine(model, path="shared").verify()


def test_a_head_that_the_config_does_not_describe_is_found_by_the_probe():
    class Louder(hf.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.1
            return out

    engine = LogProbEngine(Louder(DENSE["llama"]()))
    engine.verify()
    assert engine.path == "plain"
    assert "log-probs differ" in engine.reason


def test_flash_attention_is_an_obstacle():
    model = build(DENSE["llama"]())
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in obstacle(model.model, model.lm_head, model.config)
    model.config._attn_implementation = "sdpa"
    assert obstacle(model.model, model.lm_head, model.config) == ""


def test_autocast_around_the_first_call_does_not_cost_the_shared_path():
    model, batch = build(DENSE["llama"]()), ragged_batch()
    engine = LogProbEngine(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps = engine(batch).logps
        expected = LogProbEngine(model, path="plain")(batch).logps
    assert engine.path == "shared"
    torch.testing.assert_close(logps, expected, atol=BF16_BOUND, rtol=0)
    logps.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_verify_leaves_modes_and_gradients_alone():
    model = build(DENSE["llama"]())
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    LogProbEngine(model).verify()
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_models_that_cannot_be_scored_are_refused():
    t5 = hf.T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        LogProbEngine(hf.T5ForConditionalGeneration(t5))
    bert = hf.BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="lets a token see later ones"):
        LogProbEngine(build(bert)).verify()
    with pytest.raises(ValueError, match="no transformers model"):
        LogProbEngine(nn.Linear(2, 2))
    prompted = peft.get_peft_model(
        build(DENSE["llama"]()), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="adds tokens to its input"):
        LogProbEngine(prompted).verify()


def test_arguments_are_checked():
    model = build(DENSE["llama"]())
    with pytest.raises(ValueError, match="'auto', 'shared' or 'plain', not 'fast'"):
        LogProbEngine(model, path="fast")
    with pytest.raises(ValueError, match="temperature must be above 0"):
        LogProbEngine(model)(ragged_batch(), temperature=0.0)
