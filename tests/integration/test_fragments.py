"""Every fragment under configs/ starts a real run: data fragments on rows of their own format, trainers, callbacks.

Complete configurations and debug overlays are run by test_cli_runs.py, the two-process trainer by its test there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
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
        "local_preference": {"question": user, "better": reply, "worse": worse},
        "persona": {"question": user, "answer_matching_behavior": " Yes", "answer_not_matching_behavior": " No"},
    }[fragment]


OFFLINE = sorted(p.stem for p in (CONFIGS / "data").glob("*.yaml") if not p.stem.startswith("prompts_"))


@pytest.mark.parametrize("fragment", OFFLINE)
def test_every_data_fragment_runs(fragment: str, workdir: Path) -> None:
    path = CONFIGS / "data" / f"{fragment}.yaml"
    module = "SFT" if "SupervisedData" in path.read_text() else "DPO"
    words = ["fit", f"--model={module}", f"--data={path}", "--data.batch_size=4", "--trainer.fast_dev_run=1"]
    if not fragment.startswith("support_"):
        rows = workdir / "rows.jsonl"
        rows.write_text("".join(json.dumps(row(fragment, i)) + "\n" for i in range(40)))
        words += [f"--data.path={rows}", "--data.split=train", "--data.val_split=null"]
    assert main([*words, "--trainer.accelerator=cpu", "--trainer.logger=false"]) == 0


def test_the_cpu_trainer_and_the_callbacks_run(workdir: Path) -> None:
    words = ["fit", "-c", str(CONFIGS / "debug" / "sft_smoke.yaml"), "--trainer", str(CONFIGS / "trainer" / "cpu.yaml")]
    words += [f"--trainer.callbacks={CONFIGS / 'callbacks' / 'default.yaml'}", "--trainer.max_steps=1"]
    assert main(words) == 0
    assert list(workdir.glob("runs/*/*/checkpoints/*/manifest.json"))


def test_the_gpu_trainer_parses(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = str(CONFIGS / "trainer" / "gpu.yaml")
    assert main(["fit", "-c", str(CONFIGS / "dpo.yaml"), "--trainer", trainer, "--print_config"]) == 0
    assert "precision: bf16-mixed" in capsys.readouterr().out


def test_no_fragment_is_left_out() -> None:
    folders = {p.parent.name for p in CONFIGS.rglob("*.yaml")}
    assert folders == {"configs", "data", "trainer", "callbacks", "debug", "quickstart"}
