"""The codec and the tensor file: every kind of value comes back as it was, or is refused by name."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import OrderedDict, namedtuple
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from alignment.checkpoint import verify
from alignment.checkpoint_folder import TENSORS, load_checkpoint_folder, write_checkpoint
from alignment.codec import Encoder, decode
from benchmarks.faults import save, state


def round_trip(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode({"v": value}), allow_nan=False)
    return decode(json.loads(text), encoder.tensors)["v"]


# ---------------------------------------------------------------------- codec


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Inner:
    size: int = 3


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)


PLAIN = [
    None, True, 0, -7, 10**30, "text", "", 0.1, -0.0, float("inf"), float("-inf"), [], {}, (), [1, [2]], (1, (2, "a")),
    {"a": {"b": 1}}, {1: "int key", (2, 3): "tuple key", None: 0}, {"$tuple": [1]}, {"$": 1}, {1, 2, 3}, {(1, "x")},
    frozenset({"a"}), b"\x00\xff", timedelta(days=1, seconds=2, microseconds=3), Path("a/b"), torch.float32,
    torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_with_their_type(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_negative_zero_and_nan_keep_their_bits():
    assert str(round_trip(-0.0)) == "-0.0"
    assert round_trip(float("nan")) != round_trip(float("nan"))


def test_numpy_scalars_and_arrays():
    back = round_trip(
        {"f": np.float32(0.1), "i": np.int64(5), "a": np.arange(6).reshape(2, 3), "nan": np.float64("nan")}
    )
    assert type(back["f"]) is np.float32
    assert back["f"] == np.float32(0.1)
    assert type(back["i"]) is np.int64
    assert np.isnan(back["nan"])
    np.testing.assert_array_equal(back["a"], [[0, 1, 2], [3, 4, 5]])


def test_mappings_dataclasses_and_enums_become_plain():
    assert round_trip(OrderedDict(a=1)) == {"a": 1}
    assert round_trip(Outer()) == {"inner": {"size": 3}}
    assert round_trip(Colour.RED) == "red"


Point = namedtuple("Point", "x")
REFUSED = [object(), lambda: 0, Point(1), int, 1j, SimpleNamespace(a=1), np.array(["a"], dtype=object)]


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_unknown_objects_are_refused_with_their_place(value):
    with pytest.raises(TypeError, match="callbacks/Mine/2/deep"):
        Encoder().encode({"callbacks": {"Mine": [0, 1, {"deep": value}]}})


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensor, word, tmp_path):
    with pytest.raises(TypeError, match=rf"state_dict/odd.*{word}"):
        write_checkpoint({"state_dict": {"odd": tensor}}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


MALFORMED = ['{"$evil": 1}', '{"$tensor": "no"}', '{"$dtype": "Tensor"}', '{"$float": "1e5"}', '{"$tuple": 5}']
MALFORMED += ['{"$dict": [1]}', '{"$numpy": ["object", 1]}', '{"$bytes": "?"}', '{"$tuple": [], "a": 1}']


@pytest.mark.parametrize("text", MALFORMED)
def test_unknown_or_malformed_entries_do_not_decode(text):
    with pytest.raises(ValueError, match=r"."):
        decode(json.loads(text), {})


# ---------------------------------------------------------------------- tensors

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]


def test_tensors_of_every_kind_and_shape_come_back_bit_for_bit(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    tensors = {str(kind): base.to(kind) for kind in KINDS}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "expanded": torch.ones(1).expand(3),
    }
    write_checkpoint({"state_dict": tensors}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["state_dict"]
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        ours, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (back[name], tensor))
        assert torch.equal(ours, theirs), name


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    weight = torch.randn(100, 10)
    write_checkpoint({"state_dict": {"embed": weight, "head": weight, "row": weight[0]}}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["state_dict"]
    assert back["embed"] is back["head"]
    assert torch.equal(back["row"], weight[0])
    assert set(load_file(tmp_path / "a.ckpt" / TENSORS)) == {"state_dict/embed", "state_dict/row"}


def test_names_that_collide_keep_their_values(tmp_path):
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    write_checkpoint({"state_dict": value}, tmp_path / "a.ckpt")
    back = load_checkpoint_folder(tmp_path / "a.ckpt")["state_dict"]
    assert (int(back["a/b"]), int(back["a"]["b"])) == (1, 2)


def test_manifest_says_what_the_checkpoint_is(tmp_path):
    manifest = verify(save(tmp_path / "a.ckpt", 5))
    assert (manifest["step"], manifest["world_size"]) == (5, 1)
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    other = {**state(5), "hyper_parameters": {"beta": 0.2}}
    write_checkpoint(other, tmp_path / "b.ckpt")
    assert verify(tmp_path / "b.ckpt")["config"] != manifest["config"]
