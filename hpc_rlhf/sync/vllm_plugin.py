"""Entry point ``vllm.general_plugins``: runs in every process of vLLM, so it imports nothing else."""

BACKEND = "hpc_rlhf"
"""Name of the weight-transfer backend: ``weight_transfer_config={"backend": BACKEND}``."""

WORKER_EXTENSION = "hpc_rlhf.sync.receiver.WorkerExtension"
"""``worker_extension_cls`` that answers :meth:`SamplerClient.transfer_status`."""


def register() -> None:
    """Register the staged weight receiver; may be called many times in one process."""
    _end_with_the_server()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "hpc_rlhf.sync.receiver", "StagedReceiver"
        )


def _end_with_the_server() -> None:
    """Let an engine process or worker end when its server does, and not before (Linux only).

    The kernel ends it when its parent has died: it would keep the GPUs of a server that was killed.
    And SIGTERM, which Slurm sends to every process of a job that it preempts, is not delivered: the
    server has samples to hand over, and ends its engine when that is done.
    """
    import ctypes
    import multiprocessing
    import os
    import signal

    parent = multiprocessing.parent_process()
    if parent is None:  # the server itself, or an engine inside another program
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
