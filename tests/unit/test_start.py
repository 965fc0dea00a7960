"""What the start of a plain run imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SPARED = ("bitsandbytes", "datasets", "mlflow", "pandas", "peft", "pyarrow", "sklearn")
"""Packages that take a third of a second or more: for adapters, quantised weights, other sources of data, a tracker."""
CODE = (
    "import sys; from alignment.cli import main; code = main(sys.argv[1:]);"
    f"print(*(name for name in {SPARED} if name in sys.modules), sep=','); sys.exit(code)"
)


def imported(*args: str, cwd: Path) -> list[str]:
    """Which of `SPARED` a run of the command line has imported."""
    command = [sys.executable, "-c", CODE, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    return last.split(",") if last else []


def test_a_plain_run_imports_nothing_it_does_without(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}.", "chosen": f"{n} it is.", "rejected": "No."} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = ["fit", "--model", "DPO", "--data", "PreferenceData", "--data.path", "rows.jsonl", "--data.val_fraction", "0"]
    trainer = {"max_steps": 1, "accelerator": "cpu", "logger": "false", "enable_progress_bar": "false"}
    trainer |= {"enable_checkpointing": "false", "enable_model_summary": "false", "limit_val_batches": 0}
    plain = [*run, *(word for name, value in trainer.items() for word in (f"--trainer.{name}", str(value)))]
    assert imported(*plain, cwd=tmp_path) == []
    # and the names are those under which what a run does need is found
    assert "peft" in imported(*plain, "--model.policy.lora.r", "2", cwd=tmp_path)


def test_scipy_signal_waits_until_it_is_used() -> None:
    """Nothing of torchmetrics loads it; whoever uses it gets the module itself, also by the names of its submodules."""
    code = (
        "import sys; from alignment.importing import signal_later; signal_later(); import torchmetrics, inspect;"
        "inspect.getmodule(inspect.currentframe());"
        "print(type(sys.modules['scipy.signal']).__name__);"
        "import scipy.signal as early;"
        "import scipy.signal.windows;"
        "from scipy.signal import convolve;"
        "import scipy;"
        "print(scipy.signal is sys.modules['scipy.signal'], type(scipy.signal).__name__, *convolve([1, 2], [1, 1]));"
        "print(*early.hamming(3).round(2), early.convolve is convolve)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["Later", "True module 1 3 2", "0.08 1.0 0.08 True"], done.stderr
