"""Requests that are refused before they are read: another site's page, another name of this machine, too much."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from support.fake_worker import SETTINGS

from qwenimg.cli.serve import guards
from qwenimg.cli.serve.app import answer
from qwenimg.cli.serve.guards import MAX_BODY, MAX_IGNORED, Guards

TOKEN = "a-token-of-the-tests"
HERE = ("host", "127.0.0.1:7860")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """The application behind the guards: it answers with the size of the body."""
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


def asked(
    *headers: tuple[str, str],
    chunks: tuple[bytes, ...] = (b"",),
    path: str = "/v1/models",
    then: Any = None,
    app: Any = None,
    **changed: Any,
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer to a request with these headers and chunks of its body."""
    sent: list[dict[str, Any]] = []
    rest = [{"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)} for i, chunk in enumerate(chunks)]
    for message in rest if then else ():
        message["more_body"] = True

    async def receive() -> Any:
        if rest:
            return rest.pop(0)
        return await (then() if then else asyncio.Event().wait())

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "path": path,
        "method": "POST",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    guarded = app or Guards(echo, replace(SETTINGS, **changed), answer)
    asyncio.run(guarded(scope, receive, send))
    given = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], given, sent[1]["body"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:7860", "localhost:1", "LOCALHOST", "[::1]:7860", "[::1]", "box.local:80"]
)
def test_names_of_this_machine_are_served(host: str) -> None:
    assert asked(("host", host), hosts=frozenset({"box.local"}))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]:80",
     "127.0.0.1@evil.example", "localhost:80:80", "127.0.0.1:x", "::1"],
)  # fmt: skip
def test_another_name_that_leads_here_is_refused(host: str) -> None:
    """As after DNS rebinding, when a hostile page's own name has this machine's address."""
    status, _, body = asked(("host", host))
    assert status == 403 and json.loads(body)["error"]["code"] == "host"
    assert asked()[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:3000", "http://localhost:7860", ""]
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    status, headers, body = asked(HERE, ("origin", origin))
    assert status == 403 and json.loads(body)["error"]["code"] == "origin"
    assert not any(name.startswith("access-control") for name in headers)


def test_our_own_page_is_served() -> None:
    for origin in ("http://127.0.0.1:7860", "https://127.0.0.1:7860"):
        assert asked(HERE, ("origin", origin), ("sec-fetch-site", "same-origin"))[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_page_includes_is_refused_without_an_origin_too(site: str) -> None:
    """A picture in a hostile page: browsers send no Origin for it."""
    assert asked(HERE, ("sec-fetch-site", site), ("sec-fetch-mode", "no-cors"))[0] == 403
    assert asked(HERE, ("sec-fetch-site", site), ("sec-fetch-mode", "navigate"))[0] == 200  # a link to us


def test_no_answer_may_be_read_or_included_by_others() -> None:
    for headers in (asked(HERE)[1], asked(("host", "evil.example"))[1]):
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        assert not any(name.startswith("access-control") or name == "server" for name in headers)


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), (basic(f"me:{TOKEN}"), 200), (basic(f":{TOKEN}"), 200),
        (None, 401), ("", 401), ("Bearer", 401), ("Bearer wrong", 401), (f"Bearer {TOKEN}x", 401), (TOKEN, 401),
        (f"Token {TOKEN}", 401), (basic("me:wrong"), 401), (basic(TOKEN), 401), ("Basic %%%", 401), ("Basic /w==", 401),
        ("Bearer \xe9", 401),
    ],
)  # fmt: skip
def test_the_token(authorization: str | None, status: int) -> None:
    headers = [HERE] if authorization is None else [HERE, ("authorization", authorization)]
    for path in ("/v1/models", "/api/jobs", "/sdapi/v1/options", "/metrics"):
        assert asked(*headers, path=path, token=TOKEN)[0] == status
    assert asked(*headers, path="/health", token=TOKEN)[0] == 200


def test_without_a_token_any_is_served() -> None:
    """The official client sends one in any case."""
    assert asked(HERE, ("authorization", "Bearer none"))[0] == 200


def test_a_body_has_a_limit_declared_or_not() -> None:
    status, headers, _ = asked(HERE, ("content-length", str(MAX_IGNORED + 1)))
    assert status == 413 and headers["connection"] == "close"
    piece = bytes(1 << 20)
    app = Guards(echo, SETTINGS, answer)
    assert asked(HERE, chunks=(piece,) * (MAX_BODY >> 20), app=app)[2] == str(MAX_BODY).encode()
    assert asked(HERE, chunks=(piece,) * ((MAX_BODY >> 20) + 1), app=app)[0] == 413
    assert app._receiving == 0
    sent = [0]

    async def more() -> Any:
        sent[0] += 1
        return {"type": "http.request", "body": piece, "more_body": True}

    assert asked(HERE, chunks=(piece, piece), then=more)[0] == 413
    assert sent[0] <= MAX_IGNORED >> 20, "no more is read"
    for length in ("x", "-1", "9" * 400, "²"):
        assert asked(HERE, ("content-length", length))[0] == 413


def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MAX_BODIES", 10)
    app = Guards(echo, SETTINGS, answer)
    assert asked(HERE, chunks=(b"x" * 10,), app=app)[0] == 200
    status, headers, _ = asked(HERE, chunks=(b"x" * 11,), app=app)
    assert status == 503 and "retry-after" in headers
    assert asked(HERE, chunks=(b"x" * 10,), app=app)[0] == 200, "and are forgotten"


def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SLOW", 0.0)

    async def never() -> Any:
        await asyncio.Event().wait()

    app = Guards(echo, SETTINGS, answer)
    assert asked(HERE, chunks=(b"x", b"x"), then=never, app=app)[0] == 408
    assert app._receiving == 0


def test_a_client_that_goes_while_it_sends_costs_nothing() -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    app = Guards(echo, SETTINGS, answer)
    assert asked(HERE, chunks=(b"x", b"x"), then=gone, app=app)[0] == 499
    assert app._receiving == 0


def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guards(echo, SETTINGS, answer)({"type": "websocket", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_faults_have_the_form_of_their_api() -> None:
    ours = json.loads(asked(("host", "x"), path="/v1/images/edits")[2])
    theirs = json.loads(asked(("host", "x"), path="/sdapi/v1/txt2img")[2])
    assert set(ours["error"]) == {"message", "type", "param", "code"}
    assert set(theirs) == {"error", "detail", "body", "errors"} and theirs["detail"] == ours["error"]["message"]
