"""A component of a few milliseconds, for tests of launchers and of the supervisor.

It is put in front of the real command as ``plan.prefix``, so that launchers run what they always
run, and does what files in the run directory tell it: ``RUN/do/<component>-<rank>`` holds one of

    kill        SIGKILL to itself            deaf    ignore every request to stop from now on
    exit N      exit with code N             raise N TEXT   write a record, then exit with code N
    always kill the same in every incarnation

``RUN/do/finish`` ends the learner with code 0; a request to stop ends everything with 75, after the
learner has saved.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_rlhf.cluster.world import World

argv = sys.argv[sys.argv.index("hpc_rlhf.launch.component") + 1 :]
component, options = argv[0], dict(zip(argv[1::2], argv[2::2], strict=True))
run, replica = Path(options["--run"]), options.get("--replica")
attempt = run / "attempts" / options["--attempt"]
world = World.from_environment()
name = f"{component}-{world.rank if replica is None else replica}"


def publish(path: Path, value: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def stop(_number: int, _frame: object) -> None:
    if name == "learner-0":
        checkpoint = run / "checkpoints" / f"step_{7 + int(options['--attempt'])}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        publish(checkpoint / "manifest.json", {})
    publish(run / "do" / f"{name}.stopped", {"time": time.time()})
    sys.exit(75)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR2, stop)
# outlives it, and holds its output open
child = subprocess.Popen(["sleep", "20"]) if name == "sampler-0" else None
started = {
    "pid": os.getpid(),
    "child": child.pid if child else None,
    "world": vars(world),
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "omp": os.environ.get("OMP_NUM_THREADS"),
}
incarnation = len(list((run / "do").glob(f"{name}.started-*")))
publish(run / "do" / f"{name}.started-{incarnation}", started)
if name == "learner-0":
    publish(attempt / "progress.json", {"step": 7, "phase": "train", "time": time.time()})
if component == "sampler":
    publish(attempt / "endpoints" / f"{name}.json", {"incarnation": incarnation})
print(f"{name} is up", flush=True)

action = run / "do" / name
began = time.monotonic()
while time.monotonic() - began < 120:
    time.sleep(0.02)
    if component == "learner" and (run / "do" / "finish").exists():
        sys.exit(0)
    if not action.exists():
        continue
    words = action.read_text().split()
    if words and words[0] == "always":
        words = words[1:]
    elif words:
        action.rename(action.with_suffix(f".done-{time.time_ns()}"))
    match words:
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["exit", code]:
            sys.exit(int(code))
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            publish(run / "do" / f"{name}.deaf", {})
        case ["raise", code, *error]:
            record = {
                "rank": world.rank if replica is None else int(replica),
                "node": world.node,
                "phase": "rollout",
                "error": " ".join(error),
                "time": time.time(),
            }
            publish(attempt / "failures" / f"{name}.json", record)
            sys.exit(int(code))
sys.exit("nobody told this program to end")
