"""Log-probs of a frozen reference: computed once for a data set, kept in HDF5, used by every run.

The file is named by a hash of the model and the data. It holds ``log_probs`` float64 [N, W], the sum
over the learned tokens of every sequence, and as attributes what it was made of. A sweep that is
stopped leaves a file of the part that it has done.
"""

import hashlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish
from hpc_rlhf.learner.packing import masked_item
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.models.megatron import PolicyModel
from hpc_rlhf.types import Example, FrozenRef

FORMAT = 1
_BLOCK = (
    64  # examples swept at once: always the same ones, so that a resumed sweep is bitwise equal
)
_KEEP_EVERY_S = 60.0


@dataclass(frozen=True)
class ReferenceFile:
    """Where the log-probs of ``model`` on a data set are, and what names them."""

    path: Path
    identity: dict[str, str]

    @classmethod
    def of(cls, cache: Path, model: FrozenRef, data: str, dtype: str) -> "ReferenceFile":
        """Args:
        data: key of the tokenised data set, a hash of everything it depends on.
        """
        identity = {"model": model.sha256, "data": data, "dtype": dtype, "format": str(FORMAT)}
        text = "\n".join(f"{name}={value}" for name, value in sorted(identity.items()))
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        return cls(cache / f"reference-{key}.h5", identity)

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.partial.h5")

    def read(self) -> NDArray[np.float64] | None:
        """Log-probs [N, W], None if they are not all there."""
        return _read(self.path)

    def read_partial(self) -> NDArray[np.float64] | None:
        """Those of the first examples, None if there are none."""
        return _read(self.partial)

    def write(self, log_probs: NDArray[np.float64], *, whole: bool) -> None:
        image = io.BytesIO()  # HDF5 reads while it writes, and a published file is written once
        with h5py.File(image, "w") as file:
            file.attrs.update(self.identity)
            file["log_probs"] = log_probs
        self.path.parent.mkdir(parents=True, exist_ok=True)
        publish(self.path if whole else self.partial, lambda file: file.write(image.getbuffer()))
        if whole:
            self.partial.unlink(missing_ok=True)


def sweep(
    file: ReferenceFile,
    model: PolicyModel,
    runner: Runner,
    count: int,
    examples: Callable[[range], Sequence[Example]],
    control: ControlGroup,
    pause: Callable[[], None],
) -> NDArray[np.float64]:
    """Compute the log-probs of ``count`` examples and publish ``file``. Collective.

    Args:
        examples: those of a range of indices, the same on every rank.
        pause: called between blocks; what it raises ends the sweep, its part kept.
    """
    found = control.broadcast(file.read_partial() if control.is_coordinator else None)
    done = [] if found is None else [found]
    start = kept = sum(map(len, done))
    began = time.monotonic()
    try:
        while start < count:
            pause()
            block = examples(range(start, min(start + _BLOCK, count)))
            done.append(_log_probs(model, runner, block))
            start += len(block)
            if control.is_coordinator and time.monotonic() - began > _KEEP_EVERY_S:
                file.write(np.concatenate(done), whole=False)
                began, kept = time.monotonic(), start
    except BaseException:
        if control.is_coordinator and start > kept:
            file.write(np.concatenate(done), whole=False)
        raise
    log_probs = np.concatenate(done)
    if control.is_coordinator:
        file.write(log_probs, whole=True)
    return log_probs


def _log_probs(
    model: PolicyModel, runner: Runner, examples: Sequence[Example]
) -> NDArray[np.float64]:
    items = [masked_item(s.token_ids, s.loss_mask) for e in examples for s in e.sequences]
    sums = [tokens.sum(dtype=np.float64) for tokens in runner.token_log_probs(model, items)]
    return np.array(sums).reshape(len(examples), -1)


def _read(path: Path) -> NDArray[np.float64] | None:
    if not path.exists():
        return None
    # Without a lock: the file never changes, and a filesystem without flock refuses them.
    try:
        with h5py.File(path, "r", locking=False) as file:
            values: NDArray[np.float64] = file["log_probs"][()]
    except (OSError, KeyError) as error:
        raise UserError(
            f"{path}: log-probs of the reference, damaged ({error}); delete this file, and they are "
            "computed again"
        ) from error
    return values
