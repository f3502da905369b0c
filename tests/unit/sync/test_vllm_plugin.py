"""What is forked from a server ends with it, whenever it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch_driver import is_alive, wait_until

# a server that forks an engine, which forks a worker; then it is killed in the next moment
PROGRAM = """
import os, signal, time
from hpc_rlhf.sync.vllm_plugin import end_forks_with_their_parent

def handler(*_): raise AssertionError("the server's handler, in an engine")

signal.signal(signal.SIGUSR2, handler)
end_forks_with_their_parent()
if os.fork() == 0:
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    default = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    if os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), blocked and default, flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_forks_end_with_the_server_and_have_no_handlers_of_it() -> None:
    server = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine, as_expected = server.stdout.readline().split()
    assert as_expected == "True"
    workers = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    processes = [int(engine), *map(int, workers)]
    assert len(processes) == 2
    for pid in processes:
        os.kill(pid, signal.SIGTERM)  # blocked: Slurm sends it to all when it preempts
    assert all(map(is_alive, processes))
    server.kill()
    wait_until(lambda: not any(map(is_alive, processes)), "the forks to end", 5)
    server.wait()
