"""The performance benchmark: workloads, limits by hand, the report on made-up steps, and refusing a busy machine."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from alignment import cli
from benchmarks.online.bench import read_lines
from benchmarks.performance import __main__ as command
from benchmarks.performance import limit, measure, ours, report, shares, turns
from benchmarks.performance.limit import Ceiling
from benchmarks.performance.workloads import (
    LARGE,
    MIDDLE,
    SMALL,
    WIDE,
    WORKLOADS,
    Shape,
    model_of,
    rows_of,
    specify,
    tokenizer_of,
)

TINY = Shape(hidden=16, mlp=32, layers=2, heads=2, vocabulary=64)


def tiny(name: str, **changes: object):
    """A workload with few and short rows."""
    work = WORKLOADS[name]
    sizes = {} if work.kind == "sft" else {"prompt": 5, "completion": 4}
    return replace(work, shape=TINY, rows=2, completions=min(2, work.completions), mean=None, **sizes, **changes)


def test_shapes_have_the_parameters_they_are_named_after() -> None:
    assert sum(p.numel() for p in model_of(TINY, None).parameters()) == TINY.parameters
    assert SMALL.parameters == pytest.approx(15.2e6, rel=0.01)
    assert WIDE.parameters == pytest.approx(45.2e6, rel=0.01)
    assert LARGE.parameters == pytest.approx(0.6e9, rel=0.05)
    assert MIDDLE.parameters == pytest.approx(270e6, rel=0.05)


def test_completions_end_after_as_many_tokens_as_asked() -> None:
    shape = replace(TINY, vocabulary=512)
    ids = torch.randint(2, 512, (16, 64), generator=torch.Generator().manual_seed(1))
    for mean in (10, None):
        with torch.no_grad():
            share = model_of(shape, mean)(input_ids=ids).logits[:, 8:].softmax(-1)[..., 1].mean()
        assert share == pytest.approx(1 / mean, rel=0.3) if mean else share < 1e-6


def test_rows() -> None:
    pairs = rows_of(tiny("W3"), 4)
    tokenizer = tokenizer_of(TINY.vocabulary)
    assert [len(tokenizer(row["prompt"]).input_ids) for row in pairs] == [5] * 4
    assert [len(tokenizer(row[side]).input_ids) for row in pairs for side in ("chosen", "rejected")] == [3] * 8
    assert rows_of(tiny("W3"), 4) == pairs
    lengths = report.lengths(WORKLOADS["W1"])
    assert max(lengths) <= 1024
    assert 120 < statistics.mean(lengths) < 240
    flat = [row["flat"] for row in rows_of(WORKLOADS["W7"], 10)]
    assert flat == [True, True, False, False, False] * 2  # two groups in five


def test_flops_by_hand() -> None:
    """A backbone of 10 parameters: hidden 2, 1 layer; a group of 3 + 2 x 2 tokens; 4 words."""
    shape = Shape(hidden=2, mlp=0, layers=1, heads=1, vocabulary=4)
    assert shape.backbone == 16 + 4 + 2  # four 2 x 2 matrices, two norms, the last norm
    tokens, attended = limit.group(3, 2, 2)
    assert (tokens, attended) == (7, 6 + 2 * (6 + 3))
    forward = 2 * 22 * 7 + 4 * 2 * 24 + 2 * 2 * 4 * 4
    assert limit.forward(shape, tokens, attended, 4) == forward
    dpo = replace(WORKLOADS["W3"], shape=shape, rows=3, prompt=3, completion=2)
    assert limit.flops(dpo) == 3 * (3 + 1) * forward  # three pairs; forward and backward, and the reference
    grpo = replace(WORKLOADS["W6"], shape=shape, rows=1, prompt=3, completion=2, completions=2, flat=0.5)
    prefill, decode = 2 * 22 * 3 + 4 * 2 * 6 + 2 * 2 * 4, 2 * 22 * 4 + 4 * 2 * 18 + 2 * 2 * 4 * 4
    assert limit.flops(grpo) == prefill + decode + 0.5 * 3 * forward
    sft = replace(WORKLOADS["W1"], shape=shape, rows=1)
    assert limit.flops(sft, [6, 6]) == 3 * (2 * 22 * 6 + 4 * 2 * 21 + 2 * 2 * 4 * 4)
    traffic = 28 * shape.parameters + 4 * shape.parameters * 2  # AdamW, and weights once for each of two tokens
    assert limit.seconds(grpo, Ceiling(fp32=math.inf, bf16=1, copy=2), "fp32") == traffic / 2


@pytest.mark.parametrize("name", [name for name in WORKLOADS if not WORKLOADS[name].gpu])
def test_our_side_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every workload, tiny, through the command line; a turn for each step."""
    said = []

    class Counted:
        def ready(self) -> bool:
            return True

        def done(self, **info: object) -> bool:
            said.append(info)
            return True

    spec = specify(tiny(name), tmp_path, steps=2, epochs=1, dtype="bf16-mixed" if name == "W4" else "fp32")
    monkeypatch.setattr(turns, "current", Counted)
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(json.dumps(ours.configuration(spec)))
    assert cli.main(["fit", "-c", "config.yaml"]) == 0
    assert len(said) == 2
    assert len(read_lines(Path(spec["data"]))) == 4


def test_the_second_step_tells_its_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, list[tuple[str, float]]]] = []

    class Kept:
        def ready(self) -> bool:
            return True

        def done(self, **info: list[tuple[str, float]]) -> bool:
            said.append(info)
            return True

    monkeypatch.setattr(turns, "current", Kept)
    monkeypatch.chdir(tmp_path)
    spec = specify(tiny("W3"), tmp_path, steps=2, profile=True)
    Path("config.yaml").write_text(json.dumps(ours.configuration(spec)))
    assert cli.main(["fit", "-c", "config.yaml"]) == 0
    assert "operators" not in said[0]
    assert dict(said[1]["operators"])["aten::mm"] > 0
    assert any("attention" in name for name, _ in said[1]["operators"])


def test_shares_of_a_step() -> None:
    """Of 10 s: 4 in products, 2 in attention, 1 in AdamW, 1 of a sort, 0.5 of copies and 0.5 of sums; 1 elsewhere."""
    operators = [
        ("aten::mm", 3.0), ("aten::addmm", 1.0), ("aten::_scaled_dot_product_flash_attention_for_cpu", 2.0),
        ("aten::_fused_adamw_", 1.0), ("aten::sort", 1.0), ("aten::copy_", 0.5), ("aten::sum", 0.5),
    ]  # fmt: skip
    assert shares.by_kind(operators, 10.0) == pytest.approx(
        {"attention": 0.2, "products": 0.4, "optimizer": 0.1, "sampling, log-probs": 0.1, "copies, lookups": 0.05,
         "elements": 0.05, "outside operators": 0.1}
    )  # fmt: skip
    line = report.profile_lines({"W9": shares.by_kind(operators, 10.0)})[-1]
    assert line == "| W9 | 20% | 40% | 10% | 10% | 5% | 5% | 10% |"


def made_up(ours_peak: int) -> dict[str, object]:
    """Ours 1, 2, 1 s; theirs 4, 4, 5 s: ratios 4, 2, 5."""

    def steps(times: list[float], peak: int) -> list[dict[str, float]]:
        return [{"seconds": t, "rss_peak": peak} for t in times]

    found = {
        "settings": {"dtype": "fp32", "micro_batch": 2},
        "tried": {"fp32, micro-batch 2": 4.0, "fp32, micro-batch 8": 6.0},
        "steps": {"ours": steps([1, 2, 1], ours_peak), "theirs": steps([4, 4, 5], 2 << 30)},
        "as_it_comes": 9.0,
    }
    ceiling = {"fp32": 1e11, "bf16": 2e11, "copy": 1e10}
    return {"machine": "a machine", "ceiling": ceiling, "found": found}


def test_report(tmp_path: Path) -> None:
    result = report.Result(WORKLOADS["W3"], made_up(1 << 30))
    assert (result.ratio, result.ratios, result.memory) == (4, [2, 4, 5], 0.5)
    assert result.faster
    assert result.reached == "goal"
    assert result.tokens == 8 * (256 + 2 * 64)  # a second a step
    assert report.Result(WORKLOADS["W4"], made_up(1 << 30)).reached == "yes"  # half of the peer's memory
    assert report.Result(WORKLOADS["W4"], made_up((1 << 30) + 1)).reached == "no"
    assert report.Result(WORKLOADS["W3"], made_up(3 << 30)).reached == "goal"  # it has no bar of memory
    assert report.Result(replace(WORKLOADS["W3"], bar=4.5), made_up(1 << 30)).reached == "no"
    page, readme = tmp_path / "page.md", tmp_path / "README.md"
    readme.write_text("before <!-- performance -->old<!-- end --> after")
    report.write({"W3": made_up(1 << 30)}, page, readme, tmp_path)
    assert (
        "| W3 DPO (fp32) | 1.00 | 4.00 | 4.00 (2.00 to 5.00) | 2.4 | 4.0 | goal | 9.00 | 1.00 | 2.00 |"
        in page.read_text()
    )
    assert "| DPO (fp32) | 4.0 (2.0 to 5.0) | 0.50 |" in readme.read_text()
    assert readme.read_text().startswith("before <!-- performance -->\n|")


def test_the_peer_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Smaller micro-batches as long as they help (a step in 50 slower does not end it), then bf16 at the best one,
    then without large pages."""
    seconds = {"fp32 32": 17.9, "fp32 16": 18.0, "fp32 8": 17.0, "fp32 4": 17.5, "bf16-mixed 8": 15.0}
    seconds["bf16-mixed 8, small pages"] = 14.0
    asked: list[str] = []

    def alone(bench: measure.Bench, side: str, spec: dict[str, object], version: str) -> dict[str, float]:
        asked.append(f"{spec['dtype']} {spec['micro_batch']}{'' if spec['large_pages'] else ', small pages'}")
        return {"seconds": seconds[asked[-1]]}

    monkeypatch.setattr(measure, "specify", lambda work, folder, steps, **changes: changes)
    monkeypatch.setattr(measure.Bench, "alone", alone)
    best, tried = measure.Bench(work=tmp_path, peers=tmp_path, pairs=5).tuned(WORKLOADS["W6"])
    assert asked == list(seconds)
    assert best == {"dtype": "bf16-mixed", "micro_batch": 8, "large_pages": False}
    assert list(tried.values()) == list(seconds.values())


def test_the_other_version_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def alone(bench: measure.Bench, side: str, spec: dict[str, object], version: str) -> dict[str, float]:
        asked.append((spec["dtype"], version))
        if len(asked) == 2:
            raise RuntimeError("first\nno such trainer")
        return {"seconds": 4.25}

    monkeypatch.setattr(measure, "specify", lambda work, folder, steps, **changes: changes)
    monkeypatch.setattr(measure.Bench, "alone", alone)
    numbers = {name: made_up(1 << 30) for name in ("W3", "W4", "W9")}
    found = measure.versions(measure.Bench(work=tmp_path, peers=tmp_path, pairs=1), numbers)
    assert asked == [("fp32", "1.16.0")] * 2
    assert report.version_lines({**numbers, "versions": {"found": found}})[2:] == [
        "| W3 | 1.12.0 | 4.00 | 1.16.0 | 4.25 |",
        "| W4 | 1.12.0 | 4.00 | 1.16.0 | does not run: no such trainer |",
    ]


def test_the_readme_shows_what_was_measured(tmp_path: Path) -> None:
    """Table and page are those of the kept numbers."""
    numbers = json.loads(Path("reports/performance.json").read_text())
    inner = Path("README.md").read_text().split("<!-- performance -->\n")[1].split("\n<!-- end -->")[0]
    assert inner.splitlines() == report.readme_table(numbers)
    report.write(numbers, tmp_path / "page.md", tmp_path / "README.md", tmp_path)
    assert (tmp_path / "page.md").read_text() == Path("reports/performance.md").read_text()


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 60.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(limit, "ceiling", lambda: pytest.fail("it measured"))
    assert command.main(["W3"]) == 1
    assert "other processes use 120 % of a core" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_workload_of_a_gpu_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["H1", "--anyway"]) == 1
    assert "H1 needs a GPU, and there is none" in capsys.readouterr().err
