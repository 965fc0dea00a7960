"""Runs made to show a fault, and healthy ones: what the doctor says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment.diagnosis import Examination
from alignment.diagnosis_rules import NAMES
from benchmarks import doctor
from benchmarks.doctor import RUNS
from benchmarks.doctor_faults import FAULTS
from tests.doctor_toys import DATA, alarms, examined, recorded
from tests.unit.test_diagnosis import FAULTS as LOGS


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.processes == 1])
def test_a_run_with_a_fault(name: str, tmp_path: Path) -> None:
    """The rules that it is made for give an alarm, with the evidence that it is made to leave."""
    assert FAULTS[name].missed(FAULTS[name].run(tmp_path)) == ""


def test_every_rule_has_a_run() -> None:
    """Those of two processes are in tests/distributed."""
    assert {rule for fault in FAULTS.values() for rule in fault.shows} == set(NAMES)


def test_what_a_run_must_show_is_missed_where_it_is_not() -> None:
    """A log without the fault, one with another fault besides, and one with other evidence."""
    fault = FAULTS["jolted"]
    assert fault.missed(Examination()) == "no alarm: loss_spike"
    assert fault.missed(examined(LOGS["loss_spike"])) == ""
    both = [(step, {**row, "time/data_share": 0.6, "time/data_seconds": 0.4}) for step, row in LOGS["loss_spike"]]
    assert fault.missed(examined(both)) == "alarms besides: data_bound"
    assert FAULTS["hacked_validation"].missed(examined(LOGS["reward_hacking"])) == ""
    assert FAULTS["hacked_length"].missed(examined(LOGS["reward_hacking"])) == (
        "reward (length-controlled) is no evidence"
    )


# ---------------------------------------------------------------------- the report


def entry(shows: tuple[str, ...], fired: tuple[str, ...], missed: str = "") -> dict[str, Any]:
    alarm = {"rule": fired[0], "since": 9, "line": f"{fired[0]}: seen"} if fired else None
    return {
        "what": "said",
        "shows": list(shows),
        "fired": list(fired),
        "missed": missed,
        "rows": 30,
        "seconds": 2,
        "alarms": [alarm] if alarm else [],
    }


def test_the_report_names_what_fired_and_what_should_have() -> None:
    found = {
        "jolted": entry(("loss_spike",), ("loss_spike", "kl_runaway")),
        "waiting": entry(("data_bound",), (), "no alarm: data_bound"),
        "healthy_dpo": entry((), ("truncation",), "alarms of a healthy run: truncation"),
    }
    text = doctor.page(found, "here")
    assert f"1 of {len(NAMES)} rules fire on a run made to show their fault. 1 healthy runs give 1 alarms." in text
    for row in (
        "| rule | 1 | 2 | 3 |",
        "| `loss_spike` | ● |  |  |",
        "| `kl_runaway` | ○ |  |  |",
        "| `data_bound` |  | ✗ |  |",
        "| `truncation` |  |  | ✗ |",
        "| 3 | `healthy_dpo` | nothing: said | 30 | 2 | alarms of a healthy run: truncation |",
        "- `jolted`, step 9: loss_spike: seen",
    ):
        assert row in text.split("\n")


def test_the_committed_report_is_of_these_runs_and_finds_what_it_should() -> None:
    found = json.loads(doctor.REPORT.read_text(encoding="utf-8"))
    assert set(found["runs"]) == {*FAULTS, *RUNS}
    assert doctor.REPORT.with_suffix(".md").read_text(encoding="utf-8") == doctor.page(found["runs"], found["machine"])
    for name, one in found["runs"].items():
        shows = FAULTS[name].shows if name in FAULTS else doctor.SHOWS.get(name, ())
        assert tuple(one["shows"]) == shows
        assert set(shows) <= set(one["fired"])
        assert shows or not one["fired"]


def test_a_run_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds is added to what was found before; what is not seen as it must be is exit status 1."""
    monkeypatch.setattr(doctor, "REPORT", tmp_path / "doctor.json")
    (tmp_path / "doctor.json").write_text(json.dumps({"machine": "there", "runs": {"jolted": entry((), ())}}))
    words = ["constant", "--work", str(tmp_path / "work")]
    assert doctor.main(words) == 0
    assert set(json.loads((tmp_path / "doctor.json").read_text())["runs"]) == {"jolted", "constant"}
    monkeypatch.setitem(FAULTS, "constant", replace(FAULTS["constant"], shows=("truncation",)))
    assert doctor.main(words) == 1
    for words in (["hacked_sentiment"], ["hacked"]):  # without --data; no such run
        with pytest.raises(SystemExit, match="2"):
            doctor.main(words)


# ---------------------------------------------------------------------- runs of models that can speak


def test_reward_hacking_by_a_lexicon_of_sentiment() -> None:
    """GRPO of the TinyStories model on sentiment alone: it ends as "friend friend friend"."""
    assert set(doctor.SHOWS["hacked_sentiment"]) <= alarms(recorded("hacked_sentiment"), every=5)


HEALTHY = sorted(path.stem for path in DATA.glob("healthy_*.json"))


def test_the_runs_are_those_that_a_command_makes() -> None:
    """Three healthy ones, of different algorithms, among them."""
    assert len(HEALTHY) >= 3
    files = {path.stem: json.loads(path.read_text()) for path in DATA.glob("h*.json")}
    assert set(files) == set(RUNS)
    for name, found in files.items():
        assert found["command"] == f"python -m benchmarks.doctor --data FOLDER --keep {name}"
        assert len(found["rows"]) >= 30


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_on_a_healthy_run(name: str, every: int) -> None:
    """However often one looks: not at any moment of it."""
    assert alarms(recorded(name), every=every) == set()
