"""What GRPO and PPO share: references and controllers, evaluation, rollouts from a server, dynamic sampling, counts of
steps, and what users get wrong."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.experience import ADVANTAGE
from alignment.mismatch import importance_weights
from alignment.objective import IMPORTANCE, OLD_LOGPS
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.prompting import DIFFICULTY
from alignment.update import Counts
from datamodules import PromptData
from modules.grpo import GRPO
from modules.ppo import PPO
from tests.rl_toys import SAMPLING, fit, here, moved, odd, odd_in_some, online, pretrained_adapter, prompts
from tests.toys import TINY, FixedData, groups, trainer
from tests.vllm_stub import Stub, choice, serving

LORA = PolicyConfig(name="tiny", lora=LoRAConfig(r=4))
Logits = Callable[[nn.Module, GroupBatch, float], Tensor]


# ---------------------------------------------------------------------- the reference


def log_probs(model: Any, batch: GroupBatch, temperature: float) -> Tensor:
    """[C, V] by the model's own forward, a completion at a time."""
    prompts = torch.split(batch.prompt_ids, batch.prompt_lengths.tolist())
    out = []
    for row, ids in enumerate(torch.split(batch.completion_ids, batch.completion_lengths.tolist())):
        prompt = prompts[int(batch.group_of[row])]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        out.append((logits / temperature).log_softmax(-1))
    return torch.cat(out)


def divergence(estimator: str, p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """[C] nats, by the formulas."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    middle = ((p.exp() + q.exp()) / 2).log()
    d = (q - p).gather(1, ids[:, None])[:, 0]
    forms = {
        "full_reverse": lambda: kl(p, q),
        "full_jeffreys": lambda: (kl(p, q) + kl(q, p)) / 2,
        "full_js": lambda: (kl(p, middle) + kl(q, middle)) / 2,
        "k1": lambda: -d,
        "k3": lambda: d.exp() - d - 1,
    }
    return forms[estimator]()


@pytest.mark.parametrize("kind", ["adapter_off", "frozen_adapter", "copy"])
def test_kl_against_full_logits(kind: Any, tmp_path: Path) -> None:
    """Value and share of the loss, at the sampling temperature, of a policy that has moved from where it began."""
    policy = {"adapter_off": LORA, "copy": TINY}.get(kind)
    if policy is None:
        policy = PolicyConfig(lora=LoRAConfig(pretrained=str(pretrained_adapter(LORA, tmp_path / "adapter"))))
    batch = GroupBatch.from_groups(groups(3, 2))
    batch = batch.with_rows(**{ADVANTAGE: torch.zeros(6)})
    start = load_policy(policy)
    counts = Counts.of(batch)
    for estimator in ("full_reverse", "full_jeffreys", "full_js", "k3"):
        kl = {"coefficient": 0.5, "estimator": estimator}
        module = moved(online(GRPO, policy=policy, kl=kl, reference=kind, sampling={"temperature": 0.7}))
        part = batch.with_tokens(ref_logps=module.reference.token_logps(batch, module.temperature))
        share, metrics = module.loss(part, counts)
        p, q = (log_probs(model, batch, 0.7) for model in (module.policy, start))
        expected = divergence(estimator, p, q, batch.completion_ids)[batch.scored].mean()
        assert float(expected) > 0.01
        total, count = metrics["kl"]
        assert float(total / count) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
        assert float(share.detach()) == pytest.approx(0.5 * float(expected), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", [GRPO, PPO])
@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("policy", [TINY, LORA])
def test_kl_begins_at_0(kind: Any, place: Any, policy: PolicyConfig, tmp_path: Path) -> None:
    """C9: at the sampling temperature, which reaches the reference."""
    kl = {"coefficient": 0.1, "estimator": "k3", "place": place}
    sampling = {"temperature": 0.6, "max_tokens": 6}
    watch, _ = fit(online(kind, policy=policy, kl=kl, sampling=sampling, epochs=1), tmp_path)
    first, second = watch.logged
    assert (first["kl"], first["objective/kl"]) == pytest.approx((0, 0), abs=1e-6)
    assert second["objective/kl"] > 1e-6


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_is", "sym", "full_reverse", "full_jeffreys", "full_js"])
def test_a_step_without_advantages_goes_back_to_the_reference(estimator: str, tmp_path: Path) -> None:
    """The sign rule, on the exact divergence."""
    rewards = {"same": here(lambda completions: [1.0] * len(completions))}
    optim = OptimConfig(lr=0.05, optimizer="sgd", schedule="constant", clip_norm=None)
    kl = {"coefficient": 1.0, "estimator": estimator}
    module = moved(online(GRPO, rewards=rewards, kl=kl, optim=optim, completions=8))
    collect, seen = module.collect, []

    def divergence_now() -> float:
        (batch,) = seen
        p, q = (log_probs(model, batch, 1.0) for model in (module.policy, load_policy(TINY)))
        return float(divergence("full_reverse", p, q, batch.completion_ids).mean())

    def watched(batch: GroupBatch) -> GroupBatch:
        seen.append(collect(batch))
        watched.before = divergence_now()  # type: ignore[attr-defined]
        return seen[0]

    module.collect = watched
    fit(module, tmp_path, max_steps=1)
    assert divergence_now() < 0.99 * watched.before  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- coefficients that follow


@pytest.mark.parametrize(("kind", "place"), [(GRPO, "loss"), (GRPO, "reward"), (PPO, "reward")])
def test_adaptive_kl(kind: Any, place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """16 completions a batch over a horizon of 100; the first KL is 0, 100 % below its target. In the reward a batch
    is trained with the coefficient from before it was sampled, in the loss with the one that it leads to."""
    kl = {"coefficient": 0.2, "target": 1.0, "horizon": 100, "place": place, "estimator": "k3"}
    module = online(kind, kl=kl, epochs=1)
    watch, run = fit(module, tmp_path, plugins=[SafeCheckpointIO()])
    first = 0.2 * (1 - 0.2 * 16 / 100)
    error = max(-0.2, min(0.2, watch.logged[1]["objective/kl"] / 1.0 - 1))
    second = first * (1 + error * 16 / 100)
    expected = [0.2, first] if place == "reward" else [first, second]
    assert [row["kl_coefficient"] for row in watch.logged] == pytest.approx(expected)
    assert module.kl.coefficient == pytest.approx(second)
    run.save_checkpoint(tmp_path / "c")
    again = kind.load_from_checkpoint(tmp_path / "c", rewards={"odd": here()})
    assert again.kl.controller == module.kl.controller
    caplog.clear()
    anew = kind.load_from_checkpoint(tmp_path / "c", rewards={"odd": here()}, kl={**kl, "coefficient": 0.4})
    assert anew.kl.coefficient == 0.4
    assert "kl begins anew as given; the checkpoint had other settings" in caplog.text


def test_the_coefficient_that_moves_is_the_one_applied(tmp_path: Path) -> None:
    kl = {"coefficient": 0.2, "target": 1.0, "horizon": 100}
    rewards = {"same": here(lambda completions: [1.0] * len(completions))}
    watch, _ = fit(moved(online(GRPO, kl=kl, rewards=rewards)), tmp_path)
    for row in watch.logged:
        assert row["loss"] == pytest.approx(row["kl_coefficient"] * row["kl"], rel=1e-5)
    assert watch.logged[0]["kl_coefficient"] != 0.2


def test_adaptive_entropy(tmp_path: Path) -> None:
    """Entropies of the untrained model are near log 512 = 6.24: below a target of 7 the bonus grows by its step and
    acts; above a target of 1 it shrinks and does not."""
    rewards = {"same": here(lambda completions: [1.0] * len(completions))}
    watch, run = fit(online(GRPO, rewards=rewards, entropy={"target": 7.0, "coefficient": 0.1}), tmp_path)
    assert [row["entropy_coefficient"] for row in watch.logged] == pytest.approx([0.105, 0.11])
    for row in watch.logged:
        assert 5.5 < row["entropy"] < math.log(512)
        assert row["loss"] == pytest.approx(-row["entropy_coefficient"] * row["entropy"], rel=1e-5)
    module = online(GRPO, rewards=rewards, entropy={"target": 1.0, "coefficient": 0.1})
    watch, run = fit(module, tmp_path, plugins=[SafeCheckpointIO()])
    assert [(row["entropy_coefficient"], row["loss"]) for row in watch.logged] == [(0.0, 0.0)] * 2
    assert module.entropy.controller.value == pytest.approx(0.09)
    run.save_checkpoint(tmp_path / "c")
    again = GRPO.load_from_checkpoint(tmp_path / "c", rewards=rewards)
    assert again.entropy.controller.value == pytest.approx(0.09)


# ---------------------------------------------------------------------- counting steps


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_epochs_and_minibatches_count(kind: Any, tmp_path: Path) -> None:
    """Two batches of two passes over two minibatches are eight steps; the schedule ends with the last of them."""
    optim = OptimConfig(lr=0.8e-3, schedule="linear")
    watch, run = fit(online(kind, epochs=2, minibatches=2, optim=optim), tmp_path)
    assert (run.global_step, run.lightning_module.batches_seen) == (8, 2)
    assert [u["lr"] for u in watch.updates] == pytest.approx([0.1e-3 * k for k in range(8, 0, -1)])


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_max_steps_ends_a_rollout_early(kind: Any, tmp_path: Path) -> None:
    optim = OptimConfig(lr=0.3e-3, schedule="linear")
    watch, run = fit(online(kind, epochs=2, minibatches=2, optim=optim), tmp_path, max_steps=3, max_epochs=-1)
    assert (run.global_step, len(watch.updates), len(watch.logged)) == (3, 3, 1)
    assert [u["lr"] for u in watch.updates] == pytest.approx([0.3e-3, 0.2e-3, 0.1e-3])


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_one_prompt_and_more_minibatches(kind: Any, tmp_path: Path) -> None:
    """A minibatch without a group is a step without a gradient in a short last batch, and a mistake in every batch."""
    watch, run = fit(online(kind, minibatches=2, epochs=1), tmp_path, FixedData(prompts(1), batch_size=2))
    assert run.global_step == 2
    assert [u["grad_norm"] > 0 for u in watch.updates] == [False, True]
    with pytest.raises(UserError, match=r"minibatches is 3 and data\.batch_size 2"):
        fit(online(kind, minibatches=3, epochs=1), tmp_path, FixedData(prompts(4), batch_size=2))


def test_stop_tokens_that_are_none_or_not_the_models(tmp_path: Path) -> None:
    """Without any, none is banned before `min_tokens` and every completion is cut off."""
    watch, _ = fit(online(GRPO, sampling={"max_tokens": 3, "min_tokens": 2, "stop_ids": []}), tmp_path)
    lengths = {name: watch.logged[0][f"completions/{name}"] for name in ("min_length", "max_length", "clipped_ratio")}
    assert lengths == {"min_length": 3, "max_length": 3, "clipped_ratio": 1}
    with pytest.raises(UserError, match=r"sampling\.stop_ids holds 512; the model's ids end at 511"):
        fit(online(GRPO, sampling={"max_tokens": 3, "stop_ids": [3, 512]}), tmp_path)


# ---------------------------------------------------------------------- evaluation


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < SAMPLING.max_tokens:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
        if SAMPLING.stop_ids is not None and ids[-1] in SAMPLING.stop_ids:
            break
    return ids


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_evaluation_is_greedy_and_always_alike(kind: Any, tmp_path: Path) -> None:
    data = FixedData(prompts(5, **{DIFFICULTY: ["easy", "hard", "easy", "easy", "hard"]}), batch_size=2)
    module = moved(online(kind, rewards={"odd": here(weight=2.0)}), size=0.1)
    run = trainer(tmp_path)
    first, second = (run.validate(module, datamodule=data, verbose=False)[0] for _ in range(2))
    assert first == second
    rows = [row for part in run.predict(module, datamodule=data) for row in part]
    values = []
    for row, group in zip(rows, data.train, strict=True):
        ids = greedy(module.policy, list(group.prompt))
        values.append(odd("", ids))
        assert row == {
            "index": group.index,
            "stratum": group.columns[DIFFICULTY],
            "prompt": module.tokenizer.decode(list(group.prompt)),
            "completion": row["completion"],
            "truncated": ids[-1] not in SAMPLING.stop_ids,
            "reward": pytest.approx(2 * values[-1]),
            "rewards": {"odd": pytest.approx(values[-1])},
        }
        assert module.tokenizer.decode(ids).startswith(row["completion"])
    assert first["val/rewards/odd/mean"] == pytest.approx(sum(values) / 5)
    assert first["val/reward"] == pytest.approx(2 * sum(values) / 5)
    assert first["val/strata/hard/reward"] == pytest.approx(values[1] + values[4])
    assert first["val/completions/clipped_ratio"] == pytest.approx(sum(row["truncated"] for row in rows) / 5)
    assert "val/loss" not in first
    assert {f"test/{name[4:]}": value for name, value in first.items()} == run.test(
        module, datamodule=data, verbose=False
    )[0]


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_validation_leaves_training_alone(kind: Any, tmp_path: Path) -> None:
    """Weights, running scales and randomness are those of a run without it."""
    ends = []
    for batches in (0, 2):
        module = online(kind, rewards={"odd": here(scale="running")})
        fit(module, tmp_path, limit_val_batches=batches, val_check_interval=1)
        ends.append((module.state_dict(), module.suite.state_dict()))
    assert all(torch.equal(value, ends[1][0][name]) for name, value in ends[0][0].items())
    assert ends[0][1] == ends[1][1]


# ---------------------------------------------------------------------- a server that samples


def vllm(stub: Stub, folder: Path, **settings: Any) -> dict[str, Any]:
    return {"vllm": {"url": stub.url, "model": "policy", "weights": "disk", "folder": str(folder)}, **settings}


def unlikely_first(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The first token far less likely to the server than to the trainer, the second far likelier."""
    if path != "/v1/completions":
        return 200, {"message": "done"}
    choices = [choice(i, [20 + i, 30 + i]) for i in range(body["n"])]
    for answered in choices:
        answered["logprobs"]["token_logprobs"] = [-50.0, -5.0]
    return 200, {"choices": choices}


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_rollouts_from_a_server(kind: Any, tmp_path: Path) -> None:
    """Weights go there once per batch, and once more where a validation follows; each token is weighed by the ratio of
    trainer to server, at most the cap; the gap is logged."""
    with serving() as stub:
        stub.answer = unlikely_first
        module = online(kind, rollout=vllm(stub, tmp_path / "weights", importance_cap=1.5), epochs=2)
        collect, seen = module.collect, []
        module.collect = lambda batch: seen.append(collect(batch)) or seen[-1]
        watch, _ = fit(module, tmp_path, limit_val_batches=1, num_sanity_val_steps=1)
    versions = [body["update_info"]["path"][-1] for path, body in stub.seen if path == "/update_weights"]
    assert versions == ["0", "1", "2"]  # sanity check and first batch, second batch, validation after the last
    asked = [body for path, body in stub.seen if path == "/v1/completions"]
    assert {(body["n"], body["temperature"]) for body in asked} == {(4, 1.0), (1, 0.0)}
    start = load_policy(TINY)
    logps = log_probs(start, seen[0], 1.0).gather(1, seen[0].completion_ids[:, None])[:, 0]
    expected = (logps - torch.tensor([-50.0, -5.0]).repeat(16)).exp().clamp(max=1.5)
    assert expected[0] == 1.5
    assert expected[1] < 1
    torch.testing.assert_close(seen[0].tokens[IMPORTANCE], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen[0].tokens[OLD_LOGPS], logps, atol=1e-5, rtol=0)
    assert watch.logged[0]["sampler/clipped"] == 0.5
    assert watch.logged[0]["sampler/kl"] > 100
    # The trainer's own ratio starts at 1 all the same.
    assert watch.updates[0]["policy/approxkl_avg"] < 1e-10


def test_importance_weighs_the_policy_term(tmp_path: Path) -> None:
    """A loss of 1 a token becomes the mean weight, also for the only update of a rollout."""
    with serving() as stub:
        stub.answer = unlikely_first
        module = online(GRPO, rollout=vllm(stub, tmp_path / "weights"), loss="tests.rl_toys.ones")
        collect, seen = module.collect, []
        module.collect = lambda batch: seen.append(collect(batch)) or seen[-1]
        watch, _ = fit(module, tmp_path, max_steps=1)
    weights = importance_weights(seen[0], seen[0].tokens[OLD_LOGPS])
    assert watch.updates[0]["loss"] == pytest.approx(float(weights.mean()), rel=1e-5)


# ---------------------------------------------------------------------- rewards beside other work

PATIENT = """
import pathlib, time

def patient(completion, sign):
    until = time.monotonic() + 60
    while not pathlib.Path(sign).exists():
        if time.monotonic() > until:
            raise RuntimeError("nothing else was done meanwhile")
        time.sleep(0.01)
    return 1.0
"""


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_rewards_are_computed_beside_the_reference(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's reward that has no value before the reference's log-probs are there."""
    (tmp_path / "my_patient_reward.py").write_text(PATIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    sign = tmp_path / "measured"
    module = online(kind, rewards={"patient": "my_patient_reward.patient"}, kl={"measure": True}, epochs=1)
    measure = module.measure

    def watched(micro: GroupBatch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = measure(micro)
        sign.touch()
        return found

    module.measure = watched
    data = FixedData(prompts(4, sign=[str(sign)] * 4), batch_size=4)
    watch, _ = fit(module, tmp_path, data, max_steps=1)
    assert (watch.logged[0]["rewards/patient/mean"], watch.logged[0]["rewards/patient/faults"]) == (1, 0)


# ---------------------------------------------------------------------- dynamic sampling


def prompt_data(folder: Path, alive: list[bool], **settings: Any) -> PromptData:
    rows = [{"prompt": f"Question {i}?", "alive": a} for i, a in enumerate(alive)]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return PromptData(str(file), cache_dir=None, val_fraction=0.0, batch_size=4, **settings)


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_dynamic_sampling_refills(kind: Any, tmp_path: Path) -> None:
    """Half of the prompts give no signal: they are dropped, and others are asked in their place."""
    data = prompt_data(tmp_path, [i % 2 == 0 for i in range(40)])
    module = online(kind, rewards={"odd": here(odd_in_some)}, dynamic_sampling=6, completions=6)
    collect, seen = module.collect, []
    module.collect = lambda batch: seen.append(collect(batch)) or seen[-1]
    watch, _ = fit(module, tmp_path, data, limit_train_batches=3)
    for batch, row in zip(seen, watch.logged, strict=True):
        assert batch.num_prompts == 4
        assert all(columns["alive"] for columns in batch.columns)
        assert len(set(batch.group_index.tolist())) == 4
        assert row["dynamic_sampling/sampled"] - row["dynamic_sampling/dropped"] == 4
        assert row["dynamic_sampling/lacking"] == 0
        assert row["frac_reward_zero_std"] == 0
    assert sum(row["dynamic_sampling/dropped"] for row in watch.logged) > 0


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_dynamic_sampling_is_bounded(kind: Any, tmp_path: Path) -> None:
    """No prompt gives a signal: four and twice four others are tried; the step has nothing to train on."""
    data = prompt_data(tmp_path, [False] * 40)
    module = online(kind, rewards={"odd": here(odd_in_some)}, dynamic_sampling=2, epochs=1)
    watch, run = fit(module, tmp_path, data, limit_train_batches=1)
    values = {name: watch.logged[0][f"dynamic_sampling/{name}"] for name in ("sampled", "dropped", "lacking")}
    assert values == {"sampled": 12, "dropped": 12, "lacking": 4}
    assert (run.global_step, watch.updates[0]["grad_norm"]) == (1, 0)


def test_dynamic_sampling_does_not_go_by_a_reward_without_weight(tmp_path: Path) -> None:
    """A reward that only watches differs everywhere; the other one nowhere, so that every prompt is dropped."""
    rewards = {"odd": here(odd_in_some), "watched": here(odd, weight=0.0)}
    data = prompt_data(tmp_path, [False] * 8)
    watch, _ = fit(online(GRPO, rewards=rewards, dynamic_sampling=1), tmp_path, data, max_steps=1)
    row = watch.logged[0]
    assert [row[f"dynamic_sampling/{name}"] for name in ("sampled", "dropped", "lacking")] == [8, 8, 4]
    assert "rewards/watched/faults" in row


def test_dynamic_sampling_needs_a_source_of_prompts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"which only datamodules\.PromptData gives"):
        fit(online(GRPO, dynamic_sampling=1), tmp_path)


# ---------------------------------------------------------------------- the files


def test_a_module_is_one_short_file() -> None:
    for kind in (GRPO, PPO):
        assert len(Path(inspect.getfile(kind)).read_text().splitlines()) <= 150


# ---------------------------------------------------------------------- what users get wrong

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"advantage": "grup"}, "advantage 'grup' is not known, did you mean 'group'"),
    ({"advantage": "my_file.mine"}, "advantage 'my_file.mine' cannot be imported"),
    ({"advantage_args": {"epz": 1}}, "advantage 'group' has no setting epz; it has eps"),
    ({"loss": "clp"}, "policy loss 'clp' is not known, did you mean 'clip'"),
    ({"loss_args": {"hi": 1}}, "policy loss 'clip' has no setting hi; it has low, high"),
    ({"loss": "tests.rl_toys.pushed"}, "policy loss 'tests.rl_toys.pushed' needs the setting push"),
    ({"reduction": "mean"}, "reduction 'mean' is not known; use token_mean"),
    ({"kl": {"coefficient": 1, "estimator": "k9"}}, "KL estimator 'k9' is not known"),
    ({"kl": {"coefficient": -1}}, "KL coefficient is -1; it must be at least 0"),
    ({"kl": {"coefficient": 0, "target": 6}}, "an adaptive KL needs coefficient, target and horizon above 0"),
    ({"kl": {"place": "los"}}, "kl.place is 'los'; it is loss or reward"),
    ({"kl": {"coefficient": 1, "estimator": "full_js", "place": "reward"}}, "kl.estimator full_js is for the loss"),
    ({"kl": {"coef": 1}}, "KLConfig has no field coef; it has coefficient"),
    ({"entropy": {"keep": 2}}, "entropy.keep is 2; it is a share above 0 and at most 1"),
    ({"entropy": {"coefficient": -0.1}}, "entropy.coefficient is -0.1; it must be at least 0"),
    ({"entropy": {"target": 0}}, "an adaptive entropy bonus needs target and step above 0"),
    ({"kl": {"coefficient": math.inf}}, "KL coefficient is inf; it must be at least 0, and finite"),
    ({"kl": {"coefficient": 1, "target": math.inf}}, "an adaptive KL needs coefficient, target and horizon"),
    ({"entropy": {"coefficient": math.inf}}, "entropy.coefficient is inf; it must be at least 0, and finite"),
    ({"sampling": {"stop_ids": [3, -1]}}, "sampling.stop_ids holds -1; token ids are at least 0"),
    ({"advantage_args": {"eps": "1e-6"}}, "advantage 'group' has eps '1e-6'; it is a number"),
    ({"loss_args": {"low": math.nan}}, "policy loss 'clip' has low nan; it is a number"),
    ({"success": "even"}, "success names 'even', which is no reward; there are odd"),
    ({"reference": "cached"}, "reference is 'cached'; for sampled completions it is one of auto"),
    ({"minibatches": 0}, "minibatches is 0; it must be at least 1"),
    ({"epochs": 0}, "epochs is 0; it must be at least 1"),
    ({"completions": 0}, "completions is 0; it must be at least 1"),
    ({"dynamic_sampling": -1}, "dynamic_sampling is -1; it is the largest number of refills, or 0"),
    ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0; use a positive number"),
    ({"rewards": {}}, "no rewards are given; name at least one"),
    ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens must be at least 1, got 0"),
    ({"rollout": {"eval_completions": 0}}, "rollout.eval_completions is 0"),
    ({"rollout": {"importance_cap": 0}}, "importance_cap 0; they are at least 1, at least 0, and above 0"),
    ({"rollout": {"vllm": {"url": "http://x", "weights": "disk"}}}, "rollout.vllm needs model; its settings are url"),
    (
        {"rollout": {"vllm": {"url": "http://x", "model": "m", "weights": "disk", "stop_ids": [1]}}},
        "rollout.vllm has no setting stop_ids; its settings are url, model, weights",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_mistakes_are_told_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        online(GRPO, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_single_completions_are_refused_where_they_are_compared() -> None:
    with pytest.raises(UserError, match="completions is 1, and the advantage 'group' compares the completions"):
        online(GRPO, completions=1)


def test_warnings_about_batches_that_teach_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One's own advantage may make something of single completions. This one does not: told at once, and after 5."""
    data = FixedData(prompts(24), batch_size=4)
    watch, _ = fit(online(GRPO, completions=1, advantage="alignment.advantages.group"), tmp_path, data)
    assert caplog.text.count("no group has two completions with a reward") == 1
    assert caplog.text.count("in 5 batches in a row no completion had an advantage") == 1
    assert [u["grad_norm"] for u in watch.updates] == [0.0] * 6


def test_no_warning_while_something_is_learned_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every other batch: with alike rewards, then with those of `odd`. Never 5 in a row."""

    def sometimes(completion: str, completion_ids: list[int], alive: bool) -> float:
        return odd(completion, completion_ids) if alive else 0.0

    data = FixedData(prompts(24, alive=[i // 4 % 2 > 0 for i in range(24)]), batch_size=4)
    watch, _ = fit(online(GRPO, rewards={"sometimes": here(sometimes)}), tmp_path, data)
    assert [u["grad_norm"] > 0 for u in watch.updates] == [False, True] * 3
    assert "batches in a row" not in caplog.text


def test_a_head_with_an_adapter_cannot_give_a_full_kl(tmp_path: Path) -> None:
    policy = PolicyConfig(lora=LoRAConfig(r=4, target_modules=["q_proj", "lm_head"]))
    module = online(GRPO, policy=policy, kl={"coefficient": 0.1, "estimator": "full_js"})
    with pytest.raises(UserError, match="has another, or an adapter on it: use k1, k2, k3 or sym"):
        module.configure_model()


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_a_loss_that_is_detached_is_an_error(kind: Any, tmp_path: Path) -> None:
    """In PPO the values would go on learning beside it."""
    with pytest.raises(ValueError, match="the policy loss has no gradient"):
        fit(online(kind, loss="tests.rl_toys.detached"), tmp_path)


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_a_reward_that_raises_costs_its_completions(kind: Any, tmp_path: Path) -> None:
    """Those of prompts it does not like abstain, the others are trained on."""

    def moody(completion: str, completion_ids: list[int], alive: bool) -> float:
        if not alive:
            raise RuntimeError("not this one")
        return odd(completion, completion_ids)

    data = FixedData(prompts(8, alive=[i % 4 > 0 for i in range(8)]), batch_size=4)
    watch, run = fit(online(kind, rewards={"moody": here(moody)}, epochs=1), tmp_path, data)
    assert run.global_step == 2
    assert [row["rewards/moody/faults"] for row in watch.logged] == [0.25, 0.25]
    assert all(u["grad_norm"] > 0 for u in watch.updates)
