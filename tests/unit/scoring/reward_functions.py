"""Python verifiers, good and bad, as a user might write them."""

import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any


def length(completion: str, answer: str | None, fields: Mapping[str, Any]) -> float:
    return len(completion) + len(answer or "") + float(fields.get("bonus", 0))


def by_completion(completion: str, answer: str | None, fields: Mapping[str, Any]) -> Any:
    """Does what the completion says."""
    match completion:
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "hang with a child":
            child = subprocess.Popen(["sleep", "3600"])
            with open(fields["pid_file"], "w") as file:
                file.write(str(child.pid))
            child.wait()
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            raise SystemExit(3)
        case "crash":
            os._exit(7)
        case "print":
            print('{"reward": 5}', flush=True)
        case "read":
            return float(len(input()))
    return {"nan": float("nan"), "inf": "inf", "none": None, "text": "good", "true": True}.get(
        completion, 1.0
    )


constant = 1.0


def starts_a_sleep(completion: str, answer: str | None, fields: Mapping[str, Any]) -> float:
    return subprocess.run(["sleep", "60"], check=False).returncode


def of_completion(completion: str) -> float:
    return 1.0


async def asynchronous(completion: str, answer: str | None, fields: Mapping[str, Any]) -> float:
    return 1.0
