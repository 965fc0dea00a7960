"""One augmentation from the file that is read to the file that is written, shown and tracked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from alignment.augmentation import adversarial, expansion
from alignment.augmentation.rows import Rows, read_rows
from alignment.augmentation.settings import mapping
from alignment.augmentation.summary import Summary, show, source_of, track, written_to
from alignment.augmentation.writing import check_target, write_rows
from alignment.data_options import check_writable
from alignment.errors import UserError
from alignment.rollout import SamplingConfig
from alignment.settings import as_config

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a mode has made, to be written and told."""

    rows: list[dict[str, Any]]
    settings: Mapping[str, Any]
    counts: Mapping[str, int]
    rates: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run(mode: str, options: Options, given: Options) -> Summary:
    """Do what a command line asks for.

    Args:
        mode: adversarial, expand or grade. options: what stands on the command line, by name.
        given: settings of rewards, sampling, scoring and policy.

    Raises UserError; then nothing was written.
    """
    out: Path = options["out"]
    check_target(out, options["file"], options.get("force", False))
    check_writable(out.parent, "OUT")
    if not options.get("no_tracking", False):
        check_writable(options.get("root", Path(".")), "--root")
    reading = {name: options[name] for name in ("purpose", "split", "max_rows", "on_bad_row") if name in options}
    rows = read_rows(
        options["file"],
        columns=columns_of(options.get("columns")),
        config=options.get("config_name"),
        prompts_first=mode == "grade",
        **reading,
    )
    console = Console()
    if mode == "grade":
        return _grade(rows, out, options, given, console)
    result = _adversarial(rows, options) if mode == "adversarial" else _expand(rows, options, given)
    return _finish(mode, rows, out, result, options, console)


def _finish(mode: str, rows: Rows, out: Path, result: Result, options: Options, console: Console) -> Summary:
    check_target(out, options["file"], options.get("force", False))  # it may have come up since the start
    digest = write_rows(out, result.rows)
    summary = Summary(
        mode=mode,
        seed=result.settings["seed"],
        settings=result.settings,
        source=source_of(rows),
        written=written_to(out, len(result.rows), digest),
        counts=result.counts,
        rates=result.rates,
        dropped={reason: tally.count for reason, tally in rows.report.dropped.items()},
        notes=result.notes,
    )
    show(summary, console)
    if not options.get("no_tracking", False):
        folder = track(summary, options.get("root", Path(".")), options.get("tracking_uri"))
        console.print(f"recorded in {folder}", soft_wrap=True, highlight=False, markup=False)
    return summary


def _adversarial(rows: Rows, options: Options) -> Result:
    config = config_of(adversarial.AdversarialConfig, options)
    made = adversarial.inject(rows, config)
    settings = asdict(config)
    return Result(rows=made.rows, settings=settings, counts=made.counts)


def _expand(rows: Rows, options: Options, given: Options) -> Result:
    config = config_of(expansion.ExpansionConfig, options)
    settings = asdict(config)
    if config.paraphrase == expansion.RULE:
        if given:
            raise UserError(f"{next(iter(given))} is for a model that paraphrases: name one with --paraphrase")
        paraphraser = expansion.rule_paraphraser(config.seed)
    else:
        from alignment.augmentation.generation import Generator
        from alignment.augmentation.paraphrase import SAMPLING, ByModel
        from alignment.ready import ready

        sampling = _sampling({**SAMPLING, **mapping(given, "sampling")})
        loaded = ready(config.paraphrase, options.get("root", Path(".")), policy=mapping(given, "policy"))
        paraphraser = ByModel(Generator(loaded), sampling, config.seed)
        settings |= {"sampling": asdict(sampling), "model_digest": loaded.digest()}
    made = expansion.expand(rows, config, paraphraser)
    return Result(rows=made.rows, settings=settings, counts=made.counts, rates=made.rates)


def _grade(rows: Rows, out: Path, options: Options, given: Options, console: Console) -> Summary:
    from alignment.augmentation.grading import Grader, GradingConfig
    from alignment.ready import ready

    config = config_of(GradingConfig, {"success": given.get("success"), **options})
    policy = mapping(given, "policy")
    model = options.get("model") or policy.get("name")
    if not model:
        raise UserError("grading needs a model: --model with a hub id, a folder, a checkpoint or a run, last or best")
    sampling = _sampling(mapping(given, "sampling"))
    try:
        grader = Grader(rows, config, mapping(given, "rewards"), sampling, mapping(given, "scoring"))
    except TypeError as error:  # a value of another type than its setting's
        raise UserError(f"rewards or scoring hold a value of the wrong type: {error}") from error
    grader.check_columns()
    loaded = ready(str(model), options.get("root", Path(".")), policy=policy)
    journal = out.with_name(f".{out.name}.grading.jsonl")
    made, noted = grader.grade(loaded, journal, quiet=not console.is_terminal)
    identity = dict(noted.identity)
    settings = asdict(config) | identity | {"model": loaded.name, "model_digest": identity["model"]}
    result = Result(rows=made.rows, settings=settings, counts=made.counts, rates=made.rates, notes=made.notes)
    summary = _finish("grade", rows, out, result, options, console)
    noted.close()
    return summary


def config_of(cls: Any, options: Options) -> Any:
    """A mode's configuration from the options that it knows."""
    return cls(**{own.name: options[own.name] for own in fields(cls) if own.name in options})


def columns_of(text: str | None) -> dict[str, str] | None:
    """The mapping of --columns. Raises UserError for anything else."""
    if text is None:
        return None
    try:
        values = yaml.safe_load(text)
        return {str(ours): str(theirs) for ours, theirs in values.items()}
    except (yaml.YAMLError, AttributeError) as error:
        raise UserError(f"--columns is '{text}'; give a mapping: '{{prompt: question, chosen: better}}'") from error


def _sampling(values: Mapping[str, Any]) -> SamplingConfig:
    try:
        return as_config(SamplingConfig, values)
    except TypeError as error:
        raise UserError(f"sampling holds a value of the wrong type: {error}") from error
