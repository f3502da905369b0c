import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.errors import UserError
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.planner.weights import check_weights, read_header


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards with an index."""
    directory = make_tiny_model(tmp_path_factory.mktemp("models") / "m")
    single = directory / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{shard:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _set_byte(path: Path, position: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)


def _drop_from_index(path: Path, key: str) -> None:
    index = json.loads(path.read_text())
    del index["weight_map"][key]
    path.write_text(json.dumps(index))


def _save_without(path: Path, name: str) -> None:
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


NORM = "model.norm.weight"
DAMAGES: list[tuple[str, Callable[[Path, Path], object], str]] = [
    (
        "cut off in the data",
        lambda s, _: _truncate(s, s.stat().st_size - 1),
        "{shard}: truncated: e",
    ),
    (
        "cut off in the header",
        lambda s, _: _truncate(s, 100),
        "{shard}: truncated: its header alone",
    ),
    ("empty", lambda s, _: _truncate(s, 0), "{shard}: 0 bytes that are no safetensors file"),
    ("too long", lambda s, _: s.write_bytes(s.read_bytes() + b"x"), "{shard}: damaged: expected "),
    ("no safetensors", lambda s, _: s.write_bytes(b"PK" * 500), "{shard}: 1000 bytes that are no"),
    ("header not JSON", lambda s, _: _set_byte(s, 8, b"?"), "{shard}: its header is damaged (JSON"),
    ("missing shard", lambda s, _: s.unlink(), "{shard}: missing; model.safetensors.index.json"),
    (
        "Git LFS",
        lambda s, _: s.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "{shard}: a pointer of Git LFS, not the weights; run `git lfs pull`",
    ),
    ("index not JSON", lambda _, i: i.write_text("{"), "{index}: no index of safetensors files"),
    (
        "index of something else",
        lambda _, i: i.write_text("[]"),
        "{index}: no index of safetensors",
    ),
    ("index incomplete", lambda _, i: _drop_from_index(i, NORM), f"tensors are missing: {NORM}"),
    (
        "shard of another download",
        lambda s, _: _save_without(s, NORM),
        f"does not hold {NORM}, whi",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_damage_is_named(
    whole: Path, tmp_path: Path, damage: Callable[[Path, Path], object], message: str
) -> None:
    directory = tmp_path / "m"
    shutil.copytree(whole, directory)
    index = directory / "model.safetensors.index.json"
    shard = directory / json.loads(index.read_text())["weight_map"][NORM]
    spec = HfModelSpec.from_directory(directory)
    check_weights(directory, spec)
    damage(shard, index)
    with pytest.raises(UserError) as caught:
        check_weights(directory, spec)
    assert message.format(shard=shard, index=index) in str(caught.value)


def test_sizes_that_do_not_fit_the_shapes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for offsets in ([[0, 8], [8, 12]], [[0, 8], [12, 20]]):
        header = {
            name: {"dtype": "F32", "shape": [2], "data_offsets": at}
            for name, at in zip("ab", offsets, strict=True)
        }
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offsets[1][1]))
        with pytest.raises(UserError, match="its header is damaged"):
            read_header(path)


def test_every_dtype_of_numpy_is_measured(tmp_path: Path) -> None:
    kinds = (np.float16, np.float32, np.float64, np.int8, np.uint16, np.int64, np.bool_)
    tensors = {np.dtype(kind).name: np.zeros((3, 2), kind) for kind in kinds}
    save_file(tensors, tmp_path / "x.safetensors")
    shapes = read_header(tmp_path / "x.safetensors")
    assert shapes == dict.fromkeys(tensors, (3, 2))
