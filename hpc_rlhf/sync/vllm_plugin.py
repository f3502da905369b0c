"""Entry point ``vllm.general_plugins``: runs in every process of vLLM, so it imports nothing else."""

BACKEND = "hpc_rlhf"
"""Name of the weight-transfer backend: ``weight_transfer_config={"backend": BACKEND}``."""

WORKER_EXTENSION = "hpc_rlhf.sync.receiver.WorkerExtension"
"""``worker_extension_cls`` that answers :meth:`SamplerClient.transfer_status`."""


def register() -> None:
    """Register the staged weight receiver; may be called many times in one process."""
    _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "hpc_rlhf.sync.receiver", "StagedReceiver"
        )


def _die_with_parent() -> None:
    """Let the kernel end an engine process or worker whose parent has died (Linux only).

    Otherwise they keep the GPUs of a server that was killed.
    """
    import ctypes
    import multiprocessing
    import os
    import signal

    parent = multiprocessing.parent_process()
    if parent is None:  # the server itself, or an engine inside another program
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
