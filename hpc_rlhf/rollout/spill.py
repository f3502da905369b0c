"""What a stop in the middle of a rollout leaves behind, and how the next attempt takes it up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_rlhf.rollout import store
from hpc_rlhf.rollout.sampler import SampleRequest
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Rollout

_Key = tuple[int, str, int]


@dataclass(frozen=True)
class Remainder:
    """A step's requests, less what was sampled before."""

    finished: Mapping[_Key, Rollout]
    requests: tuple[SampleRequest, ...]  # still to be sampled, from their prefixes if they have any
    kept_tokens: int  # of finished and unfinished samples
    dropped_tokens: int  # of unfinished samples that are sampled again from their seeds


def write(run: RunDir, step: int, rollouts: Sequence[Rollout]) -> None:
    """Publish finished and unfinished samples of one step; an unfinished one has reason "abort".

    What an earlier attempt left of the step and this one did not come to stays.
    """
    samples = {**read(run, step), **{rollout.key: rollout for rollout in rollouts}}
    store.write_step(run.partial_rollout, list(samples.values()), None)


def read(run: RunDir, step: int) -> dict[_Key, Rollout]:
    """The samples that were left of ``step``; none if those on disk are of another step."""
    path = run.partial_rollout
    if not path.exists():
        return {}
    rollouts, _ = store.read_step(path)
    return {rollout.key: rollout for rollout in rollouts if rollout.step == step}


def remove(run: RunDir) -> None:
    """Forget what was left: its step is done."""
    run.partial_rollout.unlink(missing_ok=True)


def remainder(
    requests: Sequence[SampleRequest], left: Mapping[_Key, Rollout], *, version: int, again: bool
) -> Remainder:
    """Split a step's requests into what is done and what is still to do.

    Args:
        left: of :func:`read`.
        version: of the weights that the step is sampled under. Samples begun under another one are
            not taken up: the run went back to an older checkpoint.
        again: sample unfinished ones again from their seeds, as an uninterrupted run would have;
            else they are continued, which is right in distribution.
    """
    finished: dict[_Key, Rollout] = {}
    todo: list[SampleRequest] = []
    kept = dropped = 0
    for request in requests:
        rollout = left.get(request.key)
        if rollout is None or not _belongs(rollout, request, version):
            todo.append(request)
            continue
        completion = rollout.completion
        tokens = len(completion.token_ids)
        if completion.finish_reason != "abort":
            finished[request.key] = rollout
            kept += tokens
        elif again or tokens == 0:
            todo.append(request)
            dropped += tokens
        else:
            todo.append(replace(request, prefix=completion))
            kept += tokens
    return Remainder(finished, tuple(todo), kept, dropped)


def _belongs(rollout: Rollout, request: SampleRequest, version: int) -> bool:
    versions = {span.version for span in rollout.completion.versions}
    return rollout.completion.seed == request.seed and versions <= {version}
