"""The files of a Hugging Face model directory: slices read from it, an export written to it."""

import filecmp
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import fsync_directory, share
from hpc_rlhf.models.hf_layout import (
    HfModelSpec,
    HfTensor,
    Piece,
    check_tensors,
    stage_parameters,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Tokenizers, chat templates, generation settings. Not README files: they describe other weights.
COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


class HfWeights:
    """The tensors of a model directory, one or many files, opened (memory-mapped) when needed.

    Example:
        >>> with HfWeights(directory) as weights:
        ...     weights.check(spec)
        ...     weights.read(piece)
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._files = self._locate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, spec: HfModelSpec, *, optional: Collection[str] = ()) -> None:
        """Check names and shapes against ``spec``.

        Args:
            optional: names of tensors that may be missing.

        Raises:
            UserError: names the tensors that are missing, unknown or of another shape.
        """
        shapes = {name: tuple(self._slice(name).get_shape()) for name in self._files}
        check_tensors(spec, shapes, where=self.directory, optional=optional)

    def read(self, piece: Piece) -> torch.Tensor:
        """Read one slice, in the dtype of the file, on the CPU.

        Raises:
            UserError: it holds NaN or infinity: every loss and every sample would be of them.
        """
        index = (slice(None),) * piece.dim + (slice(piece.start, piece.stop),)
        values: torch.Tensor = self._slice(piece.tensor.name)[index]
        if bad := values.numel() - int(torch.isfinite(values).sum()):
            raise UserError(
                f"{self._files[piece.tensor.name]}: {piece.tensor.name}: {bad} of {values.numel()} values "
                "are NaN or infinite. Download or copy the model again, or take an earlier checkpoint "
                "of whoever trained it"
            )
        return values

    def _locate(self) -> dict[str, Path]:
        """File of each tensor, by name."""
        index, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        if index.exists():
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {name: self.directory / file for name, file in names.items()}
        if single.exists():
            return dict.fromkeys(self._file(single).keys(), single)
        raise UserError(f"{self.directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")

    def _slice(self, name: str) -> Any:
        return self._file(self._files[name]).get_slice(name)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                opened = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
            self._open[path] = self._stack.enter_context(opened)
        return self._open[path]


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file of an export and the tensors in it."""

    name: str
    tensors: tuple[HfTensor, ...]


def plan_files(
    spec: HfModelSpec, pipeline: int, itemsize: int, max_file_bytes: int
) -> list[list[FilePlan]]:
    """The files of an export by pipeline stage; every rank computes the same plan.

    Tensors are in checkpoint order; a file is closed before the tensor that would take it beyond
    ``max_file_bytes``.
    """
    groups: list[list[list[HfTensor]]] = []
    for stage in range(pipeline):
        files: list[list[HfTensor]] = [[]]
        size = 0
        for parameter in stage_parameters(spec, tensor=1, pipeline=pipeline, stage=stage):
            for tensor in parameter.sources:
                nbytes = math.prod(tensor.shape) * itemsize
                if files[-1] and size + nbytes > max_file_bytes:
                    files.append([])
                    size = 0
                files[-1].append(tensor)
                size += nbytes
        groups.append(files)
    total = sum(len(files) for files in groups)
    names = iter(
        [SINGLE_FILE]
        if total == 1
        else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    )
    return [[FilePlan(next(names), tuple(file)) for file in files] for files in groups]


def write_files(
    directory: Path | None, files: list[FilePlan], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write one stage's ``tensors``, which come in the order of ``files``.

    With ``directory`` None they are only taken: their source is a collective.
    """
    source = iter(tensors)
    for file in files:
        held: dict[str, torch.Tensor] = {}
        for expected in file.tensors:
            name, tensor = next(source)
            assert name == expected.name and tuple(tensor.shape) == expected.shape
            if directory is not None:
                # A copy: the model's own storage may be a view into a larger buffer.
                held[name] = tensor.to("cpu", copy=True).contiguous()
        if directory is not None:
            save_file(held, directory / file.name, metadata={"format": "pt"})
            share(directory / file.name)
            _fsync(directory / file.name)  # here, because only the writing node can
    assert next(source, None) is None


def write_companions(
    directory: Path,
    source: Path,
    files: list[list[FilePlan]],
    dtype: torch.dtype,
    changes: Mapping[str, Mapping[str, Any]],
) -> None:
    """Complete an export: the index, config.json, and what is copied from ``source``.

    Args:
        changes: entries to set in the JSON files, by file name; files that are not there stay away.
    """
    plans = [file for stage in files for file in stage]
    if len(plans) > 1:
        tensors = [(tensor, file.name) for file in plans for tensor in file.tensors]
        total = sum(math.prod(tensor.shape) for tensor, _ in tensors) * dtype.itemsize
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor.name: name for tensor, name in tensors},
        }
        _write_json(directory / INDEX_FILE, index)
    config = json.loads((source / CONFIG_FILE).read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers 5 writes the former
    config[key] = str(dtype).removeprefix("torch.")
    _write_json(directory / CONFIG_FILE, config | dict(changes.get(CONFIG_FILE, {})))
    for path in sorted(source.iterdir()):
        ours = path.name == CONFIG_FILE or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and not ours:
            if path.name in changes:
                values = json.loads(path.read_text())
                _write_json(directory / path.name, values | dict(changes[path.name]))
            else:
                shutil.copyfile(path, directory / path.name)


def publish_export(staging: Path, target: Path) -> None:
    """Make ``staging`` durable and rename it to ``target``; an equal ``target`` is left as it is.

    Raises:
        UserError: ``target`` exists with other contents.
    """
    if target.exists():
        if not _same_files(staging, target):
            raise UserError(
                f"{target} exists and is different; remove it or choose another directory"
            )
        return
    for path in staging.iterdir():
        _fsync(path)
    fsync_directory(staging)
    staging.rename(target)
    fsync_directory(target.parent)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or names != sorted(path.name for path in other.iterdir()):
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
