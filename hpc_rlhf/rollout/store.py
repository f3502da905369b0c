"""Rollouts of one step as one HDF5 file: few datasets, ragged ones as flat values with offsets.

Layout (N samples, P distinct prompts, V version spans; ``x[offsets[i]:offsets[i + 1]]`` is row i):

======================  ===========  ================================================================
``prompts/uid``         str [P]
``prompts/answer``      str [P]      "" where there is none
``prompts/has_answer``  bool [P]
``prompts/fields``      str [P]      the prompt's record as JSON
``prompts/offsets``     int64 [P+1]  into ``prompts/token_ids``
``prompts/token_ids``   int32
``samples/prompt``      int64 [N]    index of the sample's prompt
``samples/index``       int64 [N]    sample_index
``samples/step``        int64 [N]
``samples/seed``        int64 [N]
``samples/finish``      str [N]      "stop", "length" or "abort"
``samples/offsets``     int64 [N+1]  into ``samples/token_ids`` and ``samples/logprobs``
``samples/token_ids``   int32        of the completion
``samples/logprobs``    float32      of the distribution sampled from
``versions/offsets``    int64 [N+1]  into ``versions/spans``
``versions/spans``      int64 [V,3]  policy version, start, end
``scores/rewards``      float32 [N]  NaN where excluded; the group is absent before scoring
``scores/excluded``     str [N]      why a sample is excluded, "" where it is not
``learner/old``         float32      the policy's log-probs, rows as ``samples/logprobs``; the group
                                     is absent before the learner has read the samples
``learner/reference``   float32      the reference's; absent without one
``learner/values``      float32      the critic's values; absent without one
======================  ===========  ================================================================

The file's attribute ``format`` is :data:`FORMAT`.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.fs import publish
from hpc_rlhf.types import Completion, Prompt, Readings, Rollout, Scores, VersionSpan

FORMAT = 1


def write_step(
    path: Path,
    rollouts: Sequence[Rollout],
    scores: Scores | None,
    readings: Readings | None = None,
) -> Path:
    """Publish ``rollouts``, their scores and the learner's readings as ``path``, whole or not at all.

    Raises:
        TypeError: a prompt's fields are not JSON.
        ValueError: not one score per rollout, or two prompts with one uid differ.
    """
    if scores is not None and len(scores.rewards) != len(rollouts):
        raise ValueError(f"{len(scores.rewards)} scores for {len(rollouts)} rollouts")
    contents = {**_prompts(rollouts), **_samples(rollouts)}
    if scores is not None:
        contents["scores/rewards"] = np.asarray(scores.rewards, np.float32)
        contents["scores/excluded"] = [scores.excluded.get(i, "") for i in range(len(rollouts))]
    if readings is not None:
        for name in ("old", "reference", "values"):
            rows = getattr(readings, name)
            if rows is not None:
                contents[f"learner/{name}"] = _ragged(rows, np.float32)[1]
    # In memory first: HDF5 reads while it writes, and a published file is written once.
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file.attrs["format"] = FORMAT
        for name, values in contents.items():
            if isinstance(values, list):
                file.create_dataset(name, data=values, dtype=h5py.string_dtype(), shape=len(values))
            else:
                file.create_dataset(name, data=values)
    return publish(path, lambda target: target.write(image.getbuffer()))


def read_step(path: Path) -> tuple[tuple[Rollout, ...], Scores | None]:
    """Read what :func:`write_step` wrote; arrays come back bit for bit.

    Raises:
        OSError: no such file, or not HDF5.
        ValueError: written in another format.
    """
    return _rollouts(_read(path))


def read_scored(path: Path) -> tuple[tuple[Rollout, ...], Scores, Readings]:
    """Read all of a step that the learner has read and scored; arrays come back bit for bit.

    Raises:
        OSError: no such file, or not HDF5.
        ValueError: written in another format, or before the step was scored.
    """
    data = _read(path)
    rollouts, scores = _rollouts(data)
    if scores is None or "learner/old" not in data:
        raise ValueError(f"{path}: its samples were not scored yet")
    ends = data["samples/offsets"][1:-1]

    def rows(name: str) -> tuple[NDArray[np.float32], ...] | None:
        flat = data.get(f"learner/{name}")
        return None if flat is None else tuple(np.split(flat, ends))

    old = rows("old")
    assert old is not None
    return rollouts, scores, Readings(old=old, reference=rows("reference"), values=rows("values"))


def _read(path: Path) -> dict[str, Any]:
    # Without a lock: a published file never changes, and a filesystem without flock refuses them.
    with h5py.File(path, "r", locking=False) as file:
        if file.attrs.get("format") != FORMAT:
            raise ValueError(f"{path}: rollout format {file.attrs.get('format')}, not {FORMAT}")
        return {
            f"{group}/{name}": dataset.asstr()[:] if dataset.dtype.kind == "O" else dataset[:]
            for group, members in file.items()
            for name, dataset in members.items()
        }


def _rollouts(data: Mapping[str, Any]) -> tuple[tuple[Rollout, ...], Scores | None]:
    prompts = _read_prompts(data)
    rollouts = tuple(
        Rollout(
            prompt=prompts[data["samples/prompt"][i]],
            sample_index=int(data["samples/index"][i]),
            completion=_read_completion(data, i),
            step=int(data["samples/step"][i]),
        )
        for i in range(len(data["samples/prompt"]))
    )
    if "scores/rewards" not in data:
        return rollouts, None
    excluded = {i: str(reason) for i, reason in enumerate(data["scores/excluded"]) if reason}
    return rollouts, Scores(rewards=data["scores/rewards"], excluded=excluded)


def _prompts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    prompts: dict[str, Prompt] = {}
    for rollout in rollouts:
        known = prompts.setdefault(rollout.prompt.uid, rollout.prompt)
        if known is not rollout.prompt and not _equal(known, rollout.prompt):
            raise ValueError(f"two prompts with the uid {known.uid}")
    values = list(prompts.values())
    offsets, token_ids = _ragged([prompt.token_ids for prompt in values], np.int32)
    return {
        "prompts/uid": list(prompts),
        "prompts/answer": [prompt.answer or "" for prompt in values],
        "prompts/has_answer": np.array([prompt.answer is not None for prompt in values], bool),
        "prompts/fields": [json.dumps(dict(prompt.fields)) for prompt in values],
        "prompts/offsets": offsets,
        "prompts/token_ids": token_ids,
    }


def _samples(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    for rollout in rollouts:
        numbers.setdefault(rollout.prompt.uid, len(numbers))
    completions = [rollout.completion for rollout in rollouts]
    offsets, token_ids = _ragged([completion.token_ids for completion in completions], np.int32)
    _, logprobs = _ragged([completion.logprobs for completion in completions], np.float32)
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
    spans = [
        np.array([(s.version, s.start, s.end) for s in completion.versions], np.int64).reshape(
            -1, 3
        )
        for completion in completions
    ]
    span_offsets, flat_spans = _ragged(spans, np.int64, width=3)
    return {
        "samples/prompt": np.array([numbers[r.prompt.uid] for r in rollouts], np.int64),
        "samples/index": np.array([r.sample_index for r in rollouts], np.int64),
        "samples/step": np.array([r.step for r in rollouts], np.int64),
        "samples/seed": np.array([completion.seed for completion in completions], np.int64),
        "samples/finish": [completion.finish_reason for completion in completions],
        "samples/offsets": offsets,
        "samples/token_ids": token_ids,
        "samples/logprobs": logprobs,
        "versions/offsets": span_offsets,
        "versions/spans": flat_spans,
    }


def _read_prompts(data: Mapping[str, Any]) -> list[Prompt]:
    return [
        Prompt(
            uid=str(uid),
            token_ids=_row(data, "prompts", "token_ids", i),
            answer=str(data["prompts/answer"][i]) if data["prompts/has_answer"][i] else None,
            fields=json.loads(data["prompts/fields"][i]),
        )
        for i, uid in enumerate(data["prompts/uid"])
    ]


def _read_completion(data: Mapping[str, Any], i: int) -> Completion:
    spans = _row(data, "versions", "spans", i)
    return Completion(
        token_ids=_row(data, "samples", "token_ids", i),
        logprobs=_row(data, "samples", "logprobs", i),
        finish_reason=data["samples/finish"][i],
        versions=tuple(
            VersionSpan(version=int(version), start=int(start), end=int(end))
            for version, start, end in spans
        ),
        seed=int(data["samples/seed"][i]),
    )


def _row(data: Mapping[str, Any], group: str, name: str, i: int) -> NDArray[Any]:
    start, end = data[f"{group}/offsets"][i : i + 2]
    return data[f"{group}/{name}"][start:end]


def _ragged(
    rows: Sequence[NDArray[Any]], dtype: type, *, width: int | None = None
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Flatten ``rows``; row i is ``flat[offsets[i] : offsets[i + 1]]``."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    empty: NDArray[Any] = np.empty(0 if width is None else (0, width), dtype)
    return offsets, np.concatenate([empty, *rows]).astype(dtype, casting="same_kind")


def _equal(a: Prompt, b: Prompt) -> bool:
    return (
        np.array_equal(a.token_ids, b.token_ids) and a.answer == b.answer and a.fields == b.fields
    )
