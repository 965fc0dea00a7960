"""`alignment data check FILE...`: how good rows are before a run learns from them, and which are at fault."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from rich.console import Console

from alignment.data_options import Names, Parser, check_writable
from alignment.errors import UserError
from alignment.quality.findings import Finding
from alignment.quality.settings import LIMITS, Kind, Level, Settings, limits_of
from alignment.whole_file import write_whole

if TYPE_CHECKING:
    from alignment.quality.reading import Corpus
    from alignment.quality.report import Report

EXPERIMENT = "data"
PAGE, NUMBERS = "data_quality.html", "data_quality.json"
_STATUS = "exit status: 0 within the limits, 1 a finding beyond them, 2 a mistake in the command or a file"


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a report goes.

    Args:
        root: folder of `runs` and mlflow.db. tracking_uri: another MLflow. track: whether there is a run at all.
        out: a folder for the page and the JSON beside that. json: whether the JSON is printed in place of the table.
        strict: whether a warning is a finding.
    """

    root: Path = Path(".")
    tracking_uri: str | None = None
    track: bool = True
    out: Path | None = None
    json: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise UserError(f"--out '{self.out}' is a file; give a folder")
        if self.out is not None:
            check_writable(self.out, "--out")
        if self.track:
            check_writable(self.root, "--root")


def main(argv: Sequence[str]) -> int:
    """Returns 0 within the limits, 1 beyond them; raises UserError for files and options that cannot be used."""
    given = vars(_parser().parse_args(argv))
    given["limits"] = limits_of(given.pop("limit"))
    files = given.pop("files")
    output = Output(**{field.name: given.pop(field.name) for field in fields(Output)})
    report = check(files, Settings(**given), output, "alignment data check " + shlex.join(argv))
    failed = report.verdict == "fail" or (output.strict and report.verdict == "warn")
    return int(failed)


def check(files: Sequence[str], settings: Settings, output: Output, command: str = "") -> Report:
    """Read the files, run every check that is not left out, show and keep the report."""
    from alignment.quality.page import html
    from alignment.quality.reading import read
    from alignment.quality.report import Report, show

    corpus = read(files, settings)
    findings = [run(corpus, settings) for name, run in checks().items() if name not in settings.skip]
    report = Report(files=files, command=command, findings=findings)
    if output.json:
        print(report.to_json(), end="")
    else:
        show(report, Console())
    page = html(report)
    folders = []
    if output.out is not None:
        for name, text in ((PAGE, page), (NUMBERS, report.to_json())):
            write_whole(output.out / name, text.encode("utf-8", "backslashreplace"))  # a file's name may be no text
        folders.append(output.out)
    if output.track:
        folders.append(track(report, page, corpus, settings, output))
    if not output.json:
        for folder in folders:
            print(f"report: {folder / PAGE}")
    return report


def checks() -> Mapping[str, Callable[[Corpus, Settings], Finding]]:
    """Every check by its name, in the order of the report."""
    from alignment.quality.agreement import agreement
    from alignment.quality.duplicates import duplicates, leakage, near_duplicates
    from alignment.quality.label_noise import contradictions, label_noise
    from alignment.quality.length_bias import length_bias
    from alignment.quality.negatives import negatives
    from alignment.quality.rows import comparisons, rows
    from alignment.quality.tokens import tokens
    from alignment.quality.toxicity import adversarial, toxicity

    found: tuple[Callable[[Corpus, Settings], Finding], ...] = (
        *(rows, comparisons, agreement, negatives, duplicates, near_duplicates, leakage),
        *(length_bias, contradictions, label_noise, tokens, toxicity, adversarial),
    )
    return dict(zip(LIMITS, found, strict=True))


def track(report: Report, page: str, corpus: Corpus, settings: Settings, output: Output) -> Path:
    """Record a report as a run of its own in MLflow: figures, limits, data sets with their digests, page and JSON.
    Returns the run's folder, where both files are too."""
    from alignment.tracking import TrackingLogger

    name = ", ".join(Path(file).name for file in report.files)
    logger = TrackingLogger(
        experiment_name=EXPERIMENT, run_name=f"check {name}", root=str(output.root), tracking_uri=output.tracking_uri
    )
    logger.annotate(model="data check", trains=False)
    logger.log_hyperparams(_parameters(report, settings))
    logger.log_metrics(report.metrics())
    logger.log_datasets(list(corpus.sources))
    logger.log_text(page, PAGE)
    logger.log_text(report.to_json(), NUMBERS)
    logger.finalize()
    return logger.run_dir


def _parameters(report: Report, settings: Settings) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "limits"}
    values |= {f"limit/{f.check}": str(f.limit) for f in report.findings}
    values |= {f"verdict/{f.check}": f.verdict for f in report.findings}
    return {**values, "files": ", ".join(report.files), "command": report.command}


# ---------------------------------------------------------------------- the command line


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="alignment data check",
        description="Check rows before a run learns from them: comparisons, agreement, negatives, duplicates, leakage, "
        "length bias, label noise, lengths, toxic and adversarial texts.",
        epilog=f"checks: {', '.join(LIMITS)}; {_STATUS}",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file, a folder or a hub id, as in docs/data.md")
    usual = Settings()

    def add(name: str, help_text: str, **options: Any) -> None:
        value = getattr(usual, name)
        told = ",".join(value) if isinstance(value, tuple) else value
        shown = f"{help_text} (default: {told})" if told else help_text
        parser.add_argument(f"--{name}", default=value, help=shown, **options)

    add("kind", "what rows are for; auto: by their columns", choices=get_args(Kind))
    add("columns", "our names for yours: '{prompt: question}'", type=_mapping, metavar="MAPPING")
    add("splits", "splits to read of a hub dataset or world:support", action=Names, metavar="NAME,...")
    add("config", "configuration of a hub dataset")
    add("split_column", "column that says which split a row is in", metavar="COLUMN")
    add("annotator_column", "column that says who judged a row", metavar="COLUMN")
    add("votes_column", "column with the votes of several annotators", metavar="COLUMN")
    add("error_column", "column that says what is wrong with the rejected reply", metavar="COLUMN")
    add("adversarial_column", "column that marks adversarial rows", metavar="COLUMN")
    add("level", "scale of the votes", choices=get_args(Level))
    add("comparisons", "comparisons wanted for each prompt", type=int, metavar="N")
    add("error_types", "errors that negatives should show", action=Names, metavar="NAME,...")
    add("error_classifier", "model whose labels are kinds of errors", metavar="MODEL")
    add("toxicity_classifier", "model that tells toxic texts, in place of English phrases", metavar="MODEL")
    add("toxic_labels", "its labels that mean toxic; none: by their names", action=Names, metavar="NAME,...")
    add("adversarial_classifier", "model that tells attacks in prompts, in place of patterns", metavar="MODEL")
    add("adversarial_labels", "its labels that mean an attack; none: by their names", action=Names, metavar="NAME,...")
    add("tokenizer", "count tokens with this one: a folder, hub id, .gguf file, or tiny", metavar="NAME")
    add("template", "chat template, as for a run", choices=("auto", "chat", "plain", "raw"))
    add("max_prompt_tokens", "limit of a run, or none", type=_limit, metavar="N")
    add("max_completion_tokens", "limit of a run, or none", type=_limit, metavar="N")
    add("max_tokens", "limit of prompt and completion together", type=_limit, metavar="N")
    add("similarity", "Jaccard similarity of near-duplicates", type=float, metavar="SHARE")
    add("shingle", "words in a shingle", type=int, metavar="N")
    add("max_rows", "rows to read of each file", type=int, metavar="N")
    add("show", "rows named for each fault", type=int, metavar="N")
    add("skip", "checks to leave out", action=Names, metavar="CHECK,...")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="CHECK=WARN,FAIL", help="another limit: leakage=0,0.02"
    )
    parser.add_argument("--strict", action="store_true", help="a warning is a finding too: exit with 1")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the page and the JSON here too")
    parser.add_argument("--root", type=Path, default=Output.root, help="folder of runs and mlflow.db (default: here)")
    parser.add_argument("--tracking_uri", metavar="URI", help="another MLflow, such as http://127.0.0.1:5000")
    parser.add_argument("--no_tracking", dest="track", action="store_false", help="leave MLflow out")
    return parser


def _limit(text: str) -> int | None:
    if text.strip().lower() in ("none", "null"):
        return None
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is no number of tokens, nor none")
    return int(text)


def _mapping(text: str) -> dict[str, str]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(v, str) for pair in value.items() for v in pair):
        raise argparse.ArgumentTypeError(f"'{text}' is no mapping; give for example '{{prompt: question}}'")
    return value
