"""Every fragment under configs/ starts a real run: data fragments on rows of their own format, trainers, callbacks.

Complete configurations and debug overlays are run by test_cli_runs.py, the two-process trainer by its test there, those
of rewards by test_reward_fragments.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaForSequenceClassification

from alignment.cli import main
from alignment.tiny import tiny_config, tiny_tokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
USER, REPLY, WORSE = "What is the {} price?", "It is {} euros.", "No idea about {}."


def messages(*turns: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=False)]


def row(fragment: str, i: int) -> dict[str, Any]:
    """A row as the source of a fragment has it."""
    user, reply, worse = (text.format(i) for text in (USER, REPLY, WORSE))
    return {
        "alpaca": {"instruction": user, "input": "", "output": reply},
        "ultrachat": {"messages": messages(user, reply)},
        "ultrafeedback": {"prompt": user, "chosen": messages(user, reply), "rejected": messages(user, worse)},
        "hh_rlhf": {
            "chosen": f"\n\nHuman: {user}\n\nAssistant: {reply}",
            "rejected": f"\n\nHuman: {user}\n\nAssistant: {worse}",
        },
        "local_sft": {"instruction": user, "output": reply},
        "feedback": {"prompt": user, "chosen": reply, "rejected": worse},
        "local_preference": {"question": user, "better": reply, "worse": worse},
        "local_labels": {"question": user, "answer": reply if i % 3 else worse, "liked": i % 3 > 0},
        "persona": {"question": user, "answer_matching_behavior": " Yes", "answer_not_matching_behavior": " No"},
        "prompts_local": {"prompt": user, "answer": reply, "difficulty": ("easy", "medium", "hard")[i % 3]},
        "prompts_gsm8k": {"question": user + " please" * (i % 3), "answer": f"{reply} #### {i}"},
    }[fragment]


OFFLINE = sorted(p.stem for p in (CONFIGS / "data").glob("*.yaml") if not p.stem.startswith("prompts_"))


@pytest.mark.parametrize("fragment", OFFLINE)
def test_every_data_fragment_runs(fragment: str, workdir: Path) -> None:
    path = CONFIGS / "data" / f"{fragment}.yaml"
    kinds = {"SupervisedData": "SFT", "PreferenceData": "DPO", "UnpairedData": "KTO"}
    module = kinds[yaml.safe_load(path.read_text())["class_path"].removeprefix("datamodules.")]
    words = ["fit", f"--model={module}", f"--data={path}", "--data.batch_size=4", "--trainer.fast_dev_run=1"]
    if not fragment.startswith("support_"):
        rows = workdir / "rows.jsonl"
        rows.write_text("".join(json.dumps(row(fragment, i)) + "\n" for i in range(40)))
        words += [f"--data.path={rows}", "--data.split=train", "--data.val_split=null"]
    assert main([*words, "--trainer.accelerator=cpu", "--trainer.logger=false"]) == 0


@pytest.mark.parametrize("fragment", sorted(p.stem for p in (CONFIGS / "data").glob("prompts_*.yaml")))
def test_every_fragment_of_prompts_runs(fragment: str, workdir: Path) -> None:
    path = CONFIGS / "data" / f"{fragment}.yaml"
    words = ["fit", "--model=GRPO", "--model.rewards={short: {reward: Efficiency, in_process: true}}", f"--data={path}"]
    words += ["--model.completions=2", "--model.sampling.max_tokens=4", "--data.batch_size=4", "--data.max_rows=30"]
    if "reasoning-gym" in path.read_text():
        pytest.importorskip("reasoning_gym")
    elif fragment != "prompts_support":
        rows = workdir / "rows.jsonl"
        rows.write_text("".join(json.dumps(row(fragment, i)) + "\n" for i in range(30)))
        words += [f"--data.path={rows}", "--data.test_split=null"]
    assert (
        main([*words, "--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", "--trainer.logger=false", *QUIET]) == 0
    )


def test_the_cpu_trainer_and_the_callbacks_run(workdir: Path) -> None:
    words = ["fit", "-c", str(CONFIGS / "debug" / "sft_smoke.yaml"), "--trainer", str(CONFIGS / "trainer" / "cpu.yaml")]
    words += [f"--trainer.callbacks={CONFIGS / 'callbacks' / 'default.yaml'}", "--trainer.max_steps=1"]
    assert main(words) == 0
    assert list(workdir.glob("runs/*/*/checkpoints/*/manifest.json"))


def test_the_callbacks_of_several_rewards_run(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They join those of the run."""
    path = CONFIGS / "callbacks" / "several_rewards.yaml"
    assert f"configs/callbacks/{path.name}" in (CONFIGS.parent / "docs" / "multi_reward.md").read_text()
    words = ["-c", str(CONFIGS / "debug" / "decoupled_po_smoke.yaml"), "-c", str(path)]
    named = [
        [callback["class_path"] for callback in resolved(capsys, *given)["trainer"]["callbacks"]]
        for given in (words[:2], words)
    ]
    added = [callback["class_path"] for callback in yaml.safe_load(path.read_text())["trainer"]["callbacks+"]]
    assert named[1] == named[0] + added
    assert "measure_every: 10" in path.read_text()
    assert main(["fit", *words, "--model.preset=amended", "--model.isolation.measure_every=1", *QUIET]) == 0
    logged = "".join(file.read_text() for file in workdir.rglob("metrics.jsonl"))
    for name in ("grad/dev/", "grad_norm/warm", "fusion/jitter", "fusion/entropy_coefficient", "val/reward"):
        assert f'"{name}' in logged


def test_the_gpu_trainer_parses(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = str(CONFIGS / "trainer" / "gpu.yaml")
    assert main(["fit", "-c", str(CONFIGS / "dpo.yaml"), "--trainer", trainer, "--print_config"]) == 0
    assert "precision: bf16-mixed" in capsys.readouterr().out


@pytest.mark.parametrize(("fragment", "processes"), [("fsdp8", 8), ("fsdp_nodes", 32), ("fsdp_tp_nodes", 32)])
def test_the_sharding_trainers_parse(
    fragment: str, processes: int, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On top of a run's own callbacks, with a process for each device."""
    overlay = str(CONFIGS / "trainer" / f"{fragment}.yaml")
    config = resolved(capsys, "-c", str(CONFIGS / "dpo.yaml"), "-c", overlay)
    trainer = config["trainer"]
    assert trainer["devices"] * trainer["num_nodes"] == processes
    sizes = trainer["strategy"]["init_args"]
    assert sizes["data_parallel_size"] * sizes["tensor_parallel_size"] == processes
    names = [callback["class_path"] for callback in trainer["callbacks"]]
    assert names[-1] == "callbacks.FSDP2"
    assert "callbacks.Checkpoint" in names
    assert config["model"]["init_args"]["policy"]["gradient_checkpointing"]


def test_the_sharding_trainer_of_two_processes_runs(workdir: Path) -> None:
    """Here with one, which is all of them; tests/distributed/test_fsdp.py has two."""
    words = ["fit", "-c", str(CONFIGS / "debug" / "sft_smoke.yaml"), "-c", str(CONFIGS / "trainer" / "fsdp2.yaml")]
    words += ["--trainer.devices=1", "--trainer.strategy.init_args.data_parallel_size=1", "--trainer.max_steps=1"]
    assert main([*words, *QUIET]) == 0
    assert list(workdir.glob("runs/*/*/checkpoints/*/shard-00000-of-00001.safetensors"))


PRESETS = sorted(p.stem for p in (CONFIGS / "presets").glob("*.yaml"))
SHORT = "--data.batch_size=16 --data.max_rows=16 --trainer.fast_dev_run=1"
SAMPLES = "--model.completions=2 --model.sampling.max_tokens=4"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `alignment export` leaves of a reward model with two members, and of one with a single output."""
    folder = tmp_path_factory.mktemp("reward")
    for outputs in (1, 2):
        config = tiny_config()
        config.num_labels = outputs
        LlamaForSequenceClassification(config).save_pretrained(folder / str(outputs))
        tiny_tokenizer().save_pretrained(folder / str(outputs))
    return folder


def resolved(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["fit", *words, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_what_it_says_and_runs(
    preset: str, workdir: Path, reward_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Upon the configuration that its comment names; what it does not speak of stays."""
    path = CONFIGS / "presets" / f"{preset}.yaml"
    text = path.read_text()
    assert len(text.splitlines()) <= 12
    named = re.search(rf"# Use: alignment fit -c configs/(\w+)\.yaml -c configs/presets/{preset}\.yaml", text)
    assert named is not None
    base = str(CONFIGS / f"{named[1]}.yaml")
    before, after = resolved(capsys, "-c", base), resolved(capsys, "-c", base, "-c", str(path))
    said = yaml.safe_load(text)["model"]["init_args"]
    assert after["model"]["class_path"] == before["model"]["class_path"]
    for name, value in said.items():
        mine = before["model"]["init_args"][name]
        if name == "rewards":  # a mapping of rewards replaces the earlier one
            assert list(after["model"]["init_args"][name]) == list(value)
        else:
            merged = {**mine, **value} if isinstance(mine, dict) else value
            assert after["model"]["init_args"][name] == merged
    for part in ("model", "data", "trainer"):
        ours, theirs = (c[part]["init_args"] if part != "trainer" else c[part] for c in (before, after))
        assert {k: v for k, v in ours.items() if k not in said} == {k: v for k, v in theirs.items() if k not in said}
    (workdir / "models").mkdir()
    (workdir / "models" / "reward").symlink_to(reward_model / ("1" if preset.startswith("critic") else "2"))
    short = SHORT if "PreferenceData" in Path(base).read_text() else f"{SHORT} {SAMPLES}"
    assert main(["fit", "-c", base, "-c", str(path), *short.split(), "--trainer.accelerator=cpu", *QUIET]) == 0


@pytest.mark.parametrize("preset", ["adaptive_kl", "dual_clip", "reward_model"])
def test_presets_that_serve_ppo_too(preset: str, workdir: Path, reward_model: Path) -> None:
    (workdir / "models").mkdir()
    (workdir / "models" / "reward").symlink_to(reward_model / "1")
    files = ["-c", str(CONFIGS / "ppo.yaml"), "-c", str(CONFIGS / "presets" / f"{preset}.yaml")]
    assert main(["fit", *files, *SHORT.split(), *SAMPLES.split(), "--trainer.accelerator=cpu", *QUIET]) == 0


def test_no_fragment_is_left_out() -> None:
    folders = {p.parent.name for p in CONFIGS.rglob("*.yaml")}
    assert folders == {
        "configs", "data", "trainer", "callbacks", "debug", "presets", "quickstart", "tune", "evaluate", "code",
        "rewards", "models",
    }  # fmt: skip
