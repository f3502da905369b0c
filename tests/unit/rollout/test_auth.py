"""The guard in front of a server, as ASGI messages; the live server's routes are tests/engine's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.errors import UserError
from hpc_rlhf.rollout.auth import TOKEN_FILE_VARIABLE, BearerAuth, read_token

TOKEN = "s3cret-Token"


@pytest.fixture
def reached() -> list[str]:
    return []


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: list[str]) -> BearerAuth:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN + "\n")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    return BearerAuth(app)


def ask(guard: BearerAuth, kind: str, *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": "/health", "headers": list(headers)}
    asyncio.run(guard(scope, receive, send))
    return sent


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER "])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_token_lets_in(guard: BearerAuth, reached: list[str], kind: str, scheme: bytes) -> None:
    assert ask(guard, kind, (b"authorization", scheme + TOKEN.encode())) == []
    assert reached == [kind]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer wrong"),),
        ((b"authorization", TOKEN.encode()),),
        ((b"authorization", b"Basic " + TOKEN.encode()),),
        ((b"authorization", b"Bearer " + TOKEN.upper().encode()),),
        ((b"authorization", b"Bearer " + TOKEN.encode() + b" "),),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Bearer \xff\xfe"),),
        ((b"x-authorization", b"Bearer " + TOKEN.encode()),),
        # which of two counts is anybody's guess, so neither does
        ((b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + TOKEN.encode())),
    ],
)
def test_anything_else_does_not(
    guard: BearerAuth, reached: list[str], headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    start, body = ask(guard, "http", *headers)
    assert start["status"] == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    assert TOKEN.encode() not in body["body"]
    assert ask(guard, "websocket", *headers) == [{"type": "websocket.close", "code": 1008}]
    assert reached == []


def test_the_servers_own_start_passes(guard: BearerAuth, reached: list[str]) -> None:
    ask(guard, "lifespan")
    assert reached == ["lifespan"]


def test_token_file_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o640)
    with pytest.raises(UserError, match="mode 0640, expected 0600"):
        read_token(path)


def test_token_file_missing_or_empty(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(UserError, match="no such file"):
        read_token(path)
    path.touch(mode=0o600)
    with pytest.raises(UserError, match="empty"):
        read_token(path)
