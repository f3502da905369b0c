"""The verifier process: ``python -m hpc_rlhf.scoring.worker``, JSON lines on its standard streams.

Reads ``{"name", "pattern", "function"}`` once and answers ``{"ready": true}`` or ``{"error": text}``;
then for every ``{"completion", "answer", "fields"}`` answers ``{"reward": number}`` or
``{"error": text}``. Whoever started it kills it when an answer takes too long.
"""

import ctypes
import json
import math
import os
import signal
from typing import Any

from hpc_rlhf.cluster.signals import REQUESTS
from hpc_rlhf.errors import UserError
from hpc_rlhf.scoring.rules import Rule, make_rule

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It ends with the process that started it, and by no request to stop before. Handled, not
    # ignored: what the rule starts does not inherit that, and can be terminated.
    for number in REQUESTS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)  # blocked since before it began
    # The rule may print, or read its input: the protocol gets descriptors of its own.
    requests = os.fdopen(os.dup(0), "r")
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        rule = make_rule(**json.loads(requests.readline()))
    except UserError as error:
        replies.write(json.dumps({"error": str(error)}) + "\n")
        return
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in requests:
        replies.write(json.dumps(_apply(rule, json.loads(line))) + "\n")


def _apply(rule: Rule, item: dict[str, Any]) -> dict[str, Any]:
    try:
        value = rule(item["completion"], item["answer"], item["fields"])
    except Exception as error:  # noqa: BLE001  # the user's function raises whatever it likes
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        reward = float(value)
    except (TypeError, ValueError):
        return {"error": f"returned {value!r}, expected a number"}
    if not math.isfinite(reward):
        return {"error": f"returned {reward}"}
    return {"reward": reward}


if __name__ == "__main__":
    main()
