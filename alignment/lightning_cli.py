"""`alignment fit|validate|test|predict`: LightningCLI with our defaults, one-line errors and the right precedence.

What differs from plain LightningCLI: any module and datamodule by short name; the working directory and the plug-ins of
other distributions (entry points of the group `lightning_alignment.plugins`) are importable; runs are tracked, their
checkpoints are safe folders and signals are handled without being asked for; flags and YAML win over the
hyper-parameters of `--ckpt_path`; `ckpt_path=last|best` finds the run.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import warnings
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

# Lightning 2.6 still calls what jsonargparse 4.49 deprecated; read when jsonargparse is imported.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.callbacks import BasePredictionWriter, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.enums import StrEnum

from alignment import runs
from alignment.checkpoint import CheckpointError, SafeCheckpointIO, load_checkpoint_folder, resolve
from alignment.cli_errors import CommandLineError, add_hint, explain, failed_import, lightnings, of_settings
from alignment.config_file import check_config_file, of_a_run, with_nulls
from alignment.importing import collecting_no_garbage
from alignment.settings import plain
from alignment.strategies import refused
from alignment.tracking import HasDatasetInputs, TrackingLogger
from alignment.training import TrainingMixin

# Some of Lightning's own defaults are enums (Timer's `interval`), which a plain YAML dump of the configuration refuses.
yaml.SafeDumper.add_multi_representer(StrEnum, lambda dumper, value: dumper.represent_str(value.value))

PLUGINS = "lightning_alignment.plugins"
_LOGGER = "alignment.tracking.TrackingLogger"
_REFUSED = {
    "accumulate_grad_batches": (
        1,
        "data.batch_size is what one optimizer step sees, and model.micro_batch_tokens bounds the memory of one pass",
    ),
    "gradient_clip_val": (None, "set model.optim.clip_norm instead"),
    "gradient_clip_algorithm": (None, "clipping is by norm: set model.optim.clip_norm instead"),
}
"""Trainer settings that make no sense with a shared update: name -> (their default, what to use instead)."""
_PARTS = {"model": L.LightningModule, "data": L.LightningDataModule}
"""Part of a configuration -> what its class derives from."""


class Parser(LightningArgumentParser):
    """Reports a mistake as CommandLineError with a did-you-mean, in place of usage, traceback and exit."""

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        check_config_file(path)
        settings: Namespace = super().parse_path(path, *args, **kwargs)
        return settings

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        owner = getattr(ex, "subcommand_parser", None) or self
        known = [a.dest for a in owner._actions if a.dest not in ("help", "==SUPPRESS==")]
        settings = {part: _settings_of(kind) for part, kind in _PARTS.items()}
        for part in _PARTS.keys() & set(known):
            names = {name for mine in settings[part].values() for name in mine}
            known += [f"{part}.{name}" for name in sorted(names | {"class_path", "init_args"})]
        message = add_hint(message, [*known, "init_args", "class_path"])
        if not self.exit_on_error:  # a parser inside a type: its caller has more to say
            super().error(message, ex)
        every = {path: names for mine in settings.values() for path, names in mine.items()}
        raise CommandLineError(explain(message, _class_names(), failed_import(ex), every)) from ex


class RecordRun(SaveConfigCallback):
    """Records with the tracker what a run is: its resolved configuration and its data.

    Before that, every rank learns the run folder's name from rank 0.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any) -> None:
        super().__init__(parser, config, save_to_log_dir=False, **kwargs)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for logger in _tracking(trainer):
            logger.adopt(trainer.strategy.broadcast(logger.version))
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        datamodule = getattr(trainer, "datamodule", None)
        for logger in _tracking(trainer):
            say(f"this run: {logger.run_dir}")
            suffix = f"-{logger.turn}" if logger.turn else ""
            logger.log_text(text, f"config/{TrainerFn(stage).value}{suffix}.yaml")
            logger.log_hyperparams({"seed": self.config.get("seed_everything"), **_data_settings(self.config)})
            if isinstance(datamodule, HasDatasetInputs):
                logger.log_datasets(datamodule.dataset_inputs())


class AlignmentCLI(LightningCLI):
    """One command line. `args`: the words after `alignment`, the subcommand among them."""

    def __init__(self, args: list[str]) -> None:
        self.words = args = with_nulls(of_a_run(args))
        self._named = next((word for word in args if word in LightningCLI.subcommands()), None)
        super().__init__(
            save_config_callback=RecordRun,
            trainer_defaults={"logger": {"class_path": _LOGGER}, "use_distributed_sampler": False},
            seed_everything_default=0,
            parser_kwargs={"prog": "alignment"},
            parser_class=Parser,
            args=args,
            auto_configure_optimizers=False,
        )

    # ------------------------------------------------------------------ parsing

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that runs: parsers of the others would only take time."""
        return {name: skip for name, skip in LightningCLI.subcommands().items() if self._named in (name, None)}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except RecursionError as ex:  # an anchor inside itself, or nesting no configuration has
            raise CommandLineError("a configuration file refers to itself, or nests too deeply") from ex
        except CommandLineError as ex:
            if self.words[0].startswith("-"):
                raise CommandLineError(f"{ex}; options go after the subcommand: alignment fit -c FILE ...") from ex
            raise
        self._check_trainer_settings()
        self._check_nested()

    def _check_trainer_settings(self) -> None:
        trainer = self._settings()["trainer"]
        if not isinstance(trainer, Namespace):
            raise CommandLineError(f"trainer: expected a mapping of settings, got {trainer!r}")
        for name, (default, instead) in _REFUSED.items():
            if trainer.get(name) != default:
                raise CommandLineError(f"trainer.{name} is not used here: {instead}")
        strategy = trainer.get("strategy")
        named = strategy if isinstance(strategy, str) else strategy.get("class_path", "") if strategy else ""
        if told := refused(named):
            raise CommandLineError(told)

    def _check_nested(self) -> None:
        """A setting with fields of its own is a mapping of them; constructing it would not say which one is not."""
        for part in ("model", "data"):
            chosen = self._settings().get(part)
            if not isinstance(chosen, Namespace) or not chosen.get("init_args"):
                continue
            for name, kind in _parameters(_class(chosen.class_path)).items():
                value = chosen.init_args.get(name)
                if is_dataclass(kind) and value is not None and not isinstance(value, Namespace | dict):
                    known = ", ".join(f.name for f in fields(kind))
                    raise CommandLineError(f"{part}.{name}: expected a mapping with any of {known}, got {value!r}")

    def _settings(self) -> Namespace:
        """The settings of the chosen subcommand."""
        settings: Namespace = self.config[self.config["subcommand"]]
        return settings

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as ex:
            raise CommandLineError(f"seed_everything: {ex}") from ex

    # ------------------------------------------------------------------ checkpoints

    def _parse_ckpt_path(self) -> None:
        """Find the checkpoint; its hyper-parameters count where flags and YAML are silent; print where they differ."""
        settings = self._settings()
        if settings.get("ckpt_path") is None:
            return
        if settings.ckpt_path in ("", "hpc") or settings.ckpt_path.startswith("registry"):
            raise CommandLineError(f"ckpt_path '{settings.ckpt_path}': give a checkpoint's folder, last or best")
        if settings.ckpt_path in ("last", "best"):
            self._resume_run(settings)
        try:
            saved = load_checkpoint_folder(resolve(settings.ckpt_path, ".")).get("hyper_parameters", {})
        except CheckpointError as ex:
            # The plug-in decides what to do about it: go back to an older one, or stop.
            say(f"the hyper-parameters of the checkpoint cannot be read: {ex}")
            return
        chosen = settings.model.class_path
        saved_class = saved.pop("_class_path", chosen)
        saved.pop("_instantiator", None)
        if saved_class.rpartition(".")[2] != chosen.rpartition(".")[2]:
            say(f"the checkpoint is of {saved_class}; {chosen} is used, with its own hyper-parameters")
            return
        self.config = self._settings_with(saved)
        self._report_differences(saved)

    def _settings_with(self, saved: dict[str, Any]) -> Namespace:
        """The command line parsed once more, upon the checkpoint's hyper-parameters."""
        chosen = self._settings().model.class_path
        accepted = _parameters(_class(chosen))
        model = {"class_path": chosen, "init_args": {k: v for k, v in saved.items() if k in accepted}}
        at = self.words.index(self.config["subcommand"]) + 1
        words = [*self.words[:at], "--config", json.dumps({"model": model}), *self.words[at:]]
        config = self.parser.parse_args(words)
        config[config["subcommand"]]["ckpt_path"] = self._settings()["ckpt_path"]
        config[config["subcommand"]]["trainer"]["logger"] = self._settings()["trainer"]["logger"]
        return config

    def _report_differences(self, saved: dict[str, Any]) -> None:
        used = _flat(plain(self._settings().model.init_args.as_dict()))
        for key, old in _flat(saved).items():
            if key in used and used[key] != old:
                say(f"model.{key}: {used[key]!r} is used; the checkpoint has {old!r}")

    def _resume_run(self, settings: Namespace) -> None:
        """Turn `last` or `best` into a folder: of the run `trainer.logger.run_id`, else of the newest run with the same
        experiment, run name and model class that has one. The tracker then continues that run."""
        logger, name = settings.trainer.logger, settings.ckpt_path
        if not isinstance(logger, Namespace) or logger.get("class_path") != _LOGGER:
            raise CommandLineError(f"ckpt_path={name} looks for runs of {_LOGGER}; with another logger give the folder")
        given = logger.init_args
        wanted = {"run_name": given.run_name, "model": settings.model.class_path}
        if given.run_id is not None:
            wanted = {"run_id": given.run_id}
        found = runs.find_checkpoint(name, Path(given.root).resolve(), given.experiment_name, **wanted)
        if found is not None:
            settings.ckpt_path, given.run_id = str(found.checkpoint), found.record["run_id"]
            does = "continuing" if self.config["subcommand"] == "fit" else "evaluating"
            say(f"{does} run {found.folder.name} from {settings.ckpt_path}")
            if found.note:
                say(found.note)
            return
        asked = ", ".join(f"{k}={v}" for k, v in wanted.items())
        raise CommandLineError(
            f"ckpt_path={name}: no run of experiment '{given.experiment_name}' ({asked}) under "
            f"{Path(given.root).resolve()} has a checkpoint; give its folder"
        )

    # ------------------------------------------------------------------ running

    def before_predict(self) -> None:
        """Lightning drops what `predict` returns; say so when nobody else takes it."""
        from callbacks import Predictions

        if not any(isinstance(c, (Predictions, BasePredictionWriter)) for c in self.trainer.callbacks):  # type: ignore[attr-defined]
            say("nothing writes the predictions; add --trainer.callbacks+=callbacks.Predictions")

    # ------------------------------------------------------------------ building

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as ex:
            raise CommandLineError(explain(str(ex))) from ex

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        from callbacks import Progress, Signals

        settings = self._get(self.config_init, "trainer")
        plugins, callbacks = _as_list(settings.get("plugins")), _as_list(settings.get("callbacks"))
        if not any(isinstance(p, CheckpointIO) for p in plugins):
            plugins.append(SafeCheckpointIO())
        if not any(isinstance(c, Signals) for c in callbacks):
            callbacks.append(Signals())
        wants_bar = settings.get("enable_progress_bar") is not False and not settings.get("barebones")
        if wants_bar and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(Progress())
        for logger in _as_list(settings.get("logger")):
            if isinstance(logger, TrackingLogger):
                trains = self.config["subcommand"] == "fit"
                logger.annotate(model=self._settings().model.class_path, trains=trains)
        try:
            return super().instantiate_trainer(plugins=plugins, callbacks=callbacks, **kwargs)
        except TypeError as ex:  # Lightning checks some settings by type, such as `devices`
            raise CommandLineError(f"trainer: {ex}") from ex


def main(argv: list[str]) -> int:
    """Run one of the Trainer's subcommands."""
    if os.getcwd() not in sys.path:
        # At the end: a user's file must not stand in for a package of the same name.
        sys.path.append(os.getcwd())
    _quiet(argv)
    _import_classes()
    try:
        AlignmentCLI(argv)
    except MisconfigurationException as ex:
        raise CommandLineError(lightnings(str(ex))) from ex
    except RuntimeError as ex:
        if (told := of_settings(str(ex))) is None:
            raise
        raise CommandLineError(told) from ex
    return 0


def _quiet(argv: list[str]) -> None:
    """Drop what libraries print on every run and nobody can act on."""
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated")  # peft asks transformers
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")  # no validation: as asked
    if "fit" not in argv:  # nothing but training goes on from what callbacks were
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used to create")
    # transformers imports torchao where it is installed, and both say what of it this machine and torch do not use.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_no_enum)
    notes = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if _no_advertisement not in notes.filters:
        notes.addFilter(_no_advertisement)


def _no_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass and is now natively supported" not in record.getMessage()


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in record.getMessage()


@collecting_no_garbage()
def _import_classes() -> None:
    """Import what may be named by a short name: our packages, and what other distributions registered."""
    import callbacks  # noqa: F401
    import datamodules  # noqa: F401
    import modules  # noqa: F401

    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()
        except ImportError as ex:
            raise CommandLineError(f"plug-in '{plugin.name}' ({plugin.value}) cannot be imported: {ex}") from ex


@rank_zero_only
def say(text: str) -> None:
    """A line for the user, once per run."""
    print(text, flush=True)


def _tracking(trainer: L.Trainer) -> list[TrackingLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TrackingLogger)]


def _as_list(value: Any) -> list[Any]:
    if value is None or value is False:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _class(path: str) -> type:
    """The class at an import path that the parser has imported."""
    module, _, name = path.rpartition(".")
    found: type = getattr(sys.modules[module], name)
    return found


def _parameters(cls: type) -> dict[str, Any]:
    """What constructing a class takes, also what its `**settings` hand on to its bases: name -> type, None where the
    annotation is more than a name."""
    out: dict[str, Any] = {}
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if not isinstance(init, FunctionType):
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            kind = parameter.annotation
            kind = init.__globals__.get(kind) if isinstance(kind, str) else kind
            out.setdefault(parameter.name, kind)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return out


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out


def _data_settings(config: Namespace) -> dict[str, Any]:
    """The settings of the datamodule, to compare runs by."""
    data = config.get("data")
    return {"data": {"class": data.class_path, **data.init_args.as_dict()}} if data else {}


def _class_names() -> list[str]:
    """Short names of every module, datamodule, callback and logger that is imported."""
    return sorted({cls.__name__ for kind in (*_PARTS.values(), L.Callback, Logger) for cls in _subclasses(kind)})


def _settings_of(kind: type) -> dict[str, set[str]]:
    """Class path -> names of the settings of every class of this kind that may be chosen."""
    found = {}
    for cls in _subclasses(kind):
        package = cls.__module__.partition(".")[0]
        if package not in ("alignment", "lightning"):  # parts of classes
            fixed = cls.fixed if issubclass(cls, TrainingMixin) else ()
            found[f"{package}.{cls.__name__}"] = set(_parameters(cls)) - set(fixed)
    return found


def _subclasses(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return [*found, *(below for cls in found for below in _subclasses(cls))]
