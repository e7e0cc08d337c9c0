"""The door of a vLLM server that other machines can reach: who does not show the run's token is answered 401.

vLLM's own --api-key guards the routes of completions; whoever reaches the server could still pause it or exchange its
weights. This stands before every route: `--middleware asyncrl.engine_door.TokenDoor`, the token in the environment.
What passes is not encrypted: a network that others can listen to needs a tunnel. Standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

TOKEN_VARIABLE = "ASYNCRL_ENGINE_TOKEN"
"""In the server's environment, where other users of its machine cannot read it, as they can its arguments."""

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenDoor:
    """An ASGI middleware. Raises KeyError, which ends the server, where the environment holds no token."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ[TOKEN_VARIABLE].encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let who knows the token in, and the server's own start and end."""
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(shown, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"the engine's token is missing or wrong"})
