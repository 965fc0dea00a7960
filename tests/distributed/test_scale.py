"""Tensor parallelism on two gloo processes equals one process, also what it saves and says; archived policies and the
guard's second look where a model is sharded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from alignment.checkpoint import load_checkpoint_folder
from alignment.export import export
from tests.distributed import fsdp_checks
from tests.distributed import scale_checks as checks
from tests.distributed.pair import run_pair

Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have run."""
    folder = tmp_path_factory.mktemp("two")
    run_pair("scale_checks", folder, timeout=600)
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Results]:
    return [torch.load(folder / f"results.rank{rank}", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Results]]:
    """Two ranks of two processes each: where they have run, and what came of it."""
    folder = tmp_path_factory.mktemp("four")
    run_pair("scale_checks", folder, timeout=600, processes=4)
    return folder, [torch.load(folder / f"results.rank{rank}", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("one")
    checks.run_all(1, folder)
    results: Results = torch.load(folder / "results.rank0", weights_only=True)
    return results


# ---------------------------------------------------------------------- tensor parallelism


def alike(found: Results, expected: Results) -> None:
    """First gradient to 2e-6 of its norm, losses of all updates to 1e-5, metrics of the first batch to 1e-6 but for the
    gradient's length, whose squares one process sums in fp32."""
    gradient = expected["gradient"].double()
    assert gradient.norm() > 1e-2
    assert (found["gradient"] - gradient).norm() <= 2e-6 * gradient.norm()
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=2e-5)
    logged, other = ({k: v for k, v in r["logged"].items() if "grad" not in k} for r in (found, expected))
    assert logged == pytest.approx(other, rel=1e-6, abs=1e-6, nan_ok=True)
    assert found["val"] == pytest.approx(expected["val"], rel=1e-4, abs=1e-4)
    assert found["global_step"] == expected["global_step"]
    assert len(expected["losses"]) >= 6


@pytest.mark.parametrize("name", checks.TENSOR)
def test_two_processes_that_are_one_rank(name: str, one: Results, two: list[Results]) -> None:
    for process in two:
        alike(process[name], one[name])
        assert 0.5 < process[name]["held"] < 0.7  # embeddings and norms are on both


@pytest.mark.parametrize("name", checks.ARCHITECTURES)
def test_plans_of_other_architectures(name: str, two: list[Results]) -> None:
    for process in two:
        found = process["models"][name]
        assert found["logps"] <= 1e-5
        assert found["no gradient"] <= 1e-5
        assert found["gradient"] <= 1e-5


def resumes(found: Results) -> None:
    """Bit for bit: weights, moments, and the losses on the way there."""
    whole, rest, again = found["losses"]
    assert found["same"]
    assert found["rolled back"]
    assert found["from one process"]
    assert len(whole) == 6
    assert len(rest) == 3
    assert whole[-3:] == rest == again


def test_a_tensor_parallel_run_resumes(two: list[Results]) -> None:
    for process in two:
        resumes(process["resumed"]["dpo"])


@pytest.mark.slow
def test_two_ranks_of_two_processes(one: Results, four: tuple[Path, list[Results]], tmp_path: Path) -> None:
    """Tensor parallelism below FSDP2, in both dimensions of the mesh."""
    folder, results = four
    for process in results:
        alike(process["dpo"], one["dpo"])
        assert process["dpo"]["held"] < 0.35
        resumes(process["resumed"]["dpo"])
        assert process["archived, tensor"]["kept"]
        assert process["archived, tensor"]["said"] == one["archived"]["said"]
    ended = results[0]["resumed"]["dpo"]["end"]
    model = AutoModelForCausalLM.from_pretrained(export(folder / "resume dpo" / "step=6.ckpt", tmp_path / "out"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, ended[key])


def test_its_checkpoint_is_exported_and_read_by_one_process(folder: Path, two: list[Results], tmp_path: Path) -> None:
    """Every value is in one file alone, and plain transformers loads the folder."""
    path = folder / "resume dpo" / "step=6.ckpt"
    ended = two[0]["resumed"]["dpo"]["end"]
    model = AutoModelForCausalLM.from_pretrained(export(path, tmp_path / "out"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, ended[key])
    state = load_checkpoint_folder(path)["state_dict"]
    assert {key.removeprefix("policy.") for key in state if key.startswith("policy.")} == set(ended)
    module, given = fsdp_checks.RUNS["dpo"]()
    data = fsdp_checks.Continued(given.train, batch_size=given.batch_size)
    watch = fsdp_checks.WholeWatch()
    run = fsdp_checks.run_of(1, folder / "alone", watch, max_steps=6, limit_val_batches=0)
    run.fit(module, datamodule=data, ckpt_path=folder / "resume dpo" / "step=3.ckpt")
    expected = two[0]["resumed"]["dpo"]["losses"][0][3:]
    assert [u["loss"] for u in watch.updates] == pytest.approx(expected, abs=1e-5)


def test_replies_are_those_of_one_process(one: Results, two: list[Results]) -> None:
    expected = {row["index"]: row for batch in one["predicted"] for row in batch}
    assert len(expected) == 5
    for process in two:
        assert {row["index"]: row for batch in process["predicted"] for row in batch} == expected


# ---------------------------------------------------------------------- archived policies


@pytest.mark.parametrize("name", ["archived", "archived, tensor"])
def test_an_archived_policy_is_evaluated_where_the_model_is_sharded(
    name: str, one: Results, two: list[Results]
) -> None:
    """The codes of the start are those of one process, and so are the log-probs and replies under them; the policy is
    then what it was."""
    expected = one["archived"]
    assert (expected["archived"] - expected["own"]).abs().max() > 1e-3
    for process in two:
        found = process[name]
        assert found["kept"]
        assert found["said"] == expected["said"]
        assert torch.allclose(found["archived"], expected["archived"], rtol=0, atol=1e-5)
        assert torch.allclose(found["own"], expected["own"], rtol=0, atol=1e-4)  # after three steps
        assert found["error"] == pytest.approx(expected["error"], rel=0.05)


def test_an_fp8_reference_of_a_sharded_policy(one: Results, two: list[Results]) -> None:
    for process in two:
        assert process["fp8 reference"] == pytest.approx(one["fp8 reference"], abs=1e-5)


# ---------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("name", checks.FAULTS)
def test_the_guard_finds_the_place_on_one_rank(name: str, two: list[Results]) -> None:
    """It is put on rank 1, in the second of four batches: both ranks say so, leave that update out and go on."""
    place = {"one row's loss": "loss term"}.get(name, name)
    for process in two:
        found = process["blamed"][name]
        (told,) = found["told"]
        assert (told["place"], told["ranks"]) == (place, [1])
        whole = [math.isfinite(loss) for loss in found["losses"]]
        assert whole == [True, name == "gradient", True, True]
        assert found["finite"]
        if name != "one row's loss":
            assert "1.self_attn.o_proj" in told["text"]
        else:
            assert [row["row"] for row in told["rows"]] == [two[1]["blamed"][name]["row"]]
            assert not told["chain"]["0"]


def test_the_file_of_two_processes(folder: Path, two: list[Results]) -> None:
    assert [process["command line"] for process in two] == [0, 0]
    files = sorted(path.name for path in (folder / "cli").rglob("shard-*.safetensors"))
    assert {"shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"} == set(files)
