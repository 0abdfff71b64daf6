"""The checks of every request before its route is called: host, origin, token, size and speed of the body."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwenimg.cli.serve.connections import SLOW
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.settings import Settings

MAX_BODY = 32 << 20  # bytes
MAX_BODIES = 256 << 20  # bytes of all bodies that are being received
MAX_IGNORED = 128 << 20  # bytes of a body that is too large, after which the connection is closed
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})
OPEN = ("/health", "/ready", "/internal/ping")  # paths that need no token
_ALWAYS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

Answer = Callable[[str, HttpError], Response]


class Guards:
    """An ASGI middleware that checks each request before `app` gets it."""

    def __init__(self, app: ASGIApp, settings: Settings, answer: Answer) -> None:
        """Create the checks of `app`. answer: makes the response for an error of a path."""
        self.app, self.settings, self.answer = app, settings, answer
        self._receiving = 0  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (self.app(scope, receive, send) if scope["type"] == "lifespan" else _refuse(send))
            return
        headers = Headers(scope=scope)
        held = 0
        try:
            self._check(scope, headers)
            body = await self._body(headers, receive)
            held = len(body)
            await self.app(scope, _received(body, receive), _marked(send))
        except HttpError as fault:
            response = self.answer(scope["path"], fault)
            response.headers["connection"] = "close"  # the rest of a body is not read
            if fault.status == 401 and scope["path"] == "/":  # a browser asks its user, and then sends the token always
                response.headers["www-authenticate"] = 'Basic realm="qwenimg: any name, and the token", charset="UTF-8"'
            await response(scope, receive, _marked(send))
        finally:
            self._receiving -= held

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Check the headers of a request."""
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name.lower() not in LOCAL | self.settings.hosts:
            raise HttpError(403, "this Host is not served; start with --host-name to allow it", code="host")
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise HttpError(403, "requests of other sites' pages are not served", code="origin")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            raise HttpError(403, "requests of other sites' pages are not served", code="origin")
        if self.settings.token and scope["path"] not in OPEN and not self._knows_token(headers):
            raise HttpError(401, "a token is needed: Authorization: Bearer TOKEN", kind="authentication_error")

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(value.strip().encode(), self.settings.token.encode())

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the body, and count its bytes in `_receiving`."""
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > MAX_IGNORED:
            raise _too_large()
        chunks, size, held = list[bytes](), 0, 0
        try:
            async with asyncio.timeout(SLOW):
                is_whole = False
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(499, "the client has gone")
                    chunk = message.get("body", b"")
                    size, is_whole = size + len(chunk), not message.get("more_body", False)
                    if size <= MAX_BODY:
                        chunks.append(chunk)
                        self._receiving, held = self._receiving + len(chunk), held + len(chunk)
                    elif size > MAX_IGNORED:
                        raise _too_large()
                    else:  # read on, and keep nothing: most clients listen only when they have sent all
                        chunks.clear()
                        self._receiving, held = self._receiving - held, 0
                    if self._receiving > MAX_BODIES:
                        raise HttpError(503, "too many large requests at once", kind="server_error", after=5.0)
            if size > MAX_BODY:
                raise _too_large()
            return b"".join(chunks)
        except TimeoutError:
            self._receiving -= held
            raise HttpError(408, f"the body did not arrive within {SLOW:g} seconds") from None
        except BaseException:
            self._receiving -= held
            raise


def _too_large() -> HttpError:
    return HttpError(413, f"a request has at most {MAX_BODY >> 20} MiB", code="too_large")


def _received(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body, then the end of the connection."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return rest.pop() if rest else await receive()

    return next_message


def _marked(send: Send) -> Send:
    """Return a `send` that adds our headers to the response."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name for name, _ in message["headers"]}
            more = [(key.encode(), value.encode()) for key, value in _ALWAYS.items() if key.encode() not in given]
            message = message | {"headers": [*message["headers"], *more]}  # type: ignore[operator]
        await send(message)

    return marked


async def _refuse(send: Callable[[Message], Awaitable[None]]) -> None:
    await send({"type": "websocket.close", "code": 1008})


def plain_answer(fault: HttpError) -> Response:
    """Return an error in OpenAI's form, which our own API shares."""
    error = {"message": fault.text, "type": fault.kind, "param": fault.param, "code": fault.code}
    return JsonAnswer({"error": error}, fault.status, headers=fault.headers)
