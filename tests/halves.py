"""`python -m tests.halves [FLAGS]`: every test, in two processes with half of the files each; FLAGS go to pytest.

The first one writes to the terminal; what the second one wrote follows. The last line counts both. (Workers that take
tests from a queue do not stand tests that end their process.)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

NOTHING_TO_RUN = 5
"""pytest's exit status where no test was selected."""
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|warnings?)")
_CLOSING = re.compile(r"(?:\d+ \w+(?:, )?)+ in [\d.]+s")


def main(flags: Sequence[str]) -> int:
    """The worse exit status of both."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{half}.txt" for half in (0, 1)]
        with logs[1].open("wb") as log:
            second = subprocess.Popen([*_command(1), *flags], stdout=log, stderr=subprocess.STDOUT)
            first = subprocess.Popen([*_command(0), *flags], stdout=subprocess.PIPE)
            assert first.stdout is not None
            with logs[0].open("wb") as copy:
                for line in first.stdout:
                    copy.write(line)
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
            statuses = [first.wait(), second.wait()]
        print(logs[1].read_text(encoding="utf-8", errors="replace"))
        print(closing([log.read_text(encoding="utf-8", errors="replace") for log in logs], time.monotonic() - begun))
    ran = [status for status in statuses if status != NOTHING_TO_RUN]
    return max(ran, key=abs) if ran else NOTHING_TO_RUN


def _command(half: int) -> list[str]:
    return [sys.executable, "-m", "pytest", f"--half={half}"]


def closing(outputs: Sequence[str], seconds: float) -> str:
    """One line in the form of pytest's, from those that runs ended with."""
    counts: Counter[str] = Counter()
    for output in outputs:
        lines = [line for line in output.splitlines() if _CLOSING.search(line)]
        for number, what in _COUNT.findall(lines[-1] if lines else ""):
            counts[{"error": "errors", "warning": "warnings"}.get(what, what)] += int(number)
    told = ", ".join(f"{counts[what]} {what}" for what in counts if what != "warnings") or "no tests ran"
    warned = f", {counts['warnings']} warnings" if counts["warnings"] else ""
    return f"{told}{warned} in {seconds:.2f}s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
