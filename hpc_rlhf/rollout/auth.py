"""Bearer-token guard in front of every path of a server.

vLLM's own API key covers ``/v1`` only, while its RL control routes run code and replace weights.
"""

import hmac
import os
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from hpc_rlhf.errors import UserError

TOKEN_FILE_VARIABLE = "HPC_RLHF_TOKEN_FILE"
"""Environment variable that names the token's file; the token itself is in no environment."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_SCHEME = b"bearer "
_POLICY_VIOLATION = 1008  # WebSocket close code


def read_token(path: Path) -> str:
    """Read the run's bearer token.

    Raises:
        UserError: the file is missing, empty, or others may read it.
    """
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; it holds the bearer token of the run") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"{path}: mode {stat.S_IMODE(mode):04o}, expected 0600: others may read the token; "
            f"chmod 600 {path}"
        )
    if not token:
        raise UserError(f"{path}: empty; expected the bearer token of the run")
    return token


class BearerAuth:
    """ASGI middleware: a request without the token never reaches the application.

    HTTP gets 401, a WebSocket is closed before it opens (403). The token is read once, from the
    file that :data:`TOKEN_FILE_VARIABLE` names.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = read_token(Path(os.environ[TOKEN_FILE_VARIABLE])).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # "lifespan", the third kind, is the server's own start and stop.
        if scope["type"] not in ("http", "websocket") or self._authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"unauthorized"}'})

    def _authorized(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(given[0][len(_SCHEME) :], self._expected)
