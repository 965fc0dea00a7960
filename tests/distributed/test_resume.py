"""Two processes: a signal to one of them, its checkpoint, and R15's change of the number of processes."""

from __future__ import annotations

from dataclasses import replace

from alignment.checkpoint import resolve, verify
from benchmarks import trials
from benchmarks.trials import Plan


def test_two_one_two_processes_see_the_batches_of_one(tmp_path):
    plan = Plan(algorithm="DPO", every=1000, epochs=2)
    trials.finish(plan, tmp_path / "whole", attempts=1)
    folder = tmp_path / "elastic"
    for world_size, place in ((2, 4), (1, 8)):
        process = trials.start(replace(plan, world_size=world_size, stop_after=place), folder)
        process.join(60)
        assert process.exitcode == 143, (folder / "output.txt").read_text()
        manifest = verify(resolve("last", folder / "checkpoints"))
        assert (manifest["step"], manifest["world_size"]) == (place, world_size)
    trials.finish(replace(plan, world_size=2), folder, attempts=1)
    assert trials.batches(folder) == trials.batches(tmp_path / "whole")


def test_two_processes_resume_bit_for_bit(tmp_path):
    plan = Plan(algorithm="DPO", every=1000, epochs=2, world_size=2)
    trials.finish(plan, tmp_path / "whole", attempts=1)
    process = trials.start(replace(plan, stop_after=5), tmp_path / "stopped")
    process.join(60)
    assert process.exitcode == 143
    trials.finish(plan, tmp_path / "stopped", attempts=1)
    assert trials.same_run(tmp_path / "stopped", tmp_path / "whole") == ""
