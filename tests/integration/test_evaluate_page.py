"""docs/evaluate.md works as shown, and configs/evaluate/ with it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from alignment.cli import main
from alignment.evaluation.command import TASKS, build, read
from tests.integration.test_docs import SMALL, blocks, commands
from tests.judge_server import Asked, Reply, judging, verdict_on_canary

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_command(workdir: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    assert main(["fit", "-c", "configs/sft.yaml", *SMALL]) == 0
    path = Path("configs/evaluate/support.yaml")
    tasks = yaml.safe_load(path.read_text())
    for task in tasks.values():
        task |= {"max_rows": 4} | ({"max_tokens": 4} if "max_tokens" in task else {})
    path.write_text(yaml.safe_dump(tasks))
    line, _ = commands("evaluate.md")
    assert main(shlex.split(line)[1:]) == 0
    assert set(json.loads(Path("evaluation.json").read_text())["tasks"]) == set(tasks)


def test_the_judged_ones(workdir: Path) -> None:
    """With a judge that gives a 9 to what is longer than ten characters; the model is compared with itself."""

    def script(asked: Asked) -> Reply:
        if asked.canary:
            return Reply(verdict_on_canary(asked))
        if "REPLY" in asked.parts:
            return Reply(f"{asked.code} {9 if len(asked.parts['REPLY']) > 10 else 2}")
        assert asked.parts["REPLY A"] == asked.parts["REPLY B"]
        return Reply(f"{asked.code} tie")

    Path("my_questions.jsonl").write_text('{"turns": ["Say hello.", "Again."], "category": "writing"}\n')
    Path("my_prompts.jsonl").write_text('{"prompt": "Say hello."}\n{"prompt": "Say no."}\n')
    tasks = yaml.safe_load((REPOSITORY / "configs" / "evaluate" / "judged.yaml").read_text())
    assert tasks["preferred"]["against"] == "models/smollm2"
    tasks["preferred"]["against"] = "tiny"
    with judging(script) as server:
        for task in tasks.values():
            assert task["judge"]["endpoint"]["url"] == "http://127.0.0.1:8000/v1"
            task["judge"]["endpoint"]["url"] = server.url
            task["max_tokens"] = 8
        config = workdir / "configs" / "evaluate" / "judged.yaml"
        config.parent.mkdir(parents=True)
        config.write_text(yaml.safe_dump(tasks))
        _, line = commands("evaluate.md")
        assert main([*shlex.split(line.replace(" last ", " tiny "))[1:], "--no_tracking"]) == 0
    found = json.loads(Path("evaluation.json").read_text())["tasks"]
    assert found["conversations"]["metrics"]["unjudged"] == 0
    assert (found["preferred"]["metrics"]["ties"], found["preferred"]["metrics"]["win_rate"]) == (1.0, 0.5)


def test_local_files(workdir: Path) -> None:
    rows = {
        "my_rows": {"prompt": "a", "completion": "b"},
        "my_questions": {"question": "a", "choices": ["b", "c"], "answer": "B"},
        "my_pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "subset": "s"},
    }
    for name, row in rows.items():
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    config = str(REPOSITORY / "configs" / "evaluate" / "local.yaml")
    assert main(["evaluate", "tiny", "-c", config, "--no_tracking"]) == 0


def test_a_task_of_ones_own(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("evaluate.md", "python")
    Path("my_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(str(workdir))
    Path("t.yaml").write_text("a: {task: my_tasks.Parameters}")
    assert main(["evaluate", "tiny", "-c", "t.yaml", "--no_tracking"]) == 0
    assert json.loads(Path("evaluation.json").read_text())["tasks"]["a"]["metrics"]["count"] > 100_000


def test_every_file_is_built_and_every_task_is_in_the_table() -> None:
    for path in (REPOSITORY / "configs" / "evaluate").glob("*.yaml"):
        for name, settings in read(path).items():
            build(name, settings)
    page = (REPOSITORY / "docs" / "evaluate.md").read_text()
    assert all(f"| `{kind}` |" in page for kind in TASKS)
