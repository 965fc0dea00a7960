"""What an augmentation did: a table for a terminal, and a run of the tracker that ties the new file to its source."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alignment.augmentation.rows import Rows

EXPERIMENT = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file as the tracker records a data set."""

    name: str
    path: str
    split: str
    rows: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One augmentation.

    Args:
        mode: which. seed: of its choices. settings: all of them, as plain values.
        source, written: the file read and the file written; `digest` is the sha256 of each.
        counts: what was made, by name; exact. rates: shares and distances, by name.
        dropped: rows of the source that could not be used, by reason. notes: lines for people.
    """

    mode: str
    seed: int
    settings: Mapping[str, Any]
    source: File
    written: File
    counts: Mapping[str, int]
    rates: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) pairs."""
        out = [("rows read", f"{self.source.rows:,} from {self.source.path}")]
        out += [(f"dropped: {reason}", f"{count:,}") for reason, count in self.dropped.items()]
        out += [(name, f"{count:,}") for name, count in self.counts.items()]
        out += [(name, f"{value:.4g}") for name, value in self.rates.items()]
        files = (("read", self.source), ("written", self.written))
        out += [("rows written", f"{self.written.rows:,} to {self.written.path}"), ("seed", str(self.seed))]
        return [*out, *((f"sha256 {what}", file.digest[:16] + " ...") for what, file in files)]

    def table(self) -> Table:
        """The same for a terminal."""
        table = Table(title=f"Data augmented: {self.mode}", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")  # a file's name is read to its end
        for what, value in self.lines():
            table.add_row(escape(what), escape(value))
        return table

    def to_json(self) -> str:
        values = {
            "mode": self.mode,
            "seed": self.seed,
            "settings": dict(self.settings),
            "input": self._file(self.source),
            "output": self._file(self.written),
            "counts": dict(self.counts),
            "rates": dict(self.rates),
            "dropped": dict(self.dropped),
            "notes": list(self.notes),
        }
        return json.dumps(values, indent=1, default=str) + "\n"

    @staticmethod
    def _file(file: File) -> dict[str, Any]:
        return {"path": file.path, "rows": file.rows, "sha256": file.digest}


def source_of(rows: Rows) -> File:
    """The file that was read."""
    name = Path(rows.path).name or rows.path
    return File(name=name, path=rows.path, split="input", rows=rows.report.read, digest=rows.sha256)


def written_to(out: Path, rows: int, sha256: str) -> File:
    """The file that was written."""
    return File(name=out.name, path=str(out), split="output", rows=rows, digest=sha256)


def show(summary: Summary, console: Console) -> None:
    console.print(summary.table())
    for note in summary.notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def track(summary: Summary, root: Path, tracking_uri: str | None) -> Path:
    """Record an augmentation as a run of the experiment `data`: both files as inputs with their digests, settings as
    parameters, counts as metrics, the table and its JSON as artifacts. Returns the run's folder."""
    from alignment.tracking import TrackingLogger

    tags = {
        "data.mode": summary.mode,
        "data.seed": str(summary.seed),
        "data.input": summary.source.path,
        "data.input_sha256": summary.source.digest,
        "data.output": summary.written.path,
        "data.output_sha256": summary.written.digest,
    }
    logger = TrackingLogger(
        experiment_name=EXPERIMENT,
        run_name=f"augment {summary.mode} {summary.source.name}",
        root=str(root),
        tracking_uri=tracking_uri,
        tags=tags,
    )
    logger.annotate(model="alignment data augment", trains=False)  # so that no `last` finds it
    logger.log_hyperparams({"mode": summary.mode, **summary.settings})
    numbers: dict[str, float] = {"rows read": summary.source.rows, "rows written": summary.written.rows}
    numbers |= {**summary.counts, **summary.rates}
    logger.log_metrics({f"data/{name}": float(value) for name, value in numbers.items()})
    logger.log_text(summary.to_json(), "augment.json")
    text = io.StringIO()
    show(summary, Console(file=text, width=120))
    logger.log_text(text.getvalue(), "augment.txt")
    logger.log_datasets([summary.source, summary.written])
    logger.finalize()
    return logger.run_dir
