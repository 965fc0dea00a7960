"""Every command of README.md runs, every file it names exists, its table is the committed measurement."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from alignment import quickstart_grpo
from alignment.cli import main
from alignment.policy import PolicyConfig, load_policy, load_tokenizer
from alignment.quickstart_report import Report, markdown
from alignment.tiny import save_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, flags=re.DOTALL)
LINES = [line.split(" #")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
EVERYDAY = [line for line in LINES if re.match(r"alignment (fit|validate|predict) -c", line)]
SMALL = ["--data.max_rows=8", "--data.max_eval_rows=4", "--data.batch_size=4", "--trainer.max_epochs=1"]
"""What makes a command of the page short, without changing what it does."""


def rows(path: Path, *names: str) -> None:
    lines = [", ".join(f'"{name}": "{name} {i} of a row"' for name in names) for i in range(24)]
    path.write_text("".join(f"{{{line}}}\n" for line in lines))


@pytest.fixture
def folder(workdir: Path) -> Path:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    return workdir


def test_there_is_no_command_that_no_test_runs() -> None:
    others = [line for line in LINES if line not in EVERYDAY]
    kinds = sorted({" ".join(line.split()[:2]) for line in others if line})
    assert kinds == [
        ". .venv/bin/activate",
        "alignment export",
        "alignment fetch",
        "alignment ui",
        "make install",
        "make quickstart",
        "make quickstart-grpo",
        "make test",
    ]


def test_your_own_model_and_data(folder: Path) -> None:
    """The three lines, with a local folder in place of the hub id."""
    rows(folder / "my_rows.jsonl", "prompt", "completion")
    rows(folder / "my_pairs.jsonl", "prompt", "chosen", "rejected")
    model = load_policy(PolicyConfig(name="tiny"))
    model.save_pretrained(folder / "base")
    load_tokenizer(PolicyConfig(name="tiny")).save_pretrained(folder / "base")
    block = next(block for kind, block in BLOCKS if "my_rows.jsonl" in block)
    for line in block.splitlines():
        words = shlex.split(line.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "base"))
        assert main([*words[1:], *(SMALL if "fit" in words else [])]) == 0, line
    load_policy(PolicyConfig(name=str(folder / "models" / "mine")))


def test_everyday_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in [line for line in EVERYDAY if "my_" not in line]:
        words = shlex.split(line)[1:]
        if "ddp2" in line:
            words += ["--trainer.devices=1"]  # two processes have tests of their own
        if "--print_config" in line:
            capsys.readouterr()
            assert main(words) == 0
            assert "micro_batch_tokens: 4096" in capsys.readouterr().out
            continue
        assert main([*words, *SMALL]) == 0, line
    assert list(folder.glob("runs/*/*/predictions.jsonl"))


def test_the_environment_to_activate_is_the_one_that_make_makes() -> None:
    (line,) = (line for line in LINES if line.endswith("/bin/activate"))
    made = subprocess.run(["make", "-pn", "install"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert f"VENV = {line.split()[1].removesuffix('/bin/activate')}" in made.stdout.splitlines()
    assert LINES.index(line) < min(i for i, other in enumerate(LINES) if other.startswith("alignment "))


def test_your_own_prompts_and_reward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion of "say 5" that holds its answer counts 1; the file's own rewards are gone."""
    code = next(block for kind, block in BLOCKS if kind == "python" and block.startswith("# my_rewards.py"))
    (folder / "my_rewards.py").write_text(code)
    save_tiny(folder / "models" / "mine")
    asked = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(24)]
    (folder / "my_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    lines = [line for line in EVERYDAY if "my_prompts.jsonl" in line]
    assert ["configs/grpo.yaml" in lines[0], "configs/ppo.yaml" in lines[1]] == [True, True]
    for line in lines:
        words = shlex.split(line)[1:]
        assert words[words.index("--model.policy.name") + 1] == "models/mine"  # what the commands before have made
        assert main([*words, *SMALL, "--model.sampling.max_tokens=4", "--trainer.log_every_n_steps=1"]) == 0, line
    for file in folder.rglob("metrics.jsonl"):
        logged = json.loads(file.read_text().splitlines()[0])
        assert {name for name in logged if name.endswith("/faults")} == {"rewards/right/faults"}
        assert logged["rewards/right/faults"] == 0
    monkeypatch.syspath_prepend(str(folder))
    right = import_module("my_rewards").right
    assert [right("It is 5.", "5"), right("It is 6.", "5")] == [1.0, 0.0]


def test_the_python_block(folder: Path) -> None:
    block = next(block for kind, block in BLOCKS if kind == "python" and "L.Trainer" in block)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert list(folder.rglob("manifest.json"))


TARGETS = ["install", "quickstart", "quickstart MODEL=tiny", "quickstart-grpo", "test", "lint"]
TARGETS += ["bench", "bench-gpu", "reliability"]


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_exist(target: str) -> None:
    words = ["make", "-n", *target.split()]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PAGES = ["README.md", *sorted(str(page.relative_to(REPOSITORY)) for page in REPOSITORY.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert all(((REPOSITORY / page).parent / link).exists() for link in links), links
    named = re.findall(r"`((?:configs|alignment|modules|callbacks|datamodules|benchmarks)/[\w./]+\.(?:py|yaml))`", text)
    assert all((REPOSITORY / path).exists() for path in named), named


def test_the_table_is_the_committed_measurement() -> None:
    shown = re.search(r"<!-- quickstart:.*?-->\n(.*?)<!-- /quickstart -->", README, flags=re.DOTALL)
    assert shown is not None
    report = Report.from_json((REPOSITORY / "reports" / "quickstart.json").read_text())
    assert shown.group(1).strip() == markdown(report).strip()


def test_the_online_table_is_the_committed_measurement() -> None:
    shown = re.search(r"<!-- quickstart-grpo:.*?-->\n(.*?)<!-- /quickstart-grpo -->", README, flags=re.DOTALL)
    assert shown is not None
    report = quickstart_grpo.Report.from_json((REPOSITORY / "reports" / "quickstart_grpo.json").read_text())
    assert shown.group(1).strip() == quickstart_grpo.markdown(report).strip()
