"""What all ranks agree on while they save and load: a failure of one is raised on every one."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hpc_rlhf.errors import ComponentError
from hpc_rlhf.fs import system_error, write_failure

T = TypeVar("T")


class Agreement:
    """A gloo group over the learner, for one thread of every rank. Every method is collective."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """Args:
        directory: where is read and written, for messages.
        timeout_s: of every message; a rank that is gone is noticed at once.
        """
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._directory = directory

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Raise on every rank what the body raised on any, so that none waits for the others."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 (raised below, on every rank)
            error = raised
        errors = self.gather(None if error is None else self._describe(error))
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            raise ComponentError(f"checkpoint: {what}: learner rank {rank}: {text}") from error

    def on_rank_0(self, what: str, function: Callable[[], T]) -> T:
        """Run ``function`` on rank 0 and return its value on every rank."""
        box: list[Any] = [None]
        with self.on(what):
            if self.rank == 0:
                box[0] = function()
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def _describe(self, error: Exception) -> str:
        if isinstance(error, ComponentError):
            return str(error)
        cause = system_error(error)
        if cause is not None:
            return write_failure(cause, self._directory)
        return f"{type(error).__name__}: {error}"
