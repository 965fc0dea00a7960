"""LocalRollout: greedy decoding against generate(), stored log-probs against training's, stops, modes, adapters."""

from __future__ import annotations

import gc
import itertools

import peft
import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment.batches import Group
from alignment.errors import UserError
from alignment.kv_cache import KVCache
from alignment.local_rollout import LocalRollout
from alignment.logprobs import LogProbEngine
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.rollout import Rollout, RolloutStopped, SamplingConfig, completion_keys, stop_ids_of
from tests.architectures import DENSE, MIXTURES, PLAIN_ONLY, build, token_ids

SHARED = {**DENSE, **MIXTURES}
# Enough for the window of 8 tokens to slide over prompt and completion.
LENGTHS = (1, 6, 17)
NEW = 10
EOS = 2


def prompts(lengths: tuple[int, ...], each: int = 1) -> list[Group]:
    ids = [token_ids(n, 100 * n + i) for n in lengths for i in range(each)]
    return [Group(prompt=p, completions=(), index=i, columns={"row": i}) for i, p in enumerate(ids)]


def local(model: torch.nn.Module, **options: object) -> LocalRollout:
    return LocalRollout(model, **{"pad_id": 0, "stop_ids": [EOS], **options})


def completions(rollout: Rollout) -> list[list[int]]:
    batch = rollout.batch
    return [c.tolist() for c in torch.split(batch.completion_ids, batch.completion_lengths.tolist())]


def generated(model: hf.PreTrainedModel, groups: list[Group], stop: list[int]) -> list[list[int]]:
    """Greedy completions by generate(), prompts of one length at a time so that nothing is padded."""
    out: dict[int, list[int]] = {}
    for length, members in itertools.groupby(groups, key=lambda g: len(g.prompt)):
        part = list(members)
        ids = torch.tensor([list(g.prompt) for g in part])
        rows = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=stop,
            pad_token_id=0,
        )[:, length:]
        for group, row in zip(part, rows.tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
            out[group.index] = row[:end]
    return [out[i] for i in range(len(groups))]


# ----------------------------------------------------------------------------------------------- against generate()


@pytest.mark.parametrize("name", [*SHARED, *PLAIN_ONLY])
def test_greedy_tokens_equal_generate(name):
    """201 prompts of each architecture; in float64, where no two tie."""
    model = build({**SHARED, **PLAIN_ONLY}[name](), dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # the others know no float64
    rollout = local(model, stop_ids=[EOS, 40, 41, 42])
    groups = prompts(LENGTHS, each=67)
    found = rollout.generate(groups, 1, SamplingConfig(temperature=0.0, max_tokens=NEW), seed=0, step=0)
    assert completions(found) == generated(model, groups, [EOS, 40, 41, 42])
    assert rollout.path == ("shared" if name in SHARED else "plain")


def test_greedy_tokens_equal_generate_in_fp32_but_for_ties():
    """Where they part, the two tokens are closer than 1e-5."""
    model = build(DENSE["qwen3"]()).eval()
    groups = prompts(LENGTHS, each=20)
    found = local(model).generate(groups, 1, SamplingConfig(temperature=0.0, max_tokens=NEW), seed=0, step=0)
    for group, ours, theirs in zip(groups, completions(found), generated(model, groups, [EOS]), strict=True):
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
            with torch.no_grad():
                logits = model(torch.tensor([[*group.prompt, *ours[:at]]])).logits[0, -1]
            assert abs(logits[ours[at]] - logits[theirs[at]]) < 1e-5


# --------------------------------------------------------------------------------------- against training's log-probs


@pytest.mark.parametrize("name", [*SHARED, *PLAIN_ONLY])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_stored_log_probs_equal_training_ones(name, temperature):
    model = build({**SHARED, **PLAIN_ONLY}[name]())
    found = local(model, stop_ids=range(2, 12)).generate(
        prompts((21, 1, 9)), 3, SamplingConfig(temperature=temperature, max_tokens=NEW), seed=0, step=0
    )
    with torch.no_grad():
        expected = LogProbEngine(model)(found.batch, temperature=temperature).logps
    torch.testing.assert_close(found.sampler_logps, expected, atol=1e-5, rtol=0)


def test_stored_log_probs_ignore_filters_and_minimum_length():
    model = build(DENSE["llama"]())
    sampling = SamplingConfig(temperature=0.7, top_k=5, top_p=0.8, min_p=0.05, min_tokens=4, max_tokens=8)
    found = local(model, stop_ids=range(2, 60)).generate(prompts((7, 3)), 4, sampling, seed=0, step=0)
    with torch.no_grad():
        expected = LogProbEngine(model)(found.batch, temperature=0.7).logps
    torch.testing.assert_close(found.sampler_logps, expected, atol=1e-5, rtol=0)
    assert found.batch.completion_lengths.min() >= 4


def test_the_first_pass_has_ratio_one_despite_dropout():
    """CASES C8: temperature 0.6 and dropout in the model's config; the sampler runs without it, in any mode."""
    config = DENSE["gpt2"]()
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.3
    model = build(config)
    before = [m.training for m in model.modules()]
    found = local(model).generate(prompts((9, 4)), 4, SamplingConfig(temperature=0.6, max_tokens=8), seed=0, step=0)
    assert [m.training for m in model.modules()] == before
    with torch.no_grad():
        now = LogProbEngine(model.eval())(found.batch, temperature=0.6).logps
    ratio = (now - found.sampler_logps).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-5, rtol=0)
    assert ((ratio - 1).abs() > 0.2).float().mean() == 0


def test_under_autocast_a_weight_is_cast_once_and_the_graph_before_keeps_its_own():
    model = build(DENSE["llama"]())
    weight = model.model.layers[0].mlp.up_proj.weight
    engine = local(model)
    engine.verify()
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0] is weight:
                casts.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        before = model(input_ids=torch.tensor([[5, 6]])).logits.float().logsumexp(-1).sum()
        with Casts():
            engine.generate(prompts((4,)), 2, SamplingConfig(max_tokens=NEW, stop_ids=[]), seed=0, step=0)
        assert not torch.is_autocast_cache_enabled()
        assert len(casts) == 1
        with torch.no_grad():
            weight.add_(1.0)
        after = model(input_ids=torch.tensor([[5, 6]])).logits.float().logsumexp(-1).sum()
        assert after != before  # nothing of before is left in the cache
        after.backward()
    assert weight.grad is not None


def test_under_autocast_the_cache_takes_its_precision():
    model = build(DENSE["qwen2"]())
    engine, rollout = local(model), LogProbEngine(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = engine.generate(prompts((9, 4)), 4, SamplingConfig(max_tokens=8), seed=0, step=0)
        with torch.no_grad():
            expected = rollout(found.batch).logps
    torch.testing.assert_close(found.sampler_logps, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_bf16_model_samples_from_itself(name):
    model = build(SHARED[name](), dtype=torch.bfloat16)
    found = local(model).generate(prompts((9, 4)), 4, SamplingConfig(max_tokens=8), seed=0, step=0)
    with torch.no_grad():
        expected = LogProbEngine(model)(found.batch).logps
    assert found.sampler_logps.dtype == torch.float32
    torch.testing.assert_close(found.sampler_logps, expected, atol=0.1, rtol=0)


# ------------------------------------------------------------------------------------------------ adapters, 4-bit bases


def test_a_lora_policy_samples_with_its_adapter_and_without_it_when_it_is_off():
    base = build(DENSE["llama"]())
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    engine, sampling = local(model), SamplingConfig(max_tokens=6)
    groups = prompts((9, 4))
    on = engine.generate(groups, 4, sampling, seed=0, step=0)
    with model.disable_adapter():
        off = engine.generate(groups, 4, sampling, seed=0, step=0)
        with torch.no_grad():
            expected_off = LogProbEngine(model)(off.batch).logps
    with torch.no_grad():
        expected_on = LogProbEngine(model.eval())(on.batch).logps
    torch.testing.assert_close(on.sampler_logps, expected_on, atol=1e-5, rtol=0)
    torch.testing.assert_close(off.sampler_logps, expected_off, atol=1e-5, rtol=0)
    assert completions(on) != completions(off)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantised_base_samples_from_what_training_sees(quantization):
    config = PolicyConfig(name="tiny", quantization=quantization, lora=LoRAConfig(r=4), gradient_checkpointing=True)
    model = load_policy(config)
    found = local(model).generate(prompts((9, 4)), 2, SamplingConfig(max_tokens=6), seed=0, step=0)
    with torch.no_grad():
        expected = LogProbEngine(model)(found.batch).logps
    torch.testing.assert_close(found.sampler_logps, expected, atol=0.05, rtol=0)


# ------------------------------------------------------------------------------------------------------ ends of text


def test_stops_minimum_length_and_truncation():
    model = build(DENSE["llama"]())
    stop = [EOS, *range(50, 97)]  # about half of the vocabulary
    found = local(model, stop_ids=stop).generate(
        prompts((5, 12, 3)), 20, SamplingConfig(max_tokens=5, min_tokens=2), seed=1, step=0
    )
    for ids, cut in zip(completions(found), found.truncated.tolist(), strict=True):
        assert len(ids) >= 3 or ids[-1] in stop
        assert not any(token in stop for token in ids[:-1])
        assert cut == (ids[-1] not in stop)
        assert not cut or len(ids) == 5
        assert all(token not in stop for token in ids[:2])
    assert 0 < found.truncated.sum() < 60
    assert len(set(found.batch.completion_lengths.tolist())) > 2


def test_stop_ids_of_a_call_replace_the_default_ones():
    model = build(DENSE["llama"]())
    engine, groups = local(model, stop_ids=range(3, 97)), prompts((5,))
    assert completions(engine.generate(groups, 8, SamplingConfig(max_tokens=6), seed=0, step=0))[0][1:] == []
    never = engine.generate(groups, 8, SamplingConfig(max_tokens=6, stop_ids=[]), seed=0, step=0)
    assert never.batch.completion_lengths.tolist() == [6] * 8
    assert never.truncated.all()


def test_every_end_of_text_is_found(tiny_tokenizer):
    model = build(DENSE["llama"]())
    model.generation_config.eos_token_id = [41, 17]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    assert stop_ids_of(tiny_tokenizer, wrapped, extra=[90]) == sorted({tiny_tokenizer.eos_token_id, 17, 41, 90})
    assert stop_ids_of(tiny_tokenizer) == [tiny_tokenizer.eos_token_id]


# ------------------------------------------------------------------------------------------------- what is carried over


def test_prompts_keep_their_order_columns_and_positions():
    model = build(DENSE["llama"]())
    engine = local(model)
    engine.sync(model, 7)
    groups = [
        Group(prompt=g.prompt, completions=(), index=50 - g.index, columns=g.columns) for g in prompts((9, 2, 15))
    ]
    found = engine.generate(groups, 3, SamplingConfig(max_tokens=4), seed=0, step=0)
    assert found.weight_version == 7
    assert found.batch.group_index.tolist() == [50, 49, 48]
    assert [c["row"] for c in found.batch.columns] == [0, 1, 2]
    assert found.batch.prompt_lengths.tolist() == [9, 2, 15]
    assert found.batch.group_of.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.batch.scored.all()
    with pytest.raises(ValueError, match="the model it was built with"):
        engine.sync(build(DENSE["llama"]()), 8)


def test_no_prompts_no_completions():
    found = local(build(DENSE["llama"]())).generate([], 4, SamplingConfig(), seed=0, step=0)
    assert found.batch.num_completions == len(found.sampler_logps) == len(found.truncated) == 0


def test_keys_name_seed_step_prompt_and_number():
    groups = prompts((5, 5, 5))
    keys = completion_keys(groups, 4, seed=1, step=2)
    assert keys[1:] == completion_keys(groups[1:], 4, seed=1, step=2)
    assert [row[:2] for row in keys] == completion_keys(groups, 2, seed=1, step=2)
    everything = {k for row in keys for k in row}
    for other in (completion_keys(groups, 4, seed=2, step=2), completion_keys(groups, 4, seed=1, step=3)):
        assert everything.isdisjoint(k for row in other for k in row)
    assert len(everything) == 12
    # the same prompt twice is answered as if asked for twice as many completions, and one without an index by content
    first, second = completion_keys([groups[0]] * 2, 4, seed=1, step=2)
    assert [first + second] == completion_keys(groups[:1], 8, seed=1, step=2)
    unnamed = [Group(prompt=[1, i], completions=()) for i in range(2)]
    assert completion_keys(unnamed, 1, seed=0, step=0) == completion_keys(unnamed[::-1], 1, seed=0, step=0)[::-1]


# ---------------------------------------------------------------------------------------------------- time and memory


class Copies(TorchDispatchMode):
    """Names operations that return a new tensor, no view of an argument, of at least `size` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.numel() >= self.size and t.untyped_storage().data_ptr() not in given:
                self.names.append(str(func))
        return out


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-moe"])
def test_a_decode_step_copies_no_cache(name):
    """Key-value heads are half as many as query heads here, which makes transformers' own attention copy."""
    model = build(SHARED[name]())
    engine = local(model)
    engine.verify()
    groups = [Group(prompt=token_ids(60, i), completions=()) for i in range(4)]
    with torch.no_grad():
        decode = engine._decoder.start([g.prompt for g in groups], [4] * 4, 20)
        x = decode.step(torch.full((16,), 5))
        keys = 4 * 2 * 60 * 8  # of the prompts, in one layer
        with Copies(keys) as copies:
            for _ in range(3):
                x = decode.step(torch.full((16,), 6))
    assert x.shape == (16, 32)
    assert copies.names == []


def test_finished_completions_are_no_longer_computed():
    model = build(DENSE["llama"]())
    engine = local(model, stop_ids=range(2, 50))  # half of the vocabulary: half of the completions end at each step
    engine.verify()
    tokens = []
    handle = model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: tokens.append(args[0].numel()))
    found = engine.generate(prompts((6, 6, 6, 6)), 16, SamplingConfig(max_tokens=30), seed=0, step=0)
    handle.remove()
    lengths = found.batch.completion_lengths
    assert tokens[0] == 24  # each prompt once, without padding
    for step, computed in enumerate(tokens[1:], start=1):
        live = int((lengths > step).sum())
        assert live <= computed <= max(1.6 * live, live + 4)


def test_nothing_of_a_rollout_stays_in_memory():
    engine = local(build(DENSE["llama"]()))
    engine.generate(prompts((6, 9)), 4, SamplingConfig(max_tokens=4), seed=0, step=0)
    gc.collect()
    assert not any(isinstance(o, KVCache) for o in gc.get_objects())


# -------------------------------------------------------------------------------------------------- refusals and stops


def test_asked_to_stop_it_leaves_within_a_few_steps():
    calls = []
    engine = local(build(DENSE["llama"]()), stop_ids=[], should_stop=lambda: len(calls) >= 2 or calls.append(1))
    steps = []
    engine._inner.model.embed_tokens.register_forward_hook(lambda *_: steps.append(1))
    engine.verify()
    steps.clear()
    with pytest.raises(RolloutStopped):
        engine.generate(prompts((6,)), 2, SamplingConfig(max_tokens=100), seed=0, step=0)
    assert 8 <= len(steps) <= 24


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_runs():
    engine = local(build(DENSE["gpt2"]()))
    with pytest.raises(UserError, match=r"prompt 1 has 120 tokens; .*128 positions: lower sampling.max_tokens"):
        engine.generate(prompts((5, 120)), 1, SamplingConfig(max_tokens=9), seed=0, step=0)
    with pytest.raises(UserError, match="prompt 3 is empty"):
        engine.generate([Group(prompt=[], completions=(), index=3)], 1, SamplingConfig(max_tokens=9), seed=0, step=0)


def test_paths_can_be_asked_for(caplog):
    caplog.set_level("INFO")
    plain = local(build(DENSE["llama"]()), path="plain")
    plain.verify()
    assert (plain.path, plain.reason) == ("plain", "it was asked for")
    with pytest.raises(UserError, match="does not fit BloomForCausalLM: it takes no position ids"):
        local(build(PLAIN_ONLY["bloom (alibi)"]()), path="shared").verify()
    local(build(PLAIN_ONLY["bloom (alibi)"]())).verify()
    assert any(r.levelname == "WARNING" and "take the plain path" in r.getMessage() for r in caplog.records)


def test_adapters_that_add_tokens_are_refused():
    tuned = peft.get_peft_model(
        build(DENSE["llama"]()), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(UserError, match="prompt and prefix tuning"):
        local(tuned)


def test_a_model_whose_cache_is_wrong_is_refused(monkeypatch):
    """Both paths are checked against the model's forward pass; a cache that forgets a token is found."""
    model = build(DENSE["llama"]())
    forgetful = KVCache.update

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = forgetful(self, key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values.roll(1, 2) if self.columns else values

    monkeypatch.setattr(KVCache, "update", update)
    engine = local(model)
    engine.verify()
    assert engine.path == "plain"
    assert "its log-probs differ by" in engine.reason
    dynamic = hf.DynamicCache.update

    def update_own(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = dynamic(self, key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values.roll(1, 2)

    monkeypatch.setattr(hf.DynamicCache, "update", update_own)
    with pytest.raises(UserError, match="whose cache does not reproduce its forward pass"):
        local(model).verify()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be between 0 and max_tokens"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"min_p": 1.1}, "min_p must be between 0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SamplingConfig(**settings)
