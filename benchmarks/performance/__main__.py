"""`python -m benchmarks.performance [PART ...]`: time and memory of a training step, ours beside TRL's.

    equality     losses, gradients and log-probs of both sides on the same rows; before any time counts
    W1 ... W9    the workloads (benchmarks/performance/workloads.py)
    H1, H2       those of a GPU; only when named
    memory       peak memory over the vocabulary, and over the batch at a fixed micro-batch
    scaling      time over batch, group, prompt, completion, vocabulary and processes
    start        from nothing to the end of the first step
    versions     the other version of TRL on every workload that was measured before
    profile      where a step of ours spends its time

Without a part all of them. Both sides train the same model on the same rows in processes of their own that take turns:
a step of the one, a step of the other, never two at once. TRL's environments are made on first use (PyPI). Numbers are
kept in reports/performance.json, a part that was measured again replaces its own; the page is reports/performance.md.
`--draw` only writes the page. Refuses to measure while something else uses the processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.utils import logging as transformers_logging

from alignment.cli_errors import one_line
from alignment.errors import UserError
from benchmarks.online.bench import machine
from benchmarks.performance import limit, measure, report
from benchmarks.performance.workloads import WORKLOADS

COMMAND = "python -m benchmarks.performance"
PAGE, README, IMAGES = Path("reports/performance.md"), Path("README.md"), Path("docs/images")
BUSY = 15.0
"""Percent of one core that others may use."""


def check_idle(seconds: float = 3.0) -> None:
    """Raise UserError when other processes use the processor."""
    busy = psutil.cpu_percent(interval=seconds) * (psutil.cpu_count() or 1)
    if busy > BUSY:
        raise UserError(
            f"other processes use {busy:.0f} % of a core, and times taken beside them mean nothing: end them, or give "
            "--anyway to try the benchmark out"
        )


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 with one line on stderr when something failed."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["equality", *WORKLOADS, "versions", *measure.PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; none: all")
    parser.add_argument("--pairs", type=int, default=5, help="steps of each side that count, after one that does not")
    parser.add_argument("--work", type=Path, default=Path(".cache/performance"), help="models, rows, logs")
    parser.add_argument("--peers", type=Path, default=Path(".cache/peers"), help="environments of the peers")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page; the numbers go beside it")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--anyway", action="store_true", help="measure although the machine is busy")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    transformers_logging.disable_progress_bar()
    kept = options.out.with_suffix(".json")
    numbers: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    bench = measure.Bench(work=options.work.resolve(), peers=options.peers.resolve(), pairs=options.pairs)
    try:
        usual = [name for name in names if name not in WORKLOADS or not WORKLOADS[name].gpu]
        for part in () if options.draw else options.parts or usual:
            device = "cuda" if part in WORKLOADS and WORKLOADS[part].gpu else "cpu"
            if device == "cuda" and not torch.cuda.is_available():
                raise UserError(f"{part} needs a GPU, and there is none")
            if not options.anyway:
                check_idle()
            where, ceiling = machine(), limit.ceiling(device)
            if part == "equality":
                found: Any = bench.equality()
            elif part in WORKLOADS:
                found = bench.workload(WORKLOADS[part])
            elif part == "versions":
                found = measure.versions(bench, numbers)
            else:
                found = measure.PARTS[part](bench)
            numbers[part] = {"machine": where, "ceiling": report.rates(ceiling), "found": found}
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
            print(report.line(part, numbers[part]), flush=True)
            if part == "equality" and (apart := [row["what"] for row in found if not row["ok"]]):
                raise RuntimeError(f"no time counts before both sides agree, and they do not on: {', '.join(apart)}")
    except (UserError, RuntimeError) as error:
        print(f"{COMMAND}: {one_line(str(error))}", file=sys.stderr)
        return 1
    report.write(numbers, options.out, README, IMAGES)
    print(f"report: {options.out}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
