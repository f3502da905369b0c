"""Entry point ``vllm.general_plugins``: runs in every process of vLLM, so it imports nothing else."""

BACKEND = "hpc_rlhf"
"""Name of the weight-transfer backend: ``weight_transfer_config={"backend": BACKEND}``."""

WORKER_EXTENSION = "hpc_rlhf.sync.receiver.WorkerExtension"
"""``worker_extension_cls`` that answers :meth:`SamplerClient.transfer_status`."""


def register() -> None:
    """Register the staged weight receiver; may be called many times in one process."""
    import multiprocessing

    parent = multiprocessing.parent_process()  # None: the server, or an engine in another program
    if parent is not None and parent.pid is not None:  # where vLLM had to spawn it
        end_with(parent.pid)

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "hpc_rlhf.sync.receiver", "StagedReceiver"
        )


def end_with(parent: int) -> None:
    """Let this engine process or worker end when its parent does, and not before (Linux only).

    The kernel ends it when its parent has died: it would keep the GPUs of a server that was killed.
    And SIGTERM, which Slurm sends to every process of a job that it preempts, is not delivered: the
    server has samples to hand over, and ends its engine when that is done.

    Args:
        parent: its process id, which may be dead already.
    """
    import ctypes
    import os
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_forks_with_their_parent() -> None:
    """:func:`end_with` for every process that is forked from this one, from its first moment on."""
    import os
    import signal

    parent = 0

    def before() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_child() -> None:
        # The server's: its event loop would hear of the engine's signals through the descriptor.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        end_with(parent)

    os.register_at_fork(before=before, after_in_child=in_child)
