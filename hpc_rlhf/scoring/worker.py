"""The verifier process: ``python -m hpc_rlhf.scoring.worker``, JSON lines on its standard streams.

Reads ``{"name", "pattern", "function"}`` once and answers ``{"ready": true}``; then for every
``{"completion", "answer", "fields"}`` answers ``{"reward": number}`` or ``{"error": text}``.
Whoever started it kills it when an answer takes too long.
"""

import ctypes
import json
import math
import os
import signal
import sys
from typing import Any

from hpc_rlhf.scoring.rules import Rule, make_rule

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A verifier that prints must not write into the protocol.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rule = make_rule(**json.loads(sys.stdin.readline()))
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(_apply(rule, json.loads(line))) + "\n")


def _apply(rule: Rule, item: dict[str, Any]) -> dict[str, Any]:
    try:
        value = rule(item["completion"], item["answer"], item["fields"])
    except Exception as error:  # the user's function: whatever it raises is reported, not fatal
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
