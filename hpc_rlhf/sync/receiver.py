"""The sampler's side of a weight transfer: receive everything, then swap. Loaded by vLLM's workers.

A worker answers no call with an exception. vLLM 0.32's multi-process executor stops reading the
answers of a call at the first worker that failed, and hands the unread ones out as answers to later
calls. So failures are kept, every following step of the same update does nothing, and the learner
asks for them with :meth:`WorkerExtension.hpc_rlhf_transfer_status` after each step.

Order of calls: ``init`` (once per group), then for each version ``start``, ``update(plan)``,
``update(receive)`` once per pipeline stage of the learner, ``finish``. Until ``finish`` the model
is untouched, and ``finish`` of an update that is not whole drops it: the old weights serve on.
"""

import logging
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger

from hpc_rlhf.sync.buckets import Bucket, unpack
from hpc_rlhf.sync.process_group import TransferGroup
from hpc_rlhf.sync.validation import check_tensors, checkpoint_shapes
from hpc_rlhf.sync.wire import InitInfo, TransferStatus, UpdateInfo

logger = init_logger("vllm.hpc_rlhf.receiver")  # vLLM configures the loggers below "vllm"


class _NotComputed(logging.Filter):
    """Drops vLLM's warning, at every reload, that the computed rotary tables were not loaded."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg) or "Rotary" not in str(record.args)


logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_NotComputed())


class StagedReceiver(WeightTransferEngine):  # of InitInfo and UpdateInfo, which know no vLLM
    """Stages whole tensors in host memory and loads them into the model in one go.

    Staging takes host memory for one copy of the model, unsharded, per worker; on a GPU it takes
    device memory for one bucket.
    """

    init_info_cls: Any = InitInfo
    update_info_cls: Any = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.status = TransferStatus()
        self._groups: list[TransferGroup] = []
        self._plan: list[list[Bucket]] = []
        self._staged: dict[int, list[tuple[str, torch.Tensor]]] = {}  # by stage
        self._chunk_bytes = 0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave the old groups, join the new ones, forget any update under way."""
        self._forget()
        try:
            self._leave()
            self._join(init_info)
        except Exception as error:  # noqa: BLE001 - kept for the status
            self._fail(error)

    def _join(self, info: InitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._chunk_bytes = info.chunk_bytes
        for name in info.groups:
            group = TransferGroup(
                host=info.host,
                port=info.port,
                name=name,
                rank=info.rank + worker,
                size=info.size,
                device=self.device,
                address=os.environ["VLLM_HOST_IP"],
                timeout_s=info.timeout_s,
            )
            self._groups.append(group)

    def start_weight_update(self) -> None:
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do one step of an update, or nothing if a former step failed."""
        # Not the base's: it synchronizes an accelerator, and a CPU has none. Whatever arrives
        # here is on the host and checked, so there is nothing to wait for.
        if self.status.failure is None:
            try:
                self.receive_weights(self.parse_update_info(update_info))
            except Exception as error:  # noqa: BLE001 - kept for the status
                self._fail(error)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.plan is not None:
            self._accept_plan(update_info.update, update_info.plan)
        if update_info.receive is not None:
            if update_info.update != self.status.update:
                raise ValueError(f"update {update_info.update} was never planned")
            self._receive(update_info.receive)
            self.status = replace(self.status, stages=len(self._staged))

    def _accept_plan(self, update: str, plan: list[list[dict[str, Any]]]) -> None:
        self._plan = [[Bucket.from_json(bucket) for bucket in stage] for stage in plan]
        if len(self._plan) != len(self._groups):
            raise ValueError(f"{len(self._plan)} stages planned, {len(self._groups)} groups")
        announced: dict[str, tuple[int, ...]] = {}
        for slot in (slot for stage in self._plan for bucket in stage for slot in bucket.slots):
            if slot.name in announced:
                raise ValueError(f"tensor {slot.name} is announced twice")
            announced[slot.name] = slot.shape
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        check_tensors(announced, checkpoint_shapes(Path(self.model_config.model)), tied=tied)
        self.status = replace(self.status, update=update)

    def _receive(self, stage: int) -> None:
        tensors: list[tuple[str, torch.Tensor]] = []
        for bucket in self._plan[stage]:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
            for chunk in buffer.split(self._chunk_bytes):
                self._groups[stage].broadcast(chunk)
            # to("cpu") is the buffer itself where the device is the CPU.
            tensors += unpack(bucket, buffer.to("cpu"))
        self._staged[stage] = tensors

    def finish_weight_update(self) -> None:
        """Swap the staged weights in if all of them are there, else drop them."""
        applied = self.status.applied
        if self.status.update is not None and len(self._staged) == len(self._plan):
            try:
                self._swap()
            except BaseException:
                # Some layers are new and some are old. Nobody may be served that.
                logger.exception("update %s failed half-way: ending", self.status.update)
                os.kill(os.getpid(), signal.SIGKILL)
            applied = self.status.update
        self._forget()
        self.status = replace(self.status, applied=applied)

    def _swap(self) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model: Any = self.model
        parameters = {name for name, _ in model.named_parameters()}
        # load_weights alone cannot write into weights that were repacked for their kernels.
        initialize_layerwise_reload(model)
        staged = (self._staged[stage] for stage in sorted(self._staged))
        loaded = model.load_weights(pair for tensors in staged for pair in tensors)
        finalize_layerwise_reload(model, self.model_config)
        _refresh_packed_heads(model)
        # A server that started without weights would serve random ones. (A quantized model has
        # parameters that are computed, not loaded.)
        if self.model_config.quantization is None and parameters - loaded:
            raise RuntimeError(f"nothing was loaded into {sorted(parameters - loaded)[:3]}")
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        self._forget()
        self._leave()

    def _leave(self) -> None:
        while self._groups:
            self._groups.pop().close()

    def _forget(self) -> None:
        self._plan, self._staged = [], {}
        self.status = TransferStatus(applied=self.status.applied)

    def _fail(self, error: Exception) -> None:
        logger.error("weight transfer failed: %s: %s", type(error).__name__, error)
        # Closed connections tell the members further down the broadcast tree, which would
        # otherwise wait for their own time to run out.
        self._leave()
        self._forget()
        self.status = replace(self.status, failure=f"{type(error).__name__}: {error}")


class WorkerExtension:
    """Mixed into vLLM's worker class; called through ``/collective_rpc``."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def hpc_rlhf_transfer_status(self) -> dict[str, Any]:
        """The :class:`~hpc_rlhf.sync.wire.TransferStatus` of this worker, as a dict."""
        return {**asdict(self.weight_transfer_engine.status), "open": self._weight_update_active}


def _refresh_packed_heads(model: torch.nn.Module) -> None:
    """Repack output layers whose weight is the embedding's.

    vLLM 0.32's CPU kernels work on a packed copy; layer-wise reloading renews it for the embedding
    but not for the output layer that is tied to it, which would go on with the old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
