"""Connections that are silent, slow, or many: they are closed, and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from support.servers import serving

from qwenimg.cli.serve import connections
from qwenimg.cli.serve.connections import CONNECTIONS, RESERVED, HastyProtocol, room

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the whole request, and answer with as many bytes as its path says."""
    while (await receive()).get("more_body"):
        pass
    size = int(scope["path"][1:]) if scope["path"][1:].isdecimal() else 2
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    await send({"type": "http.response.body", "body": b"x" * size})


def with_server(body: Callable[[Callable[[], Awaitable[Streams]], set[Any]], Awaitable[None]], most: int = 9) -> None:
    """Run `body(connect, connections)` beside a server of `most` connections."""

    async def whole() -> None:
        about: Any = {"http": HastyProtocol, "lifespan": "off", "log_config": None, "limit_concurrency": most + 1}
        server = uvicorn.Server(uvicorn.Config(app, port=0, **about))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        address = server.servers[0].sockets[0].getsockname()
        await body(lambda: asyncio.open_connection(*address), server.server_state.connections)
        server.should_exit = True
        await serving

    asyncio.run(whole())


async def rest(streams: Streams) -> bytes:
    """Return what comes until the end, after which the server has closed the connection."""
    chunks = list[bytes]()
    with contextlib.suppress(ConnectionResetError):  # it may be closed before what was sent is read
        while more := await streams[0].read(1 << 20):
            chunks.append(more)
    streams[1].close()
    return b"".join(chunks)


@pytest.mark.parametrize("begun", [b"", b"G", HEAD, BODY[:-1]])
def test_a_connection_without_a_request_is_closed(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a byte after FIRST, else after SLOW: the other one is out of reach."""
    monkeypatch.setattr(connections, "SLOW" if begun else "FIRST", 0.0)
    monkeypatch.setattr(connections, "FIRST" if begun else "SLOW", 1e6)

    async def body(connect: Any, open_now: set[Any]) -> None:
        streams = await connect()
        streams[1].write(begun)
        if begun == BODY[:-1]:  # the guards give up a body, not the connection
            while not open_now:
                await asyncio.sleep(0)
            streams[1].write(b"x" * 99)
            assert b"200 OK" in await rest(streams)
        else:
            assert await rest(streams) == b""

    with_server(body)


@pytest.mark.parametrize(("first", "then"), [(b"", BODY), (HEAD, BODY), (BODY, BODY), (b"", HEAD + b"\r\n")])
def test_who_waits_longest_without_a_request_makes_room(first: bytes, then: bytes) -> None:
    """Among those whose bodies come, if all others are at work; and a new one is closed only if all are."""

    async def body(connect: Any, open_now: set[Any]) -> None:
        oldest = await connect()
        oldest[1].write(first)
        while not open_now or (first == BODY and not any(one.is_sending for one in open_now)):
            await asyncio.sleep(0)
        others = []
        for count in range(1, 4):
            others.append(await connect())
            others[-1][1].write(then)
            while then == BODY and sum(one.is_sending for one in open_now) < min(3, count + (first == BODY)):
                await asyncio.sleep(0)
        assert await rest(oldest) == b"", "it was closed"
        assert len(open_now) == 3, "and they were not"
        for one in others:
            one[1].close()

    with_server(body, most=3)


def test_a_client_that_does_not_read_its_answer_is_dropped() -> None:
    """And one that reads is served, however long it takes: what counts is that it goes on."""

    async def body(connect: Any, open_now: set[Any]) -> None:
        ask = b"GET /30000000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        for is_reading in (True, False):
            streams = await connect()
            if not is_reading:
                streams[1].transport.pause_reading()
            streams[1].write(ask)
            while not any(one._unread for one in open_now):
                await asyncio.sleep(0)
            [served] = open_now
            served._unread.cancel()
            served._watch_reader(served.transport.get_write_buffer_size() + (connections.READ if is_reading else 0))
            assert (served in open_now) == is_reading
            if is_reading:
                assert len(await rest(streams)) > 30_000_000
            streams[1].close()

    with_server(body)


@pytest.mark.parametrize("limits", [(1024, 4096), (256, 10_000), (256, 256), (resource.RLIM_INFINITY,) * 2, (64, 64)])
def test_connections_leave_descriptors_for_files(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: now.__setitem__(0, both))
    most, soft = room(), now[0][0]
    print(limits, "->", most, "connections of", soft, "descriptors")
    assert most == (CONNECTIONS if limits[1] >= 1024 or limits[1] < 0 else max(8, (soft - RESERVED) // 3))


@pytest.mark.sample(0)
def test_a_crowd_of_connections_stops_nobody(tmp_path: Path) -> None:
    """1,900 of one client, where the system gives 1,024 descriptors: a job ends with its pictures, others are
    answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine gives too few descriptors for 1,900 connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    with serving(tmp_path / "g") as server, server.http as http, contextlib.ExitStack() as whole:
        whole.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        address = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        ask = {"prompt": "a red circle", "seed": "1-2", "steps": 20, "size": "64x64"}
        for sent in (b"", HEAD, BODY, b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
            with contextlib.ExitStack() as crowd:
                for number in range(1900):
                    if number == 950:
                        job = http.post("/api/jobs", json=ask).json()["id"]
                    one = crowd.enter_context(socket.create_connection(address))
                    with contextlib.suppress(OSError):  # it was closed already
                        one.sendall(sent)
                paths = ("/health", "/v1/models", "/api/pictures", "/api/jobs")
                with server.http as other:
                    assert [other.get(path).status_code for path in paths] == [200] * 4
                    used = psutil.Process(server.process.pid).num_fds()
                    print(f"{sent[:20]!r}: {used} descriptors")
                    assert used < 1024 - RESERVED
                    while (done := other.get(f"/api/jobs/{job}").json())["state"] in ("waiting", "drawing"):
                        pass  # the places of listeners may be taken
                assert done["state"] == "done" and len(done["pictures"]) == 2, done
