"""The application: the routes of all APIs, with the checks of guards.py, served until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from qwenimg.cli.serve.apis.chat_api import ChatApi
from qwenimg.cli.serve.apis.images_api import ImagesApi
from qwenimg.cli.serve.apis.jobs_api import JobsApi
from qwenimg.cli.serve.apis.sdapi import PREFIX, SdApi, sdapi_answer
from qwenimg.cli.serve.apis.texts_api import TextsApi
from qwenimg.cli.serve.connections import ACCEPTED, HastyProtocol, listen, room
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.guards import Guards, plain_answer
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.metrics import Metrics
from qwenimg.cli.serve.page import Page
from qwenimg.cli.serve.settings import Settings
from qwenimg.common.base.text import clean

LINGER = 10  # seconds for answers to be sent, beyond those for jobs to be drawn


class QuietServer(uvicorn.Server):
    """uvicorn's server, without its own handling of signals, and accepting few connections at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        listen(sockets or [])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """A dispatcher with all its routes."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self.dispatcher, self.settings = dispatcher, settings

    def app(self) -> ASGIApp:
        """Return the application, which must run in the event loop of the dispatcher."""
        dispatcher, settings = self.dispatcher, self.settings
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            *Page().routes(),
            *ImagesApi(dispatcher, settings, int(time.time())).routes(),
            *ChatApi(dispatcher, settings).routes(),
            *TextsApi(dispatcher, settings).routes(),
            *JobsApi(dispatcher, dispatcher.journal, settings).routes(),
            *SdApi(dispatcher, settings).routes(),
        ]
        handlers = {
            HttpError: _answer_fault,
            HTTPException: _answer_http,
            sqlite3.Error: self._answer_busy,
            Exception: _answer_bug,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
        app.state.large = asyncio.Lock()  # of the body that is parsed in a thread
        return Guards(app, settings, answer)

    async def health(self, request: HttpRequest) -> Response:
        """Report that the process lives."""
        return JsonAnswer({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Report that requests are accepted."""
        if not self.dispatcher.is_ready:
            raise self.dispatcher.not_ready()
        return JsonAnswer({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Return the figures for Prometheus."""
        metrics = self.dispatcher.metrics
        metrics.drawing.set(len(self.dispatcher.drawing))
        for number, worker in enumerate(self.dispatcher.workers):
            metrics.up.labels(str(number)).set(worker.state == "ready")
            metrics.peak.labels(str(number)).set(worker.peak)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer_busy(self, request: HttpRequest, error: Exception) -> Response:
        self.dispatcher.say(f"error: the gallery's database: {clean(error, 120)}")
        fault = HttpError(
            503, "the gallery cannot be used now; the server's log says why", kind="server_error", after=5.0
        )
        return answer(request.url.path, fault)


def answer(path: str, fault: HttpError) -> Response:
    """Return an error in the form of the API of `path`."""
    return sdapi_answer(fault) if path.startswith(PREFIX) else plain_answer(fault)


async def _answer_fault(request: HttpRequest, error: HttpError) -> Response:
    return answer(request.url.path, error)


async def _answer_http(request: HttpRequest, error: HTTPException) -> Response:
    kinds = {404: "there is nothing here", 405: "this method is not served here"}
    fault = HttpError(error.status_code, kinds.get(error.status_code, "the request cannot be read"))
    return answer(request.url.path, fault)


async def _answer_bug(request: HttpRequest, error: Exception) -> Response:
    return answer(request.url.path, HttpError(500, "a bug in the server; its log says more", kind="server_error"))


async def serve(
    settings: Settings,
    folder: Path,
    listener: socket.socket,
    say: Callable[[str], None],
    watch: Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]],
) -> tuple[int, str]:
    """Serve until a signal, and return 0 and "", or the exit code and text of the error that ended the server.

    say: prints a line. watch: calls its argument, in any thread, when a signal comes in its context."""
    loop = asyncio.get_running_loop()
    for name in ("uvicorn.error", "asyncio"):  # they warn of clients, who could fill the log
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.closing(Journal(folder)) as journal:
        dispatcher = Dispatcher(settings, journal, Metrics(), say)
        server = QuietServer(
            uvicorn.Config(
                Service(dispatcher, settings).app(),
                lifespan="off",
                log_config=None,
                access_log=False,
                http=HastyProtocol,
                ws="none",
                server_header=False,
                proxy_headers=False,
                backlog=ACCEPTED,
                limit_concurrency=room() + 1,
                timeout_graceful_shutdown=round(settings.patience) + LINGER,
            )
        )

        def stop() -> None:
            dispatcher.stop()
            server.should_exit = True

        def hears() -> None:
            loop.call_soon_threadsafe(stop)

        dispatcher.unusable.add_done_callback(lambda _: stop())
        try:
            with watch(hears):
                await server.serve([listener])
        finally:
            await dispatcher.close()
        if dispatcher.unusable.done():
            unusable = dispatcher.unusable.result()
            return unusable.exit_code, unusable.text
        return 0, ""
