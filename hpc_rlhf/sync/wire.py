"""What learner and samplers say to each other about a weight transfer; travels as JSON."""

from dataclasses import dataclass
from typing import Any


@dataclass
class InitInfo:
    """How a replica's workers join the transfer groups, one per pipeline stage of the learner."""

    host: str  # of the learner's TCPStore
    port: int
    groups: list[str]  # unique names
    rank: int  # of this replica's first worker, in each group
    size: int
    timeout_s: float  # of one operation
    chunk_bytes: int  # at most this much in one broadcast


@dataclass
class UpdateInfo:
    """One step of an update: the plan of all stages, or the order to receive one of them."""

    update: str  # unique name of this update
    plan: list[list[dict[str, Any]]] | None = None  # stage -> buckets (Bucket.to_json)
    receive: int | None = None  # stage


@dataclass(frozen=True)
class TransferStatus:
    """What one worker has to say."""

    failure: str | None = None  # the first one since the last init or start
    update: str | None = None  # under way
    stages: int = 0  # of it that are staged
    applied: str | None = None  # the last update that was swapped in
    open: bool = False  # vLLM waits for the end of an update
