"""The APIs of texts, over a worker that says what the test says: fields, streams, limits and faults; no process."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from support.fake_worker import SETTINGS, FakeWorker, dispatching, settle

from qwenimg.cli.serve.app import Service
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.workers.messages import TextPart, TextWritten
from qwenimg.common.prompts.chat import Turn

Body = Callable[[httpx2.AsyncClient, FakeWorker, Dispatcher], Awaitable[None]]
CHAT = "/v1/chat/completions"


def png() -> str:
    file = io.BytesIO()
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PNG = png()
URL = f"data:image/png;base64,{PNG}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run `body(http, worker, dispatcher)`; the worker is ready."""

    def runs(body: Body, **changed: Any) -> None:
        async def whole() -> None:
            async with dispatching(tmp_path / "gallery", monkeypatch, **changed) as (dispatcher, [worker, *_]):
                await worker.get_ready()
                app: Any = httpx2.ASGITransport(app=Service(dispatcher, dispatcher.settings).app())
                async with httpx2.AsyncClient(transport=app, base_url="http://127.0.0.1") as http:
                    await body(http, worker, dispatcher)

        asyncio.run(whole())

    return runs


async def writes(worker: FakeWorker, *parts: str, cut: bool = False, note: str = "") -> None:
    """Have the worker write the text of its task, once it has one."""
    while worker.task is None:
        await settle()
    name = worker.task.id
    for part in parts:
        await worker.say(TextPart(id=name, text=part))
    text = "".join(parts)
    await worker.say(TextWritten(id=name, text=text, prompt_tokens=11, tokens=len(parts), cut=cut, note=note))
    await worker.finish()


async def asked(http: httpx2.AsyncClient, worker: FakeWorker, path: str, data: Any, *parts: str, **more: Any) -> Any:
    """Return the answer to a request while the worker writes `parts`, and the order that it got."""
    answering = asyncio.create_task(http.post(path, json=data))
    while worker.task is None and not answering.done():
        await settle()
    task = worker.task
    if task is not None:
        await writes(worker, *parts, **more)
    return await answering, task


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages], **more}


# What is written


def test_a_conversation_becomes_an_order_and_its_text_an_answer(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        seen = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
        data = chat(
            {"role": "developer", "content": "be brief", "name": "me"},
            {"role": "user", "content": [seen, {"type": "text", "text": "what"}, {"type": "text", "text": "is it?"}]},
            "and now?",
            model="two", max_tokens=4096, temperature=0.5, top_p="0.9", seed=7, stop="END", n=1, user="me", tools=[],
            response_format={"type": "text"}, max_completion_tokens=None, store=False, presence_penalty=0.0,
        )  # fmt: skip
        answer, task = await asked(http, worker, CHAT, data, "a ", "red cat")
        assert answer.status_code == 200, answer.text
        done = answer.json()
        assert done["object"] == "chat.completion" and done["id"].startswith("chatcmpl-") and done["model"] == "two"
        [choice] = done["choices"]
        assert choice["message"]["content"] == "a red cat" and choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "stop" and done["usage"]["total_tokens"] == 13
        order = task.writing
        assert task.model == "two" and order.task == "chat"
        assert (order.system, order.question) == ("be brief", "what\nis it?\n\nand now?")
        assert (order.limit, order.temperature, order.top_p, order.seed, order.stops) == (4096, 0.5, 0.9, 7, ("END",))
        assert task.job.files.images == (base64.b64decode(PNG),)
        assert b"qwenimg_texts_total 1.0" in (await http.get("/metrics")).content
        assert b"qwenimg_tokens_total 2.0" in (await http.get("/metrics")).content

    run(body)


def test_earlier_questions_and_answers_go_along(run) -> None:
    """As OpenAI's client sends the messages that it got: their empty fields are there too."""

    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        seen = {"type": "image_url", "image_url": {"url": URL}}
        answered = {"role": "assistant", "refusal": None, "annotations": None, "audio": None, "tool_calls": None}
        data = chat(
            SYSTEM, {"role": "user", "content": [seen, {"type": "text", "text": "what?"}]}, "tell!",
            answered | {"content": "a cat"}, {"role": "user", "content": [{"type": "text", "text": "and"}, seen, seen]},
            answered | {"content": [{"type": "text", "text": "two"}]}, answered | {"content": "dogs"}, "more?",
        )  # fmt: skip
        answer, task = await asked(http, worker, CHAT, data, "no")
        assert answer.status_code == 200, answer.text
        order = task.writing
        assert (order.system, order.question) == ("x", "more?")
        assert order.earlier == (Turn("what?\n\ntell!", "a cat", 1), Turn("and", "two\n\ndogs", 2))
        assert len(task.job.files.images) == 3 and order.sees

    run(body)


def test_a_stream_is_the_text_in_parts_its_end_and_what_it_took(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        data = chat("x", stream=True, stream_options={"include_usage": True})
        answer, _ = await asked(http, worker, CHAT, data, "a ", "红", " cat", cut=True)
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert answer.headers["content-type"].startswith("text/event-stream") and lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        assert "".join(one.get("content", "") for one in deltas) == "a 红 cat"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3

    run(body)


def test_a_fault_is_in_openais_form_also_in_a_stream(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        for streams in (False, True):
            answering = asyncio.create_task(http.post(CHAT, json=chat("x", stream=streams)))
            while worker.task is None:
                await settle()
            await worker.finish("two: its text encoder has no head; qwen-image can", exit_code=5, refused=True)
            answer = await answering
            text = answer.text.partition('data: {"error"')[2] if streams else answer.text
            assert "qwen-image can" in text and "invalid_request_error" in text, answer.text
            assert answer.status_code == (200 if streams else 400)

    run(body)


def test_whoever_goes_has_the_text_stopped(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        answering = asyncio.create_task(http.post(CHAT, json=chat("x")))
        while worker.task is None:
            await settle()
        name = worker.task.id
        answering.cancel()
        await settle()
        assert worker.halts == [(name, False)] and not dispatcher.drawing
        await worker.finish()
        answer, _ = await asked(http, worker, CHAT, chat("y"), "next")
        assert answer.json()["choices"][0]["message"]["content"] == "next"

    run(body)


def test_texts_stand_in_the_queue_of_pictures(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        drawing = asyncio.create_task(http.post("/v1/images/generations", json={"prompt": "x"}))
        while worker.task is None:
            await settle()
        waiting = [asyncio.create_task(http.post(CHAT, json=chat(str(i)))) for i in range(2)]
        await settle()
        assert [job.kind for job in dispatcher.waiting] == ["texts", "texts"]
        answer = await http.post("/api/describe", json={"image": PNG})
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        await worker.picture()
        await worker.finish()
        for _ in waiting:
            await writes(worker, "ok")
        assert [(await one).status_code for one in (drawing, *waiting)] == [200, 200, 200]

    run(body)


def test_a_lost_worker_and_a_deadline(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        answering = asyncio.create_task(http.post(CHAT, json=chat("x")))
        while worker.task is None:
            await settle()
        await worker.die()
        assert (await answering).status_code == 507
        await worker.get_ready()
        answering = asyncio.create_task(http.post(CHAT, json=chat("x", deadline=1)))
        while worker.task is None:
            await settle()
        [job] = dispatcher.drawing
        assert job.deadline == 1
        job.timer._run()  # type: ignore[union-attr]
        assert (await answering).json()["error"]["code"] == "deadline"

    run(body)


# What is refused

SYSTEM = {"role": "system", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "x"}, "messages"), ({"messages": [1]}, "messages"),
    (chat(*["x"] * 65), "messages"), (chat({"role": "tool", "content": "x"}), "messages"),
    (chat({"role": ["user"], "content": "x"}), "messages"), (chat({"content": "x"}), "messages"),
    (chat({"role": "user"}), "messages"), (chat({"role": "user", "content": []}), "messages"),
    (chat({"role": "user", "content": {"text": "x"}}), "messages"), (chat({"role": "user", "content": 3}), "messages"),
    (chat({"role": "user", "content": [{"type": "input_audio"}]}), "messages"),
    (chat({"role": "user", "content": [{"type": "text", "text": 3}]}), "messages"),
    (chat({"role": "user", "content": ["x"]}), "messages"),
    (chat({"role": "assistant", "content": "y"}, "z"), "messages"),
    (chat("x", {"role": "assistant", "content": "y"}), "messages"),
    (chat("x", {"role": "assistant", "content": [{"type": "image_url", "image_url": URL}]}, "z"), "messages"),
    (chat("x", {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "z"), "messages"),
    (chat(SYSTEM), "messages"), (chat({"role": "user", "content": "x", "evil": 1}), "messages"),
    (chat({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "y"), "messages"),
    (chat("x" * 100_001), "messages"), (chat("x" * 60_000, "y" * 60_000), "messages"), (chat("\\" * 10**6), "messages"),
    *((chat({"role": "user", "content": [{"type": "image_url", "image_url": value}]}), "messages") for value in (
        "http://127.0.0.1/x.png", {"url": "https://x/y.png"}, {"url": "file:///etc/passwd"}, {"url": 3}, {}, None, 4,
        {"url": PNG}, {"url": "data:image/png;base64,###"}, {"url": "data:text/html;base64,AAAA"},
        {"url": "data:image/png;base64,"},
    )),
    (chat({"role": "system", "content": [{"type": "image_url", "image_url": URL}]}, "y"), "messages"),
    (chat({"role": "user", "content": [{"type": "image_url", "image_url": URL}] * 9}), "image"),
    (chat("x", model="gpt-4o"), "model"), (chat("x", model=3), "model"), (chat("x", model="/etc/passwd"), "model"),
    (chat("x", n=2), "n"), (chat("x", logprobs=True), "logprobs"), (chat("x", presence_penalty=1), "presence_penalty"),
    (chat("x", response_format={"type": "json_object"}), "response_format"),
    (chat("x", tools=[{"type": "function"}]), "tools"), (chat("x", tool_choice="required"), "tool_choice"),
    (chat("x", temperature=-0.1), "temperature"), (chat("x", temperature=2.1), "temperature"),
    (chat("x", temperature="hot"), "temperature"), (chat("x", temperature=True), "temperature"),
    (chat("x", top_p=1.1), "top_p"), (chat("x", top_p=-1), "top_p"), (chat("x", max_tokens=0), "max_tokens"),
    (chat("x", max_tokens=1.5), "max_tokens"), (chat("x", max_tokens=10**15), "max_tokens"),
    (chat("x", max_completion_tokens=-1), "max_completion_tokens"), (chat("x", seed=-1), "seed"),
    (chat("x", seed=2**63), "seed"), (chat("x", seed=True), "seed"), (chat("x", stop=["a"] * 5), "stop"),
    (chat("x", stop=""), "stop"), (chat("x", stop=[3]), "stop"), (chat("x", stop="x" * 101), "stop"),
    (chat("x", stream="yes"), "stream"), (chat("x", stream_options=3), "stream_options"),
    (chat("x", stream_options={"include_usage": 3}), "include_usage"), (chat("x", deadline="soon"), "deadline"),
    (chat("x", temprature=1), "temprature"), (chat("x", max_new_tokens=5), "max_new_tokens"),
    (chat("x", functions=[]), "functions"), (chat("\ud800"), ""),
]  # fmt: skip


def test_a_wrong_request_names_its_field_and_no_worker_sees_it(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        for data, param in REFUSED:
            content = json.dumps(data).encode()
            answer = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            shown = f"{content[:80]!r} {answer.text}"
            assert answer.status_code in (400, 404) and (error["param"] or "") == param, shown
            assert len(error["message"]) <= 300 and error["message"].isprintable(), shown
            assert not worker.drawn and "Traceback" not in answer.text, shown

    run(body)


def test_deep_and_huge_bodies(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        for content in (b"[" * 10**6, b'{"messages":' + b"[" * 10**5, b"{", b"[]", b"\xff", b'{"messages": NaN}'):
            answer = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["message"].isprintable()
        answer = await http.post(CHAT, content=b"x", headers={"content-type": "text/plain"})
        assert answer.status_code == 415 and (await http.get(CHAT)).status_code == 405

    run(body)


# Our own routes, and A1111's


def test_describe_and_rewrite(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        answer, task = await asked(http, worker, "/api/describe", {"image": URL}, "a cat")
        assert answer.json() == {"text": "a cat", "model": "one", "tokens": 1, "cut": False}
        assert (task.writing.task, task.writing.language, len(task.job.files.images)) == ("caption", "en", 1)
        data = {"image": [PNG], "tags": True, "language": "zh", "model": "two"}
        _, task = await asked(http, worker, "/api/describe", data, "猫")
        assert (task.writing.task, task.writing.language, task.model) == ("tags", "zh", "two")
        _, task = await asked(http, worker, "/api/describe", {"image": PNG, "ask": "how many?"}, "2")
        assert task.writing.question == "how many?"
        data = {"prompt": "a cat", "image": [PNG, PNG], "seed": 4}
        answer, task = await asked(http, worker, "/api/rewrite", data, "a cat", note="it is your own")
        assert answer.json()["note"] == "it is your own" and answer.json()["text"] == "a cat"
        assert (task.writing.task, task.writing.seed, task.job.prompt) == ("rewrite", 4, "a cat")
        assert len(task.job.files.images) == 2

    run(body)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("describe", {}, "image"), ("describe", {"image": [PNG, PNG]}, "image"), ("describe", {"image": 3}, "image"),
    ("describe", {"image": "http://x/y.png"}, "image"), ("describe", {"image": PNG, "language": "de"}, "language"),
    ("describe", {"image": PNG, "language": ["en"]}, "language"), ("describe", {"image": PNG, "tags": 1}, "tags"),
    ("describe", {"image": PNG, "tags": True, "ask": "x"}, "ask"), ("describe", {"image": PNG, "ask": 3}, "ask"),
    ("describe", {"image": PNG, "ask": "x" * 100_001}, "ask"), ("describe", {"image": PNG, "file": "/x"}, "file"),
    ("describe", {"image": PNG, "model": "three"}, "model"), ("rewrite", {}, "prompt"),
    ("rewrite", {"prompt": " "}, "prompt"), ("rewrite", {"prompt": 3}, "prompt"),
    ("rewrite", {"prompt": "x" * 10**6}, "prompt"), ("rewrite", {"prompt": "x", "seed": "a"}, "seed"),
    ("rewrite", {"prompt": "x", "image": [PNG] * 9}, "image"), ("rewrite", {"prompt": "x", "steps": 3}, "steps"),
    ("rewrite", {"prompt": "x", "language": "fr"}, "language"), ("rewrite", {"prompt": "x", "with": "/x"}, "with"),
]  # fmt: skip


def test_wrong_fields_of_our_own_routes(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        for path, data, param in WRONG:
            answer = await http.post(f"/api/{path}", json=data)
            error = answer.json()["error"]
            assert answer.status_code in (400, 404) and error["param"] == param, (path, answer.text)
            assert len(error["message"]) <= 300 and error["message"].isprintable() and not worker.drawn

    run(body)


def test_interrogate(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        path = "/sdapi/v1/interrogate"
        for model, task in (("clip", "caption"), ("deepdanbooru", "tags"), (None, "caption")):
            data = {"image": URL} | ({} if model is None else {"model": model})
            answer, order = await asked(http, worker, path, data, "a cat")
            assert answer.json() == {"caption": "a cat"} and order.writing.task == task
        for data in ({}, {"image": ""}, {"image": "/etc/passwd"}, {"image": PNG, "model": "blip"}, {"image": 3}):
            answer = await http.post(path, json=data)
            assert answer.status_code == 400 and answer.json()["detail"].isprintable(), answer.text
        answering = asyncio.create_task(http.post(path, json={"image": PNG}))
        while worker.task is None:
            await settle()
        await http.post("/sdapi/v1/interrupt")
        assert len(worker.halts) == 1, "interrupt is for texts too"
        await writes(worker, "a ca")
        assert (await answering).json() == {"caption": "a ca"}

    run(body)


def test_models_without_a_token_or_while_loading(run) -> None:
    async def body(http: httpx2.AsyncClient, worker: FakeWorker, dispatcher: Dispatcher) -> None:
        for path in (CHAT, "/api/describe", "/api/rewrite", "/sdapi/v1/interrogate"):
            answer = await http.post(path, json={})
            assert answer.status_code == 401

    run(body, token="a-token-of-sixteen")
    assert SETTINGS.token == ""
