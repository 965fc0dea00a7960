"""Mistakes in a configuration of GRPO or PPO: one line each, that says where and what to do; exit status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", "--trainer.logger=false", "--data.max_rows=16"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def complaint(capsys: pytest.CaptureFixture[str], text: str, *words: str) -> str:
    """The one line that a configuration is refused with; `text` overlays configs/grpo.yaml."""
    Path("mine.yaml").write_text(text)
    assert main(["fit", "-c", str(CONFIGS / "grpo.yaml"), "-c", "mine.yaml", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("alignment: error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("alignment: error: ")


def model(settings: str) -> str:
    return f"model: {{init_args: {{{settings}}}}}\n"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("rewards: {a: LenghtWithin}", "reward 'a': there is no 'LenghtWithin'; did you mean 'LengthWithin'?"),
        ("rewards: {a: {reward: polite}}", "reward 'a': there is no 'polite'; there are ExactMatch, NumericMatch, "),
        ("rewards: {a: {reward: Format, weight: heavy}}", "model.rewards.weight: expected float, got heavy"),
        (
            "rewards: {a: {reward: Format, wieght: 2}}",
            "unknown key 'model.rewards.wieght'; did you mean 'model.rewards.",
        ),
        ("rewards: {a: {args: {minimum: 1}}}", "model.rewards: the following arguments are required: reward"),
        (
            "rewards: {a: {reward: Format, scale: [1, 0]}}",
            "reward 'a': scale is [1.0, 0.0]; it is [low, high] with low",
        ),
        ("rewards: [LengthWithin]", "model.rewards: expected a mapping, got ['LengthWithin']"),
        ("rewards: {}", "no rewards are given; name at least one"),
        (
            "rewards: {a: {reward: Efficiency, condition: {reward: b, at_least: 1}}}",
            "reward 'a' is conditioned on 'b', which is not a reward; there are a",
        ),
        ("sampling: {max_token: 3}", "unknown key 'model.max_token'; did you mean 'model.sampling.max_tokens'?"),
        ("sampling: {temperature: -1}", "sampling.temperature must be 0 (greedy) or above, got -1.0"),
        ("completions: 0", "completions is 0; it must be at least 1"),
        ("completions: many", "model.completions: expected int, got many"),
        ("kl: 0.04", "model.kl: expected a mapping with any of coefficient, estimator, place"),
        ("policy: tiny", "model.policy: 'tiny' is neither a file that is there nor settings"),
        ("kl: {coefficient: 0.1, estimator: k4}", "KL estimator 'k4' is not known"),
        ("advantage: grop", "advantage 'grop' is not known, did you mean 'group'?"),
        ("advantage: null", "advantage is None; available: batch, "),
        ("advantage: my_file.mine", "advantage 'my_file.mine' cannot be imported: No module named 'my_file'"),
        ("advantage_args: {epsilon: 1}", "advantage 'group' has no setting epsilon; it has eps"),
        ("advantage_args: {eps: -0.1}", "advantage 'group' has eps -0.1; it is a number of at least 0"),
        ("optim: {eps: -1.0e-8}", "optim.eps is -1e-08; it is a number of at least 0"),
        ("optim: {weight_decay: -1}", "optim.weight_decay is -1.0; it is a number of at least 0"),
        ("optim: {betas: [0.9, 1.0]}", "optim.betas is [0.9, 1.0]; each is at least 0 and below 1"),
        ("loss: dapo", "policy loss 'dapo' is not known"),
        ("loss_args: {epsilon: 0.2}", "policy loss 'clip' has no setting epsilon; it has low, high"),
        ("reduction: mean", "model.reduction: expected one of 'token_mean', 'seq_mean_token_mean'"),
        ("success: rihgt", "success names 'rihgt', which is no reward; there are right, warm, short"),
        ("reference: cached", "model.reference: expected one of 'auto', 'adapter_off', 'frozen_adapter', 'copy'"),
        ("entropy: {keep: 20}", "entropy.keep is 20.0; it is a share above 0 and at most 1, or null"),
        ("rollout: {vllm: {url: localhost:8000}}", "rollout.vllm needs model, weights; its settings are url, "),
        ("scoring: {workers: 0}", "workers is 0; there must be at least one"),
        ("num_generations: 4", "unknown key 'model.num_generations'"),
    ],
)
def test_settings(capsys: pytest.CaptureFixture[str], workdir: Path, settings: str, told: str) -> None:
    assert complaint(capsys, model(settings)).startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data: {init_args: {strata: [7, 2, 1]}}", "data.strata: expected the settings of StrataConfig, got [7, 2, 1]"),
        (
            "data: {init_args: {strata: {by: size}}}",
            "data.strata.by: expected one of 'column', 'level', 'length', 'mea",
        ),
        ("data: {init_args: {max_completion_tokens: 9}}", "unknown key 'data.max_completion_tokens'"),
        ("data: {init_args: {batch_size: 0}}", "batch_size must be at least 1, got 0"),
    ],
)
def test_settings_of_data(capsys: pytest.CaptureFixture[str], workdir: Path, text: str, told: str) -> None:
    assert complaint(capsys, text).startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (model("minibatches: 17"), "minibatches is 17 and data.batch_size 16; a minibatch needs a prompt at least"),
        (model("sampling: {temperature: 0}"), "sampling.temperature is 0: all completions of a prompt would be"),
        (
            model("rewards: {a: {reward: LengthWithin, args: {maximun: 3}}}"),
            "reward 'a' cannot be loaded: args: got an unexpected keyword argument 'maximun'; LengthWithin takes",
        ),
        (
            model("rewards: {a: {reward: ExactMatch, args: {column: anwser}}}"),
            "reward 'a' needs the data column 'anwser'; the data's columns: answer, attribute, product",
        ),
        (
            model("rewards: {a: my_rewards.polite}"),
            "reward 'a' cannot be loaded: there is no module 'my_rewards'; your own file lies in the folder you start",
        ),
        ("data: {init_args: {path: none.jsonl}}", "none of the 2 rows of 'none.jsonl' can be used: dropped: prompt is"),
        (
            "data: {init_args: {path: odd.jsonl}}",
            "'odd.jsonl' has the columns label, text_a, which is no prompts format",
        ),
        (
            "data: {init_args: {path: no_attribute.jsonl}}",
            "reward 'right' needs the data column 'attribute'; the data's columns: answer",
        ),
        ("data: {init_args: {path: not_there.jsonl}}", "there is no file or folder 'not_there.jsonl'"),
        (
            "data: {class_path: datamodules.PreferenceData}",
            "GRPO learns from prompts, and PreferenceData gives preference pairs; use datamodules.PromptData",
        ),
        (
            "data: {class_path: datamodules.SupervisedData}",
            "GRPO learns from prompts, and SupervisedData gives rows to imitate; use datamodules.PromptData",
        ),
    ],
)
def test_data_and_rewards(capsys: pytest.CaptureFixture[str], workdir: Path, text: str, told: str) -> None:
    Path("none.jsonl").write_text('{"prompt": ""}\n{"prompt": null}\n')
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    Path("no_attribute.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("odd.jsonl").write_text(json.dumps({"text_a": "x", "label": 3}) + "\n")
    assert complaint(capsys, text, *SMALL, *QUIET).startswith(told)


def test_evaluation_is_not_asked_for_samples(workdir: Path) -> None:
    words = ["-c", str(CONFIGS / "grpo.yaml"), "--model.sampling.temperature=0", "--model.sampling.max_tokens=4"]
    assert main(["validate", *words, *SMALL, *QUIET]) == 0


@pytest.mark.parametrize(
    ("name", "wanted"), [("DPO", "Preference"), ("RewardModel", "Preference"), ("SFT", "Supervised")]
)
def test_prompts_where_completions_are_needed(
    capsys: pytest.CaptureFixture[str], workdir: Path, name: str, wanted: str
) -> None:
    words = ["fit", f"--model={name}", "--data=PromptData", *SMALL, *QUIET]
    assert main(words) == 2
    assert f"{name} learns from" in (line := capsys.readouterr().err)
    assert f"and PromptData gives prompts; use datamodules.{wanted}Data" in line


@pytest.mark.parametrize("words", [["--model.advantage=group"], ["--model.advantage_args={eps: 1}"]])
def test_advantages_of_ppo(capsys: pytest.CaptureFixture[str], workdir: Path, words: list[str]) -> None:
    """PPO's come from its critic; a suggestion would be `whiten_advantages`, which is something else."""
    assert main(["fit", "-c", str(CONFIGS / "ppo.yaml"), *words, *SMALL, *QUIET]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "modules.PPO has no advantage" in line
    assert ": it is a setting of modules.GRPO, modules.MORL" in line


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("mine.nice", "reward 'a' cannot be loaded: 'mine' has no 'nice'; did you mean 'nicer'?"),
        ("mine.silent", "reward 'a' cannot be loaded: it must have a parameter `completions` (a list, to score all at"),
        ("mine.lost", "reward 'a' needs the data column 'anwser'; the data's columns: answer, attribute, product"),
        ("minne.nicer", "reward 'a' cannot be loaded: there is no module 'minne'; did you mean 'mine.nicer'?"),
    ],
)
def test_rewards_are_checked_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], workdir: Path, reward: str, told: str
) -> None:
    """No run in the tracker, no estimate of memory, no table of the data."""
    Path("mine.py").write_text(
        "def nicer(completion): return 1.0\n"
        "def silent(text): return 1.0\n"
        "def lost(completion, anwser): return 1.0\n"
    )
    words = [f"--model.rewards={{a: {reward}}}", "--trainer.accelerator=cpu", "--data.max_rows=16", *QUIET]
    assert main(["fit", "-c", str(CONFIGS / "grpo.yaml"), *words]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].removeprefix("alignment: error: ").startswith(told)
    assert "Data:" not in out
    assert "memory" not in err
    assert not Path("runs").exists()
