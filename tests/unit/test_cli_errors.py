"""Every mistake on the command line or in a file: one line, the key, what was probably meant, exit status 2."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tests.cli_toys  # noqa: F401  # makes ToyModule and ToyData known by their short names
from alignment.cli import main
from alignment.cli_errors import CommandLineError, explain, is_for_user, suggest

BASE = ["fit", "--model", "ToyModule", "--data", "ToyData", "--data.path", "here"]
RUN = [*BASE, "--trainer.fast_dev_run", "true"]
RUN += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line a command line is refused with."""
    assert main(list(args)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set to")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("alignment: error: ")
    return lines[0].removeprefix("alignment: error: ")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--model.beeta=1", "unknown key 'model.beeta'; did you mean 'model.beta'?"),
        ("--model.optim.lrr=1", "unknown key 'model.optim.lrr'; did you mean 'model.optim.lr'?"),
        ("--model.step.knid=up", "unknown key 'model.step.knid'; did you mean 'model.step.kind'?"),
        ("--data.pth=x", "unknown key 'data.pth'; did you mean 'data.path'?"),
        ("--dta.path=x", "unknown key 'dta.path'; did you mean 'data.path'?"),
        ("--modell.beta=1", "unknown key 'modell.beta'; did you mean 'model.beta'?"),
        ("--model.beta", "--model, or a setting below it, is given without a value"),
        ("validate", "unexpected word 'validate'; options start with --"),
        ("--trainer.max_stepz=1", "unknown key 'trainer.max_stepz'; did you mean 'trainer.max_steps'?"),
        ("--trainer.max_steps=abc", "trainer.max_steps: expected int, got abc"),
        ("--model.beta=abc", "model.beta: expected float, got abc"),
        ("--model.beta=-1", "beta is -1.0; it must not be negative"),
        ("--model.optim.kind=sideways", "model.optim.kind: expected one of 'down', 'up', got sideways"),
        ("--seed_everything=abc", "seed_everything: expected bool or int, got abc"),
        ("--trainer.accumulate_grad_batches=4", "trainer.accumulate_grad_batches is not used here: data.batch_size is"),
        ("--trainer.gradient_clip_val=1.0", "trainer.gradient_clip_val is not used here: set model.optim.clip_norm"),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], workdir: Path, flag: str, expected: str) -> None:
    line = complaint(capsys, *RUN, flag)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modle: 3", "unknown key 'modle'; did you mean 'model'?"),
        ("model: {init_args: {beeta: 3}}", "unknown key 'model.beeta'; did you mean 'model.beta'?"),
        ("model: {class_path: ToyModul}", "model: no class 'ToyModul'; did you mean 'ToyModule'?"),
        ("model: {class_path: no_such_file.Module}", "model: No module named 'no_such_file'"),
        ("model: {class_path: os.system}", "model: Import path os.system does not correspond to a subclass"),
        ("trainer: {callbacks: [{class_path: EarlyStoping}]}", "trainer.callbacks: no class 'EarlyStoping'; did you"),
        ("trainer: [1, 2]", "trainer: expected a mapping of settings, got [1, 2]"),
        ("trainer: nowhere.yaml", "trainer: 'nowhere.yaml' is neither a file that is there nor settings"),
        ("model:\n\tclass_path: ToyModule", "'run.yaml' line 2 is not YAML: while scanning for the next token found"),
        ("# nothing yet\n", "'run.yaml' holds no settings; a configuration looks like"),
        ("trainer: {max_steps: 1}\ntrainer: {max_epochs: 2}", "'run.yaml' line 2 sets 'trainer' again; join the two"),
        ("data: {init_args: {rows: 1,\n rows: 2}}", "'run.yaml' line 2 sets 'rows' again"),
        ("modle: {class_path: ToyModule}", "unknown key 'modle.class_path'; did you mean 'model.class_path'?"),
        ("model: {class_path: ToyData}", "model: class 'ToyData' is of another kind than is needed here"),
        ("trainer: {accelerator: abacus}", "You selected an invalid accelerator name"),
        ("a: [1, 2", "'run.yaml' line 1 is not YAML: while parsing a flow sequence"),
        ("x: !!python/object/apply:os.system ['touch pwned']", "Problems parsing config: could not determine"),
        ("- 1", "'run.yaml' is no mapping of settings"),
        ("unknown: &a [*a]", "a configuration file refers to itself"),
    ],
)
def test_files(capsys: pytest.CaptureFixture[str], workdir: Path, text: str, expected: str) -> None:
    Path("run.yaml").write_text(text)
    assert complaint(capsys, *RUN, "-c", "run.yaml").startswith(expected)
    assert not Path("pwned").exists()


def test_a_file_of_bytes_is_named(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    Path("run.yaml").write_bytes(b"model: \xff\n")
    assert complaint(capsys, *RUN, "-c", "run.yaml").startswith("'run.yaml' is not a text file in UTF-8: ")


def test_options_before_the_subcommand(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    Path("run.yaml").write_text("model: {class_path: ToyModule}\n")
    for words in (["-c", "run.yaml", "fit"], ["--model.beta", "0.2", *RUN]):
        assert "options go after the subcommand: alignment fit -c FILE" in complaint(capsys, *words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise RuntimeError('boom')", "line 1: RuntimeError: boom"),
        ("x = 1\nimport not_there", "line 2: ModuleNotFoundError: No module named 'not_there'"),
        ("def f(:", "line 1: invalid syntax"),
        ("import lightning\nclass Helo(lightning.Callback): pass", "no attribute 'Hello'; did you mean '{name}.Helo'?"),
        ("class Hello: pass", "{name}.Hello does not correspond to a subclass of Callback"),
    ],
)
def test_a_file_of_the_user_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], workdir: Path, request: pytest.FixtureRequest, text: str, expected: str
) -> None:
    name = f"broken{abs(hash(request.node.name))}"
    Path(f"{name}.py").write_text(text + "\n")
    line = complaint(capsys, *RUN, f"--trainer.callbacks+={name}.Hello")
    assert line.startswith("trainer.callbacks: ")
    assert line.endswith(expected.format(name=name))


def test_a_run_without_data(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    assert main(["fit", "--model", "ToyModule", "--trainer.fast_dev_run", "true"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "alignment: error: there is no train data; name a datamodule with --data"


@pytest.mark.parametrize("path", ["", "hpc", "registry:x"])
def test_checkpoints_that_are_no_folders(capsys: pytest.CaptureFixture[str], workdir: Path, path: str) -> None:
    expected = f"ckpt_path '{path}': give a checkpoint's folder, last or best"
    assert complaint(capsys, *RUN, f"--ckpt_path={path}") == expected


def test_stopping_early_on_an_unknown_metric(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.max_epochs=1"]
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=nope"]
    assert main([*BASE, *quiet, *stop]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("alignment: error: Early stopping conditioned on metric `nope` which is not available.")


def test_the_same_callback_twice(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    twice = ["--trainer.callbacks+=callbacks.PlateauBeta"] * 2
    expected = "trainer.callbacks has PlateauBeta twice, with nothing that a checkpoint could tell them apart by; leave"
    assert complaint(capsys, *RUN, *twice) == f"{expected} one of them out"


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    assert "nowhere.yaml'" in complaint(capsys, "fit", "-c", "nowhere.yaml")


@pytest.mark.parametrize(("word", "meant"), [("fitt", "fit"), ("vaildate", "validate"), ("exprot", "export")])
def test_subcommands(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    assert complaint(capsys, word) == f"no subcommand '{word}'; did you mean '{meant}'?"


def test_debug_keeps_the_cause(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> None:
    monkeypatch.setenv("ALIGNMENT_DEBUG", "1")
    with pytest.raises(CommandLineError) as caught:
        main([*RUN, "--model.beta=-1"])
    assert isinstance(caught.value.__cause__, ValueError)


# ---------------------------------------------------------------------- hostile files (R17, small N)

VALUES = [
    *["null", "''", ".nan", ".inf", "-1", "1e400", "99999999999999999999999", "[]", "{}", "[[[[]]]]", "true", "~"],
    *["2001-01-01", "!!binary aGk=", "&a [*a]", "'../../../etc/passwd'", "/dev/null", '"\\ud800"', '"\\0"', "'%s%n'"],
    *["{class_path: 3}", "{class_path: ToyModule, init_args: 7}", "{init_args: {}}", "[{class_path: Timer}, 3]"],
    *["os.system", "*undefined", "!!python/name:os.system ''", "{? [1] : 2}", "😀", "run.yaml", f"'{'x' * 5000}'"],
    "{class_path: torch.nn.Linear}",
]
KEYS = [
    *["model", "data", "trainer", "seed_everything", "ckpt_path", "weights_only", "unknown", "__class__", "''", "123"],
    *["trainer.logger", "trainer.callbacks", "trainer.devices", "trainer.max_steps", "trainer.plugins"],
    *["trainer.strategy", "trainer.precision", "trainer.profiler", "trainer.limit_train_batches", "trainer.max_time"],
    *["trainer.unknown", "trainer.barebones", "model.class_path", "model.init_args", "model.init_args.beta"],
    *["model.init_args.optim", "model.init_args.step", "model.init_args.note", "model.unknown"],
    *["data.init_args.path", "data.init_args.rows"],
]


def hostile(seed: int) -> str:
    """One to three nasty values at random places of a configuration file; sometimes cut, sometimes with odd bytes."""
    draw = random.Random(seed)
    lines = []
    for _ in range(draw.randint(1, 3)):
        head, *rest = draw.choice(KEYS).split(".") if draw.random() < 0.9 else [draw.choice(VALUES[:5])]
        value = draw.choice(VALUES)
        lines.append(f"{head}: {value}" if not rest else f"{head}: {{{': {'.join(rest)}: {value}{'}' * len(rest)}")
    text = "\n".join(lines) + "\n"
    if draw.random() < 0.1:
        text = text[: draw.randint(1, len(text))]
    if draw.random() < 0.05:
        text += draw.choice(["\ufeff", "\t- x", "\x07", "---\nb: 1", "%YAML 9.9"])
    return text


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_hostile_files(capsys: pytest.CaptureFixture[str], workdir: Path, first: int) -> None:
    """Any file either runs or is refused in one line. Nothing it names is executed or written outside its folder."""
    before = {p.name for p in workdir.parent.iterdir()}
    for seed in range(first, first + 10):
        Path("run.yaml").write_bytes(hostile(seed).encode(errors="surrogatepass"))
        code = main([*RUN, "-c", "run.yaml"])
        errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("alignment: error: ")]
        assert (code, len(errors)) in {(0, 0), (2, 1)}, hostile(seed)
        assert "Traceback" not in "".join(errors)
    assert {p.name for p in workdir.parent.iterdir()} == before


# ---------------------------------------------------------------------- the pieces


def test_suggestions_look_at_the_whole_then_the_first_then_the_last_part() -> None:
    known = ["trainer.max_steps", "data", "data.path", "model"]
    assert suggest("trainer.max_stepz", known) == "trainer.max_steps"
    assert suggest("dta.path_to_the_rows", known) == "data"
    assert suggest("modle.frobnicate", known) == "model"
    assert suggest("trainr.max_stepz", known) == "trainer.max_steps"
    assert suggest("x.max_steps", known) == "trainer.max_steps"
    assert suggest("zzzzzz", known) is None


def test_explain_takes_the_alternative_that_got_furthest() -> None:
    report = """Parser key "model":
      Errors:
        - Problem with given class_path 'modules.DPO':
            Parser key "lora":
              Errors:
                - Problem with given class_path 'alignment.policy.LoRAConfig':
                    Option 'rank' is not accepted (did you mean 'r'?)
                - Expected a <class 'NoneType'>
              Given value: NestedArg(key='rank', val='1')"""
    assert explain(report) == "unknown key 'model.lora.rank'; did you mean 'model.lora.r'?"


def test_explain_leaves_out_alternatives_that_failed_further_out() -> None:
    report = """Parser key "model.rewards":
      Errors:
        - Problem with given class_path 'alignment.rewards.RewardSpec':
            Parser key "weight":
              Expected a <class 'float'>. Got value: heavy
        - Expected a <class 'str'>
      Given value: {'weight': 'heavy'}"""
    assert explain(report) == "model.rewards.weight: expected float, got heavy"


@pytest.mark.parametrize("problem", ["Option 'a.x' is not accepted", "unrecognized arguments: --a.x=1"])
def test_a_setting_of_other_classes_is_no_misspelt_one(problem: str) -> None:
    report = f"""Parser key "model":
      Errors:
        - Problem with given class_path 'modules.PPO':
            {problem} (did you mean 'ab'?)"""
    settings = {"modules.PPO": {"ab"}, "modules.GRPO": {"a", "ab"}, "modules.MORL": {"a"}}
    told = "unknown key 'model.a.x'; modules.PPO has no a: it is a setting of modules.GRPO, modules.MORL"
    assert explain(report, settings=settings) == told
    del settings["modules.GRPO"], settings["modules.MORL"]
    assert explain(report, settings=settings) == "unknown key 'model.a.x'; did you mean 'model.ab'?"


def test_messages_stay_one_bounded_line() -> None:
    line = str(CommandLineError("a\nb " + "c" * 5000))
    assert line.startswith("a b c")
    assert len(line) == 400


def _raised(source: str, module: str) -> BaseException:
    try:
        exec(compile(source, "somewhere.py", "exec"), {"__name__": module})
    except (ValueError, KeyError) as ex:
        return ex
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("source", "module", "for_user"),
    [
        ("raise ValueError('give a path')", "modules.dpo", True),
        ("raise ValueError('not ours')", "torch.nn", False),
        ("int('x')", "modules.dpo", False),
        ("raise KeyError('a bug')", "modules.dpo", False),
        ("from alignment.errors import UserError\nraise UserError('theirs')", "some_plugin", True),
    ],
)
def test_only_deliberate_errors_of_ours_are_for_the_user(source: str, module: str, for_user: bool) -> None:
    assert is_for_user(_raised(source, module)) is for_user
