"""Small control messages among the ranks of the learner, over gloo whatever the device."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hpc_rlhf.errors import UserError

T = TypeVar("T")


class ControlGroup:
    """A gloo group over the whole learner for decisions and small objects.

    A group of its own: rollouts and decisions live in host memory, and a rank that waits for the
    coordinator must not block the stream that NCCL collectives run on.
    """

    def __init__(self, timeout_s: float) -> None:
        """Collective over the learner.

        Args:
            timeout_s: of every message; a rank that is gone is noticed at once by its broken
                connection, one that hangs after this.
        """
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Return the coordinator's ``value`` on every rank; the others' is ignored."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def from_coordinator(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the coordinator and return its value on every rank.

        Raises:
            UserError: the function raised it; on every rank.
        """
        value: T | None = None
        refusal: UserError | None = None
        if self.is_coordinator:
            try:
                value = function()
            except UserError as error:
                refusal = error
        value, refusal = self.broadcast((value, refusal))
        if refusal is not None:
            raise refusal
        return value  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, in rank order, on every rank."""
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        total = torch.tensor([int(flag)])
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._group)
        return bool(total.item())
