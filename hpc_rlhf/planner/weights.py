"""Whether a model directory's safetensors files are whole, by their headers alone; without torch.

A file is 8 bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape,
data_offsets) and the data, which ends where the last tensor does.
"""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpc_rlhf.errors import UserError
from hpc_rlhf.models.hf_layout import HfModelSpec, check_tensors

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_BITS = {"BOOL": 8, "F4": 4, "F6": 6} | {
    f"{kind}{bits}": bits
    for kind, sizes in {"I": (8, 16, 32, 64), "U": (8, 16, 32, 64), "F": (16, 32, 64)}.items()
    for bits in sizes
}
_BITS |= {"BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64}

Shape = tuple[int, ...]


def check_weights(directory: Path, spec: HfModelSpec, *, optional: Collection[str] = ()) -> None:
    """Check that every file is there, of the size that its header says, and holds the model.

    Args:
        optional: names of tensors that may be missing.

    Raises:
        UserError: names the file or the tensor, what was expected and what was found.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        found = _indexed(directory, index)
    else:
        single = directory / "model.safetensors"
        if not single.exists():
            raise UserError(f"{directory}: neither {single.name} nor {index.name} is there")
        found = read_header(single)
    check_tensors(spec, found, where=directory, optional=optional)


def _indexed(directory: Path, index: Path) -> dict[str, Shape]:
    try:
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{index}: no index of safetensors files, expected JSON with weight_map "
            f"({type(error).__name__}: {error})"
        ) from None
    found: dict[str, Shape] = {}
    for name in sorted(set(files.values())):
        path = directory / name
        if not path.exists():
            raise UserError(f"{path}: missing; {index.name} names it. Download the model again")
        tensors = read_header(path)
        absent = [
            tensor for tensor, file in files.items() if file == name and tensor not in tensors
        ]
        if absent:
            raise UserError(
                f"{path}: does not hold {absent[0]}, which {index.name} says it does; they are not "
                "of the same download"
            )
        found |= {tensor: tensors[tensor] for tensor, file in files.items() if file == name}
    return found


def read_header(path: Path) -> dict[str, Shape]:
    """The tensors of a safetensors file with their shapes; the file has the size that they need.

    Raises:
        UserError: it is truncated, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if (start + file.read(len(_LFS_POINTER))).startswith(_LFS_POINTER):
            raise UserError(f"{path}: a pointer of Git LFS, not the weights; run `git lfs pull`")
        if len(start) < _LENGTH_BYTES or length > _LARGEST_HEADER:
            raise UserError(f"{path}: {size} bytes that are no safetensors file (damaged?)")
        if _LENGTH_BYTES + length > size:
            raise UserError(
                f"{path}: truncated: its header alone needs {_LENGTH_BYTES + length} bytes, found "
                f"{size}. Download or copy it again"
            )
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
        data = _data_bytes(tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: its header is damaged ({type(error).__name__}: {error}). "
            "Download or copy it again"
        ) from None
    expected = _LENGTH_BYTES + length + data
    if size != expected:
        what = "truncated" if size < expected else "damaged"
        raise UserError(
            f"{path}: {what}: expected {expected} bytes by its header, found {size}. "
            "Download or copy it again"
        )
    return shapes


def _data_bytes(tensors: dict[str, Any]) -> int:
    """Where the last tensor ends; ValueError where they overlap, leave gaps or have another size."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = tensor["data_offsets"]
        bits = _BITS.get(tensor["dtype"])
        if begin != end:
            raise ValueError(f"{name} begins at {begin}, not at {end}")
        if bits is not None and (stop - begin) * 8 != math.prod(tensor["shape"]) * bits:
            raise ValueError(
                f"{name} has {stop - begin} bytes for {tensor['dtype']} {tensor['shape']}"
            )
        end = stop
    return end
