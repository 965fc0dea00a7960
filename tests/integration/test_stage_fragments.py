"""Every fragment of configs/callbacks that moves values runs as its comment says, and the log shows what it did."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from alignment.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "configs" / "callbacks"
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
SHORT = ["--data.max_rows=48", "--data.max_eval_rows=8", "--data.batch_size=1", "--trainer.log_every_n_steps=1"]
SAMPLES = ["--model.completions=2", "--model.sampling.max_tokens=4", "--data.max_rows=16"]
LOGGED = {
    "stages": {"schedule/beta", "schedule/stage", "event/stage"},
    "stages_brief": {"schedule/beta", "schedule/lambda_entropy", "event/stage"},
    "stages_online": {"schedule/kl.coefficient", "schedule/entropy.coefficient", "schedule/optim.lr"},
    "plateau_beta": {"schedule/beta"},
    "beta_dpo": {"schedule/beta", "beta_dpo/kept", "beta_dpo/mean"},
    "target_kl": {"schedule/beta", "kl/data"},
}


def test_all_are_here() -> None:
    others = {"default", "doctor", "fp8_archive", "fp8_training", "nan_guard", "several_rewards"}
    assert {path.stem for path in FOLDER.glob("*.yaml")} - others == set(LOGGED)
    page = (REPOSITORY / "docs" / "stages.md").read_text()
    assert all(f"configs/callbacks/{name}.yaml" in page for name in LOGGED)


@pytest.mark.parametrize("name", LOGGED)
def test_as_its_comment_says(name: str, workdir: Path) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    (use,) = re.findall(r"# Use: alignment (fit .*)", text)
    words = shlex.split(use.replace("configs/", f"{REPOSITORY / 'configs'}/"))
    assert str(FOLDER / f"{name}.yaml") in words
    extra = SAMPLES if "grpo.yaml" in use else []
    assert main([*words, *SHORT, *QUIET, *extra]) == 0
    lines = [line for file in workdir.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    logged = {key for line in lines for key in json.loads(line)}
    assert LOGGED[name] <= logged, LOGGED[name] - logged
    if name.startswith("stages"):
        events = next(workdir.rglob("events.txt"))
        begun = re.findall(r"stage: (\w+) begins", events.read_text())
        assert begun == re.findall(r"^          (\w+):$", text, flags=re.MULTILINE)
