"""One sampler server over HTTP: tokens in, tokens out, and the control of its weights.

The routes are vLLM 0.32's: ``/inference/v1/generate``, and the RL control plane that
``VLLM_SERVER_DEV_MODE`` turns on.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import aiohttp
import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.cluster.rendezvous import Endpoint
from hpc_rlhf.config import SamplingConfig
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.types import Completion, VersionSpan

MODEL_NAME = "policy"
"""The name every sampler serves its model under."""

_CONNECT_TIMEOUT_S = 5.0
_ENGINE_ID = "generate-tokens-{}"  # vLLM's name for a request of /inference/v1/generate


class SamplerUnreachable(ComponentError):
    """The server is gone, does not answer in time, or its engine is dead."""


class SamplerRefused(ComponentError):
    """The server is there and says no: the request is wrong (4xx), or it failed inside (5xx)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SamplerClient:
    """An asyncio client of one server; all calls belong to one event loop.

    Every call raises :class:`SamplerUnreachable` or :class:`SamplerRefused`, and is bounded: by
    ``timeout_s`` where it takes one, else by ``control_timeout_s``.
    """

    def __init__(self, endpoint: Endpoint, token: str, *, control_timeout_s: float = 30.0) -> None:
        self.endpoint = endpoint
        self._control_timeout_s = control_timeout_s
        self._session = aiohttp.ClientSession(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {token}"},
            # A connection of its own for every call. A kept one that the server is closing at this
            # moment looks like a death, and a POST cannot simply be sent again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self,
        prompt: Sequence[int] | NDArray[np.integer[Any]],
        sampling: SamplingConfig,
        *,
        seed: int,
        request_id: str,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Completion:
        """Sample one completion.

        Args:
            prompt: token ids, [P].
            max_tokens: at most this many, the stop token included.
            stop_token_ids: sampling one of them ends the completion; it is the last token of it.
                All of them: nothing is taken from the model directory.

        Returns:
            The completion; ``finish_reason`` is "abort" if :meth:`abort` or a pause cut it short.
        """
        parameters = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
        }
        body = {
            "model": MODEL_NAME,
            "request_id": request_id,
            "token_ids": [int(token) for token in prompt],
            "sampling_params": parameters,
        }
        answer = await self._call("POST", "/inference/v1/generate", json=body, timeout_s=timeout_s)
        return _completion(answer["choices"][0], seed)

    async def abort(self, request_ids: Sequence[str], timeout_s: float | None = None) -> None:
        """End the named requests; each of them returns what it has."""
        if request_ids:  # none would mean all
            ids = [_ENGINE_ID.format(request_id) for request_id in request_ids]
            body = {"request_ids": ids}
            await self._call("POST", "/abort_requests", json=body, timeout_s=timeout_s)

    async def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except (SamplerUnreachable, SamplerRefused):
            return False
        return True

    async def pause(self) -> None:
        """Freeze the requests in flight; they go on after :meth:`resume`.

        The KV cache and the prefix cache are dropped and computed again, with the weights of then.
        """
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def worker_count(self) -> int:
        """Number of engine workers that hold a shard of the model."""
        answer = await self._call("GET", "/get_world_size", params={"include_dp": "true"})
        return int(answer["world_size"])

    async def init_transfer(self, info: dict[str, Any], timeout_s: float) -> None:
        """Join transfer groups; see :class:`hpc_rlhf.sync.receiver.InitInfo`."""
        body = {"init_info": info}
        await self._call("POST", "/init_weight_transfer_engine", json=body, timeout_s=timeout_s)

    async def start_update(self) -> None:
        await self._call("POST", "/start_weight_update")

    async def update(self, info: dict[str, Any], timeout_s: float | None = None) -> None:
        """One step of an update; see :class:`hpc_rlhf.sync.receiver.UpdateInfo`."""
        await self._call("POST", "/update_weights", json={"update_info": info}, timeout_s=timeout_s)

    async def finish_update(self, timeout_s: float) -> None:
        """Swap in what is staged, or drop it if it is not whole."""
        # Without a version: vLLM would set it even where nothing was swapped in.
        await self._call("POST", "/finish_weight_update", json={}, timeout_s=timeout_s)

    async def transfer_status(self) -> list[dict[str, Any]]:
        """One :class:`~hpc_rlhf.sync.receiver.TransferStatus` per worker, as a dict."""
        body = {"method": "hpc_rlhf_transfer_status"}
        return (await self._call("POST", "/collective_rpc", json=body))["results"]

    async def set_version(self, version: int) -> None:
        await self._call("POST", "/update_weight_version", json={"new_version": str(version)})

    async def version(self) -> int | None:
        """Policy version of the weights served; None before the first update."""
        answer = await self._call("GET", "/weight_info")
        return _version(answer["weight_version"])

    async def _call(
        self, method: str, path: str, *, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        total = None if timeout_s == math.inf else timeout_s
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_TIMEOUT_S)
        where = f"sampler {self.endpoint.replica} at {self.endpoint.url}: {method} {path}"
        try:
            async with self._session.request(
                method, path, timeout=timeout, **arguments
            ) as response:
                if response.status == 503:
                    raise SamplerUnreachable(f"{where}: its engine is dead")
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise SamplerRefused(
                        f"{where}: status {response.status}: {text}", response.status
                    )
                return (
                    await response.json() if response.content_type == "application/json" else None
                )
        except TimeoutError as error:
            raise SamplerUnreachable(f"{where}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise SamplerUnreachable(f"{where}: {type(error).__name__}: {error}") from error


def _completion(choice: dict[str, Any], seed: int) -> Completion:
    tokens = np.array(choice["token_ids"] or [], np.int32)
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = np.array([entry["logprob"] for entry in content], np.float32)
    spans = tuple(
        VersionSpan(
            version=_required_version(span["version"]), start=span["start"], end=span["end"]
        )
        for span in choice["weight_versions"] or []
    )
    covered = [span.start for span in spans] + [len(tokens)] == [0] + [span.end for span in spans]
    if len(logprobs) != len(tokens) or not covered:
        raise ComponentError(
            f"a completion of {len(tokens)} tokens came with {len(logprobs)} log-probs "
            f"and versions {spans}"
        )
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=choice["finish_reason"],
        versions=spans,
        seed=seed,
    )


def _version(label: str) -> int | None:
    return int(label) if label.isdecimal() else None  # "default" until the first update


def _required_version(label: str) -> int:
    version = _version(label)
    if version is None:
        raise ComponentError(f"tokens were sampled from weights of no known version ({label!r})")
    return version
