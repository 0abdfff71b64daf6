"""Responses to a waiting client: the pictures of its job, or a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob, ProgressEvent

ALIVE = 15.0  # seconds without an event, after which a comment keeps the connection open
PAUSE = 1.0  # the same for the stream of all jobs, which notices then that the server stops
LISTENERS = 64  # streams of events at once
BEHIND = 500  # events that wait for one reader


async def wait(dispatcher: Dispatcher, job: ImageJob, request: HttpRequest) -> None:
    """Wait for the end of the job, and cancel it if the client disconnects."""
    gone = asyncio.create_task(_until_gone(request))
    ended = asyncio.create_task(job.ended.wait())
    try:
        await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not job.ended.is_set():
            raise HttpError(499, "the client has gone")
    finally:
        gone.cancel()
        ended.cancel()
        dispatcher.cancel(job)  # nothing, if it has ended
    if job.error is not None:
        raise job.error


async def _until_gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(job: ImageJob) -> AsyncGenerator[ProgressEvent | None, None]:
    """Yield the job's events up to its end; None after a while without one. The stream of a slow reader ends early."""
    watcher: asyncio.Queue[ProgressEvent] = asyncio.Queue(BEHIND)
    job.watchers.add(watcher)
    try:
        if job.ended.is_set():
            yield ProgressEvent("end", {"state": job.state} | ({} if job.error is None else {"error": job.error.text}))
            return
        while watcher in job.watchers:
            try:
                event = await asyncio.wait_for(watcher.get(), ALIVE)
            except TimeoutError:
                yield None
                continue
            yield event
            if event.name == "end":
                return
    finally:
        job.watchers.discard(watcher)


async def all_events(dispatcher: Dispatcher) -> AsyncGenerator[tuple[ImageJob, ProgressEvent] | None, None]:
    """Yield the events of all jobs until the server stops; None after a while without one. The stream of a slow reader
    ends early."""
    watcher: asyncio.Queue[tuple[ImageJob, ProgressEvent]] = asyncio.Queue(BEHIND)
    dispatcher.watchers.add(watcher)
    try:
        while watcher in dispatcher.watchers and not dispatcher.is_stopping:
            try:
                yield await asyncio.wait_for(watcher.get(), PAUSE)
            except TimeoutError:
                yield None
    finally:
        dispatcher.watchers.discard(watcher)


def event_line(data: Mapping[str, Any], name: str = "") -> str:
    """Return one server-sent event."""
    return f"{f'event: {name}' + chr(10) if name else ''}data: {json.dumps(data)}\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events. It is counted while it is sent, and its generator is closed when the client
    disconnects."""

    def __init__(self, lines: AsyncIterator[str], streams: set[object]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams.add(self)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.streams.discard(self)


def check_listeners(dispatcher: Dispatcher) -> None:
    """Raise HttpError if too many clients listen: they would use up all connections."""
    if len(dispatcher.streams) >= LISTENERS:
        raise HttpError(503, f"{LISTENERS} clients listen already; try again later", kind="server_error", after=5.0)
