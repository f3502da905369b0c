"""vLLM's engine and the server in front of it: how it starts, and when it has sampled something.

Imports vLLM, so only a server imports this, after it has set vLLM's environment.
"""

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable
from socket import socket
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry
from vllm.model_executor.models import registry
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from hpc_rlhf.sync.vllm_plugin import end_forks_with_their_parent

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


async def serve_engine(
    url: str,
    listening: socket,
    arguments: Namespace,
    *,
    first_token: "asyncio.Future[float]",
    on_engine: Callable[[], None],
) -> None:
    """Start the engine and serve it on ``listening`` until a signal ends the server.

    Args:
        arguments: of vLLM's command line.
        first_token: gets the Unix time at which the engine first sampled one.
        on_engine: called when the engine has started, before the server has.
    """
    # vLLM asks what the model class can do in another interpreter, lest it touch a GPU here. The fork
    # needs the class anyway, and vLLM does not fork where a GPU was touched.
    registry._run_in_subprocess = lambda inspect: inspect()
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    config = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    # A new interpreter would import all of vLLM once more, which takes as long as all the rest of the
    # start. vLLM's CPU platform asks for that when the configuration is made; its GPU default is fork.
    # Nothing has computed here, and nothing has touched a GPU.
    os.environ[_START_METHOD] = "fork"
    end_forks_with_their_parent()
    engine = AsyncLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[lambda config, index: _FirstToken(config, index, first_token)],
        disable_log_stats=engine_arguments.disable_log_stats,
    )
    on_engine()
    try:
        ended = await entry.build_and_serve(engine, url, listening, arguments)
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)
    try:
        await ended
    finally:
        listening.close()


class _FirstToken(StatLoggerBase):
    """Notes when the engine samples its first token."""

    def __init__(
        self, vllm_config: Any, engine_index: int, first_token: "asyncio.Future[float]"
    ) -> None:
        self._first_token = first_token

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        sampled = iteration_stats is not None and iteration_stats.num_generation_tokens
        if sampled and not self._first_token.done():
            self._first_token.set_result(iteration_stats.iteration_timestamp)

    def log_engine_initialized(self) -> None:
        pass
