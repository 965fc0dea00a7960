"""FP8 codes of weights, and the archive of policies made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from alignment.batches import GroupBatch
from alignment.checkpoint_folder import load_checkpoint_folder, write_checkpoint
from alignment.errors import UserError
from alignment.fp8 import LOGP_BOUND, Fp8Archive, logp_error, quantise
from alignment.local_rollout import LocalRollout
from alignment.logprobs import LogProbEngine
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.rollout import SamplingConfig
from alignment.swapping import decoder_layers
from alignment.tiny import tiny_model
from modules import SFT
from tests.architectures import DENSE, MIXTURES, PLAIN_ONLY, build, ragged_batch
from tests.toys import OPTIM, TINY, groups

EVERY = {**DENSE, **MIXTURES, **PLAIN_ONLY}

# ---------------------------------------------------------------------- the codec


def test_golden_values() -> None:
    """[G-FP8]."""
    coded = quantise(torch.tensor([0.1, -0.25, 1.0, 3.3, -0.007]))
    assert coded.scale.item() == pytest.approx(0.007366, abs=1e-6)
    assert coded.codes.view(torch.uint8).tolist() == [86, 224, 112, 126, 183]
    expected = [0.103125, -0.235714, 0.942857, 3.3, -0.006906]
    assert coded.dequantise().tolist() == pytest.approx(expected, abs=1e-6)


def test_a_scale_for_each_row() -> None:
    """448 * scale is each row's largest: the small row keeps its digits, which one scale for both takes from it."""
    x = torch.tensor([[448.0, -14.0, 7.0], [1e-4, -0.5e-4, 0.0]])
    rows = quantise(x, "row")
    assert rows.scale.shape == (2, 1)
    assert rows.scale.flatten().tolist() == pytest.approx([1.0, 1e-4 / 448])
    torch.testing.assert_close(rows.dequantise(), x, rtol=1e-6, atol=0)  # powers of two apart
    assert quantise(x).dequantise()[1].tolist() == [0.0, -0.0, 0.0]  # all below 2^-10
    assert quantise(torch.tensor([1.0, 2.0]), "row").scale.shape == ()


@pytest.mark.parametrize("per", ["tensor", "row"])
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_no_weight_moves_further_than_stated(per: Any, seed: int, exponent: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 33, generator=generator) * torch.randn(7, 1, generator=generator).exp() * 2.0**exponent
    x = x.to(getattr(torch, dtype))
    coded = quantise(x, per)
    x, y = x.double(), (coded.codes.double() * coded.scale.double())
    assert ((x - y).abs() <= torch.maximum(x.abs() / 17, coded.scale.double() / 1024) * (1 + 1e-6)).all()
    back = coded.dequantise()
    assert back.dtype == getattr(torch, dtype)
    torch.testing.assert_close(back.double(), y, rtol=2.0**-8 if dtype == "bfloat16" else 1e-6, atol=0)


def test_the_bound_is_reached_and_gaussian_weights_are_well_within() -> None:
    """Half-way between neighbours, 17/16 of a power of two, the error is 1/17; rms of Gaussian weights is .0265."""
    x = torch.tensor([448.0, 1.0625])
    assert abs(1 - quantise(x).dequantise()[1].item() / 1.0625) == pytest.approx(1 / 17)
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    error = (quantise(x).dequantise() - x).square().mean().sqrt() / x.square().mean().sqrt()
    assert error.item() == pytest.approx(0.0265, abs=5e-4)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), (0, 5)])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_nothing_but_zeros_has_scale_1(shape: tuple[int, ...], per: Any) -> None:
    coded = quantise(torch.zeros(shape), per)
    assert (coded.scale == 1).all()
    assert torch.equal(coded.dequantise(), torch.zeros(shape))


def test_numbers_whose_scale_would_be_subnormal() -> None:
    tiny = torch.finfo(torch.float32).tiny
    coded = quantise(torch.tensor([1e-40, -448 * tiny / 2]))
    assert coded.scale.item() == tiny
    assert coded.dequantise()[1].item() == -448 * tiny / 2
    assert quantise(torch.tensor([1e-44])).dequantise().isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_what_is_not_finite_is_refused(value: float, per: Any) -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    x[1, 1] = value
    with pytest.raises(UserError, match=r"^layer\.weight has values that are not finite.*$"):
        quantise(x, per, "layer.weight")


# ---------------------------------------------------------------------- what is kept


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moved(module: nn.Module, by: float = 0.1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator)


def module(config: PolicyConfig = TINY) -> SFT:
    made = SFT(policy=config, optim=OPTIM)
    made.configure_model()
    return made


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_a_quarter_of_the_bytes(per: Any, place: Any) -> None:
    """A byte a weight and 4 a scale; vectors stay. Tied weights count once."""
    model = tiny_model()
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = sum(p.numel() for p in parameters if p.dim() < 2)
    scales = sum(p.shape[0] for p in matrices) if per == "row" else len(matrices)
    archive = Fp8Archive(per=per, place=place)
    archive.store("a", model)
    assert archive.nbytes("a") == archive.nbytes() == sum(p.numel() for p in matrices) + 4 * scales + 4 * vectors
    assert 0.25 <= archive.nbytes() / sum(4 * p.numel() for p in parameters) < (0.27 if per == "row" else 0.255)


def test_with_lora_what_is_trained_is_kept() -> None:
    lora = module(PolicyConfig(lora=LoRAConfig(r=4)))
    archive = Fp8Archive()
    archive.store("a", lora)
    kept = dict(archive.tensors("a"))
    assert kept.keys() == {n for n, p in lora.named_parameters() if p.requires_grad}
    assert {tuple(t.shape) for t in kept.values()} == {tuple(p.shape) for p in lora.parameters() if p.requires_grad}


def test_the_last_ones_stay_and_pinned_ones_too() -> None:
    archive, layer = Fp8Archive(keep=2), nn.Linear(2, 2)
    archive.store("start", layer, pinned=True)
    for name in "abc":
        archive.store(name, layer)
    assert archive.names == ("start", "b", "c")
    archive.store("b", layer)  # again: it is the newest now
    archive.store("d", layer)
    assert archive.names == ("start", "b", "d")
    archive.drop("start")
    assert archive.names == ("b", "d")
    with pytest.raises(UserError, match=r"^no archived policy 'start'; there are: b, d$"):
        archive.restore(layer, "start")


@pytest.mark.parametrize("where", [0, -1], ids=["a matrix", "a vector"])
def test_a_policy_that_is_not_finite_leaves_the_archive_as_it_was(where: int) -> None:
    archive, model = Fp8Archive(keep=1), tiny_model()
    archive.store("good", model)
    with torch.no_grad():
        next(p for p in list(model.parameters())[:: 1 if where == 0 else -1]).view(-1)[0] = float("nan")
    with pytest.raises(UserError, match=r"has values that are not finite"):
        archive.store("bad", model)
    assert archive.names == ("good",)


def test_wrong_settings() -> None:
    for settings in ({"keep": 0}, {"per": "column"}, {"place": "disk"}):
        with pytest.raises(UserError, match="an FP8 archive: keep is"):
            Fp8Archive(**settings)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what is done with it


def by_hand(tensor: Tensor) -> Tensor:
    """scale * code of a matrix; a vector."""
    if tensor.dim() < 2:
        return tensor
    scale = tensor.abs().max() / 448
    return (tensor / scale).to(torch.float8_e4m3fn).float() * scale


def test_restore_writes_the_codes_into_the_same_parameters() -> None:
    model = tiny_model()
    before, places = values(model), {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
    archive = Fp8Archive()
    archive.store("a", model)
    moved(model)
    archive.restore(model, "a")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, by_hand(before[name]), rtol=1e-6, atol=1e-9)
    assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == places
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_soup_by_hand() -> None:
    layer, archive = nn.Linear(2, 2), Fp8Archive()
    points = {"a": [[448.0, 2.0], [0.0, -4.0]], "b": [[0.0, 448.0], [16.0, 0.0]]}  # exact as codes
    with torch.no_grad():
        for name, point in points.items():
            layer.weight.copy_(torch.tensor(point))
            layer.bias.fill_(len(archive.names))
            archive.store(name, layer)
    archive.soup(layer, {"a": 0.25, "b": 0.75})
    assert layer.weight.tolist() == [[112.0, 336.5], [12.0, -1.0]]
    assert layer.bias.tolist() == [0.75, 0.75]


def test_what_cannot_be_mixed() -> None:
    archive, lora, layer = Fp8Archive(), module(PolicyConfig(lora=LoRAConfig(r=4))), nn.Linear(2, 2)
    archive.store("a", lora)
    archive.store("b", layer)
    with pytest.raises(UserError, match="is not the mixture of the adapters"):
        archive.soup(lora, {"a": 0.5, "b": 0.5})
    with pytest.raises(UserError, match=r"weights 0\.5, 0\.6 are no mixture"):
        archive.soup(layer, {"a": 0.5, "b": 0.6})
    with pytest.raises(UserError, match="at least two models, got 1"):
        archive.soup(layer, {"b": 1.0})
    with pytest.raises(UserError, match="no archived policy 'c'; there are: a, b"):
        archive.soup(layer, {"b": 0.5, "c": 0.5})


@pytest.mark.parametrize("other", [nn.Linear(2, 3), nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2))])
def test_a_policy_of_another_model_is_refused(other: nn.Module) -> None:
    archive = Fp8Archive()
    archive.store("a", nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"^the archived policy 'a' is of another model: .*$"):
        archive.restore(other, "a")
    with pytest.raises(UserError, match="is of another model"), archive.evaluating(other, "a"):
        pass


def test_codes_survive_a_checkpoint_folder_to_the_bit(tmp_path: Path) -> None:
    archive, model = Fp8Archive(per="row"), tiny_model(dtype=torch.bfloat16)
    archive.store("start", model, pinned=True)
    moved(model)
    archive.store("a", model)
    write_checkpoint({"archive": archive.state_dict()}, tmp_path / "c")
    assert (tmp_path / "c" / "tensors.safetensors").stat().st_size < archive.nbytes() + 20_000
    other = Fp8Archive(keep=1)
    other.load_state_dict(load_checkpoint_folder(tmp_path / "c")["archive"])
    assert other.names == ("start", "a")
    for name in other.names:
        mine, theirs = dict(other.tensors(name)), dict(archive.tensors(name))
        assert mine.keys() == theirs.keys()
        assert all(t.dtype == torch.bfloat16 and torch.equal(t, mine[key]) for key, t in theirs.items())
    other.store("b", model)  # what was pinned still is
    assert other.names == ("start", "b")


def test_weights_that_are_sharded(tmp_path: Path) -> None:
    """Kept whole, written back as shards; put in their place for a block."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer, archive = nn.Linear(4, 6), Fp8Archive()
        before = by_hand(layer.weight.detach().clone())
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        archive.store("a", layer)
        assert all(type(tensor) is Tensor for _, tensor in archive.tensors("a"))
        with torch.no_grad():
            layer.weight.zero_()
        archive.restore(layer, "a")
        assert isinstance(layer.weight, DTensor)
        torch.testing.assert_close(layer.weight.full_tensor(), before, rtol=1e-6, atol=1e-9)
        with torch.no_grad():
            layer.weight.to_local().fill_(3.0)
        memory = layer.weight.to_local().data_ptr()
        with archive.evaluating(layer, "a"):
            torch.testing.assert_close(layer.weight.full_tensor(), before, rtol=1e-6, atol=1e-9)
            assert layer.weight.to_local().data_ptr() == memory
        assert torch.equal(layer.weight.full_tensor(), torch.full((6, 4), 3.0))
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- evaluation, a layer at a time


def logps(engine: LogProbEngine) -> Tensor:
    with torch.no_grad():
        found = engine(ragged_batch(), temperature=1.0).logps
    assert found is not None
    return found


@pytest.mark.parametrize("name", EVERY)
def test_an_archived_policy_on_every_architecture(name: str) -> None:
    """What it computes is what a model with its codes for weights computes, its log-probs are within the stated bound
    of the policy's, and the policy is then what it was."""
    model = build(EVERY[name]())
    engine = LogProbEngine(model)
    own = logps(engine)
    archive = Fp8Archive()
    archive.store("a", model)
    restored = build(EVERY[name](), seed=1)
    archive.restore(restored, "a")
    moved(model)
    before = values(model)
    with archive.evaluating(model, "a"):
        inside = logps(engine)
    theirs = LogProbEngine(restored.eval(), path=engine.path)
    torch.testing.assert_close(inside, logps(theirs), atol=1e-5, rtol=0)
    gaps = (inside - own).abs()[ragged_batch().scored]
    assert gaps.mean() <= LOGP_BOUND["mean"]
    assert gaps.max() <= LOGP_BOUND["largest"]
    assert gaps.max() > 1e-4, "codes have to differ for this to say anything"
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_error_that_is_measured(name: str) -> None:
    model = build(EVERY[name]())
    archive, engine = Fp8Archive(), LogProbEngine(model)
    archive.store("a", model)
    error = logp_error(archive, "a", model, engine)
    assert 0 < error["mean"] < error["largest"]
    assert error["mean"] <= LOGP_BOUND["mean"]
    assert error["largest"] <= LOGP_BOUND["largest"]


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["whole", "lora"])
def test_rollouts_of_an_archived_policy(lora: LoRAConfig | None) -> None:
    """Sampled with the shared decoder, as from a policy that was restored; and by `generate`."""
    config = PolicyConfig(lora=lora)
    policy, other = module(config), module(config)
    moved(policy, 0.2, seed=1)
    archive = Fp8Archive()
    archive.store("a", policy)
    archive.restore(other, "a")
    moved(policy, 0.2, seed=2)
    prompts, sampling = groups(3, 1), SamplingConfig(max_tokens=5, stop_ids=[3])

    def sampled(source: SFT) -> tuple[Any, ...]:
        rollout = LocalRollout(source.policy, pad_id=0, stop_ids=[3]).generate(prompts, 2, sampling, seed=0, step=0)
        return rollout.batch.completion_ids.tolist(), source.complete(groups_batch(), 6)

    with archive.evaluating(policy, "a"):
        inside = sampled(policy)
    assert inside == sampled(other.eval())
    assert inside != sampled(policy.eval())


def groups_batch() -> GroupBatch:
    return GroupBatch.from_groups(groups(2, 1))


def live_bytes(run: Any) -> int:
    """The most bytes that tensors made in `run` hold at a time, from what the allocator reports."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("tied", [False, True])
def test_no_more_than_a_layer_and_what_is_in_none_is_dequantised(tied: bool) -> None:
    config = hf.LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    model = build(config)
    engine, archive = LogProbEngine(model), Fp8Archive()
    archive.store("a", model)
    logps(engine)  # whatever is made once is made
    batch = groups_batch()

    def plain() -> None:
        with torch.no_grad():
            engine(batch)

    def archived() -> None:
        with archive.evaluating(model, "a"):
            engine(batch)

    def nbytes(parameters: Any) -> int:
        return sum(p.nbytes for p in parameters)

    layers = decoder_layers(model)
    assert len(layers) == 8
    everything, layer = nbytes(model.parameters()), nbytes(layers[0].parameters())
    outside = everything - 8 * layer
    assert outside < (1 if tied else 2) * 320 * 128 * 4 + 1024
    extra = live_bytes(archived) - live_bytes(plain)
    assert 0.9 * (outside + layer) < extra + 0.1 * layer
    assert extra <= outside + layer + 64 * 1024  # the codes of one matrix on their way
    assert everything > 3 * (outside + layer + 64 * 1024)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_blocks_in_blocks_and_blocks_that_fail(error: type[BaseException]) -> None:
    model = tiny_model()
    engine, archive, other = LogProbEngine(model), Fp8Archive(), Fp8Archive(per="row")
    start = values(model)
    archive.store("a", model)
    moved(model)
    other.store("b", model)
    moved(model)
    live = logps(engine)
    with archive.evaluating(model, "a"):
        a = logps(engine)
        with other.evaluating(model, "b"):
            b = logps(engine)
        assert torch.equal(logps(engine), a)
    with other.evaluating(model, "b"):
        assert torch.equal(logps(engine), b)
    assert torch.equal(logps(engine), live)
    assert not torch.equal(a, b)
    before = values(model)

    def fail(*args: Any) -> None:
        raise error

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(error), archive.evaluating(model, "a"), other.evaluating(model, "b"):
        logps(engine)
    handle.remove()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not torch.equal(before["lm_head.weight"], start["lm_head.weight"])
    assert torch.equal(logps(engine), live)


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16-mixed"])
def test_gradients_on_their_way_know_nothing_of_it(mixed: bool) -> None:
    """A forward pass, then the archive, then the backward; autocast's copies of weights are not taken for others."""
    model = tiny_model()
    engine, archive = LogProbEngine(model), Fp8Archive()
    archive.store("a", model)
    moved(model)
    batch = ragged_batch()

    def gradient(between: bool) -> tuple[Tensor, Tensor | None]:
        model.zero_grad()
        seen = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            found = engine(batch).logps
            if between:
                with archive.evaluating(model, "a"):
                    seen = engine(batch).logps
                again = engine(batch).logps
                assert torch.equal(again, found)
        found.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), seen

    (alone, _), (around, seen) = gradient(False), gradient(True)
    assert torch.equal(alone, around)
    restored = tiny_model()
    archive.restore(restored, "a")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed), torch.no_grad():
        expected = LogProbEngine(restored.eval())(batch).logps
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)


def test_in_inference_mode_and_in_another_dtype() -> None:
    """As Lightning validates; and a policy that has been converted since."""
    model = tiny_model()
    engine, archive = LogProbEngine(model), Fp8Archive()
    with torch.inference_mode():
        archive.store("a", model)
        with archive.evaluating(model, "a"):
            inside = engine(ragged_batch()).logps
    assert not any(p.is_inference() for p in model.parameters())
    engine(ragged_batch()).logps.sum().backward()  # parameters are as good as ever
    with archive.evaluating(model, "a"):
        assert torch.equal(logps(engine), inside)
    half = tiny_model(dtype=torch.bfloat16)
    with archive.evaluating(half, "a"):
        assert half.lm_head.weight.dtype == torch.bfloat16
        found = logps(LogProbEngine(half))
    assert (found - inside).abs().max() < 0.2
    archive.restore(half, "a")
    assert half.lm_head.weight.dtype == torch.bfloat16


def test_a_model_without_layers_is_swapped_as_a_whole() -> None:
    layer, archive = nn.Linear(3, 2), Fp8Archive()
    archive.store("a", layer)
    codes = by_hand(layer.weight.detach())
    with torch.no_grad():
        layer.weight.zero_()
    with archive.evaluating(layer, "a"):
        torch.testing.assert_close(layer(torch.eye(3)), codes.T + layer.bias, rtol=1e-6, atol=1e-8)
    assert layer.weight.abs().sum() == 0
