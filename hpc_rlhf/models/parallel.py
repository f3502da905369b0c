"""Megatron's process groups, for one layout or for several side by side.

Megatron-core knows one TP x PP x DP: its groups are globals of ``parallel_state``, which layers,
pipeline schedules and optimizers look up whenever they run. A layout here is a value of these
globals, put in place around what Megatron does with a model of that layout. The first one that is
made stays in place at other times.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup, get_world_size

from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.errors import UserError


def _globals() -> dict[str, Any]:
    """Megatron's groups, ranks and sizes; its constants and functions are named otherwise."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }


_NOTHING: Mapping[str, Any] = MappingProxyType(_globals())
_made: dict[tuple[int, int], "ParallelLayout"] = {}


class ParallelLayout:
    """This rank's place in one TP x PP x DP, and its groups.

    A context manager, within which Megatron's functions work in this layout.
    """

    def __init__(self, parallel: ParallelConfig, *, timeout_s: float) -> None:
        """Collective over the default process group.

        Args:
            timeout_s: after which a collective of these groups raises.
        """
        before = _globals()
        vars(parallel_state).update(_NOTHING)
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                distributed_timeout_minutes=timeout_s / 60,
            )
            self._globals = _globals()
            self.tensor_rank: int = parallel_state.get_tensor_model_parallel_rank()
            self.tensor_group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
            self.pipeline_rank: int = parallel_state.get_pipeline_model_parallel_rank()
            self.is_first_stage: bool = parallel_state.is_pipeline_first_stage()
            self.is_last_stage: bool = parallel_state.is_pipeline_last_stage()
            self.data_rank: int = parallel_state.get_data_parallel_rank()
            self.data_size: int = parallel_state.get_data_parallel_world_size()
            self.data_group: ProcessGroup = parallel_state.get_data_parallel_group()
        finally:
            vars(parallel_state).update(before)
        self._outer: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._outer.append(_globals())
        vars(parallel_state).update(self._globals)
        return self

    def __exit__(self, *_: object) -> None:
        vars(parallel_state).update(self._outer.pop())


def initialize_model_parallel(parallel: ParallelConfig, *, seed: int, timeout_s: float) -> None:
    """Make Megatron's process groups, put them in place, and seed its random states.

    Collective over the default process group, which must exist. Another layout is added by
    :func:`add_layout`.

    Args:
        seed: of the random states that differ by tensor-parallel and pipeline rank.
        timeout_s: after which a collective of these groups raises.

    Raises:
        UserError: the number of ranks is not divisible by ``tensor`` x ``pipeline``.
    """
    add_layout(parallel, timeout_s=timeout_s).__enter__()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def add_layout(parallel: ParallelConfig, *, timeout_s: float) -> ParallelLayout:
    """Make the process groups of a layout, unless they are there. Collective like the above.

    Raises:
        UserError: the number of ranks is not divisible by ``tensor`` x ``pipeline``.
    """
    ranks = get_world_size()
    if ranks % (parallel.tensor * parallel.pipeline):
        raise UserError(
            f"{ranks} learner ranks are not divisible by tensor x pipeline = "
            f"{parallel.tensor} x {parallel.pipeline}"
        )
    sizes = (parallel.tensor, parallel.pipeline)
    if sizes not in _made:
        _made[sizes] = ParallelLayout(parallel, timeout_s=timeout_s)
    return _made[sizes]


def layout_of(parallel: ParallelConfig) -> ParallelLayout:
    """The layout of these sizes.

    Raises:
        LookupError: it was not made.
    """
    sizes = (parallel.tensor, parallel.pipeline)
    if sizes not in _made:
        raise LookupError(f"no process groups were made for tensor x pipeline = {sizes}")
    return _made[sizes]
