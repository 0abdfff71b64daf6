"""The tools on standard input and output, by the official library of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mcp import types
from mcp.server import Server
from mcp.server.stdio import stdio_server

from qwenimg.cli.assistants.tools import Answer, Call, Ended, Tools
from qwenimg.common.base.version import __version__

WAITING = 16  # calls in line, at most
_BUSY = f"{WAITING} calls wait already; try again later"


async def serve(tools: Tools) -> None:
    """Serve one client until standard input is closed. A picture that is being drawn then ends after its step."""
    calls = set[Call]()
    with ThreadPoolExecutor(1) as thread:

        async def call_tool(context: Any, params: Any) -> Any:
            if len(calls) > WAITING:
                return _result(Answer(text=_BUSY, is_error=True))
            loop = asyncio.get_running_loop()

            def progress(done: int, total: int) -> None:
                asyncio.run_coroutine_threadsafe(context.session.report_progress(done, total), loop)

            call = Call(progress=progress)
            calls.add(call)
            try:
                drawn = loop.run_in_executor(thread, tools.run, params.name, params.arguments or {}, call)
                return _result(await drawn)
            except Ended:
                return _result(Answer(text="ended", is_error=True))
            finally:  # the client cancels, or has gone
                call.ended.set()
                calls.discard(call)

        async def list_tools(context: Any, params: Any) -> Any:
            return types.ListToolsResult(tools=[
                types.Tool(name=name, description=tools.titles[name], input_schema=schema)
                for name, schema in tools.schemas.items()
            ])  # fmt: skip

        server = Server("qwenimg", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
        async with stdio_server() as (reader, writer):
            await server.run(reader, writer, server.create_initialization_options())


def _result(answer: Answer) -> Any:
    pictures = [
        types.ImageContent(data=base64.b64encode(png).decode("ascii"), mime_type="image/png") for png in answer.pictures
    ]
    content: list[Any] = [types.TextContent(text=answer.text), *pictures]
    return types.CallToolResult(content=content, is_error=answer.is_error)
