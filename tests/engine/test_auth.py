"""Every way into a live server needs the run's token."""

import asyncio
import base64
import os
import re
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.engine.conftest import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]  # starting servers on busy cores

# Besides what the server's own description of its API lists.
EXTRA = [
    ("GET", "/metrics"),
    ("GET", "/metrics/"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("GET", "/docs/oauth2-redirect"),
    ("GET", "/no/such/path"),
    ("GET", "//health"),
    ("GET", "/v1/../metrics"),
    ("GET", "/%6detrics"),
    ("HEAD", "/health"),
    ("OPTIONS", "/collective_rpc"),
    ("OPTIONS", "/v1/models"),
    ("TRACE", "/collective_rpc"),
]


def wrong_headers(token: str) -> list[dict[str, str]]:
    return [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": token},
        {"Authorization": f"Basic {base64.b64encode(f'user:{token}'.encode()).decode()}"},
        {"X-API-Key": token},
    ]


def test_every_route_answers_401_without_the_token(tied_fleet: Fleet) -> None:
    url, token = tied_fleet.servers[0].endpoint().url, tied_fleet.token

    async def ask_all() -> tuple[list[tuple[str, str]], Counter[int], list[object]]:
        answers: Counter[int] = Counter()
        let_in: list[object] = []
        async with aiohttp.ClientSession() as session:
            right = {"Authorization": f"Bearer {token}"}
            async with session.get(f"{url}/openapi.json", headers=right) as response:
                paths = (await response.json())["paths"]
            routes = [(m.upper(), path) for path, methods in paths.items() for m in methods]
            routes += EXTRA
            for method, path in routes:
                for headers in wrong_headers(token):
                    body = b"{}" if method in ("POST", "PUT") else None
                    where = url + re.sub(r"\{\w+\}", "x", path)
                    async with session.request(
                        method, where, headers=headers, data=body
                    ) as response:
                        answers[response.status] += 1
                        if response.status != 401:
                            let_in.append((method, path, headers, response.status))
        return routes, answers, let_in

    routes, answers, let_in = asyncio.run(ask_all())
    assert let_in == []
    assert set(answers) == {401}
    paths = {path for _, path in routes}
    assert len(paths) > 50
    assert {
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/update_weights",
        "/pause",
        "/inference/v1/generate",
        "/v1/completions",
        "/health",
    } <= paths


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/weight_info", "/version"])
def test_the_token_lets_in(tied_fleet: Fleet, path: str) -> None:
    async def ask() -> int:
        headers = {"Authorization": f"bearer {tied_fleet.token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.get(tied_fleet.servers[0].endpoint().url + path, headers=headers) as response,
        ):
            return response.status

    assert asyncio.run(ask()) == 200


def test_a_websocket_needs_the_token(tied_fleet: Fleet) -> None:
    async def ask(headers: dict[str, str]) -> int:
        async with aiohttp.ClientSession() as session:
            try:
                await session.ws_connect(
                    tied_fleet.servers[0].endpoint().url + "/v1/realtime", headers=headers
                )
            except aiohttp.WSServerHandshakeError as error:
                return error.status
        return 101

    for headers in wrong_headers(tied_fleet.token):
        assert asyncio.run(ask(headers)) == 403


def test_the_token_is_nowhere_but_in_its_file(tied_fleet: Fleet) -> None:
    server, token = tied_fleet.servers[0], tied_fleet.token
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    family = [root, *root.children(recursive=True)]
    assert len(family) >= 2  # the server and its engine
    for process in family:
        assert token not in " ".join(process.cmdline())
        assert token not in " ".join(process.environ().values())
    assert token not in server.log.read_text()
    mode = os.stat(Path(server.run) / "token").st_mode
    assert mode & 0o777 == 0o600
