"""Texts from a real server with a tiny Qwen-Image-Layered, on both backends: those of the command line, streamed,
stopped between two tokens, and refused by the name of the field or the model."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import webuiapi
from PIL import Image
from support import tiny_language
from support.cli_runner import cli
from support.servers import RunningServer, serving

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def png(pixels: np.ndarray = PICTURE) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


IMAGE = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{IMAGE}"


@pytest.fixture(scope="module", params=["cpu", pytest.param("mlx", marks=pytest.mark.rest)])
def server(
    request: pytest.FixtureRequest, tiny_layered: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    gallery, backend = tmp_path_factory.mktemp("gallery") / "g", request.param
    with serving(gallery, "-m", tiny_layered, "--precision", "fp32", backend=backend) as running:
        running.backend = backend  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with server.http as http:
        yield http


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(tiny_layered: Path) -> str:
    return tiny_layered.name


def asked(text: str) -> list[dict[str, Any]]:
    seen = {"type": "image_url", "image_url": {"url": URL}}
    return [{"role": "user", "content": [seen, {"type": "text", "text": text}]}]


@pytest.mark.sample(0)
def test_a_caption_is_that_of_the_command_line(
    server: RunningServer, http: httpx2.Client, model: str, tiny_layered: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    backend = server.backend  # type: ignore[attr-defined]
    for options, fields in (((), {}), (("--tags", "--language", "zh"), {"tags": True, "language": "zh"})):
        ran = cli(
            "describe", str(tmp_path / "a.png"), "-m", str(tiny_layered), "--precision", "fp32", "--backend", backend,
            "--quiet", *options,
        )  # fmt: skip
        answer = http.post("/api/describe", json={"image": IMAGE, "model": model, **fields})
        assert answer.status_code == 200, answer.text
        print(f"{backend}: {answer.json()['tokens']} tokens, {len(answer.json()['text'])} characters")
        assert answer.json()["text"] + "\n" == ran.out.decode() and answer.json()["tokens"] > 5


def test_a_chat_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    given: Any = {"model": model, "messages": [{"role": "system", "content": "be brief"}, *asked("what is it?")]}
    whole = client.chat.completions.create(**given, max_tokens=24)
    text = whole.choices[0].message.content or ""
    assert text and whole.model == model and whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 24 and whole.usage.prompt_tokens > 300, "the picture counts"
    stream = client.chat.completions.create(**given, max_tokens=24, stream=True, stream_options={"include_usage": True})
    parts, reasons, used = list[str](), list[Any](), None
    for chunk in stream:
        used = chunk.usage or used
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
    assert "".join(parts) == text
    assert used == whole.usage and reasons[-1] == whole.choices[0].finish_reason
    middle = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(**given, max_tokens=24, stop=[middle])
    assert cut.choices[0].message.content == text[: text.index(middle)] and cut.choices[0].finish_reason == "stop"


@pytest.mark.rest
def test_a_conversation_goes_on(client: openai.OpenAI, model: str) -> None:
    """The text depends on the earlier answer, and the tokens of both count."""
    messages: Any = asked("what is it?")

    def more(answer: str) -> Any:
        talk: Any = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
        return client.chat.completions.create(model=model, messages=talk, max_tokens=12)

    first = client.chat.completions.create(model=model, messages=messages, max_tokens=12)
    said = first.choices[0].message
    messages_again: Any = [*messages, said, {"role": "user", "content": "and then?"}]
    again = client.chat.completions.create(model=model, messages=messages_again, max_tokens=12)
    assert again.choices[0].message.content == more(said.content or "").choices[0].message.content
    texts = {more(answer).choices[0].message.content for answer in ("a red circle", "two blue squares", "nothing")}
    print(first.usage, again.usage, texts)
    assert first.usage is not None and again.usage is not None
    assert again.usage.prompt_tokens > first.usage.prompt_tokens + 8 and len(texts) > 1


@pytest.mark.rest
def test_a_seed_decides_what_is_drawn(client: openai.OpenAI, model: str) -> None:
    def text(seed: int, **more: Any) -> str | None:
        messages: Any = asked("what is it?")
        given = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 16} | more
        return (
            client.chat.completions.create(model=model, messages=messages, seed=seed, **given)
            .choices[0]
            .message.content
        )

    first = [text(seed) for seed in (1, 2, 3, 1)]
    assert first[0] == first[3] and len(set(first)) == 3
    assert text(1, temperature=0.0) == text(2, temperature=0.0) == text(3, top_p=0.0), "these are the likeliest"


def test_interrogate_by_a_client_of_a1111(server: RunningServer, http: httpx2.Client, model: str) -> None:
    assert http.post("/sdapi/v1/options", json={"sd_model_checkpoint": model}).status_code == 200
    api = webuiapi.WebUIApi(baseurl=f"{server.address}/sdapi/v1")
    told = api.interrogate(Image.fromarray(PICTURE))
    assert told.info == http.post("/api/describe", json={"image": IMAGE, "model": model}).json()["text"]
    http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "shapes"})
    answer = http.post("/sdapi/v1/interrogate", json={"image": IMAGE})
    assert answer.status_code == 400 and "the built-in model writes no texts" in answer.json()["detail"]


@pytest.mark.rest
def test_a_picture_is_drawn_after_a_text_and_a_text_after_a_picture(http: httpx2.Client, model: str) -> None:
    drawn = {"model": model, "image": IMAGE, "prompt": "a cat", "steps": 1, "layers": 1, "seed": 1, "size": "64x48"}
    texts, pictures = set(), set()
    for _ in range(2):
        texts.add(http.post("/api/describe", json={"image": IMAGE, "model": model}).json()["text"])
        job = http.post("/api/jobs", json=drawn).json()
        with http.stream("GET", f"/api/jobs/{job['id']}/events") as response:
            for _ in response.iter_lines():
                pass
        [name] = http.get(f"/api/jobs/{job['id']}").json()["pictures"]
        drawing = Image.open(io.BytesIO(http.get(f"/api/pictures/{name}").content))
        pictures.add(drawing.tobytes())
    assert len(texts) == len(pictures) == 1


def figure(http: httpx2.Client, name: str) -> float:
    """Return a figure of /metrics, 0 if it is not there yet."""
    lines = (line.rpartition(" ") for line in http.get("/metrics").text.splitlines())
    return next((float(value) for key, _, value in lines if key == name), 0.0)


def test_a_client_that_goes_stops_the_text(server: RunningServer, http: httpx2.Client, model: str) -> None:
    """The worker is held while the client goes, so the rest of the text waits until the server has noticed. A text that
    was over before it was held is tried again with another seed."""
    [worker], ends = server.workers, [f'qwenimg_requests_total{{outcome="{word}"}}' for word in ("cancelled", "done")]
    written = whole = 0.0
    for seed in range(10):
        order: Any = {"model": model, "messages": asked("tell a long story"), "temperature": 2.0, "seed": seed}
        before, begun = [figure(http, name) for name in ends], figure(http, "qwenimg_tokens_total")
        try:
            with http.stream("POST", "/v1/chat/completions", json=order | {"stream": True}) as response:
                next(line for line in response.iter_lines() if '"content": "' in line and '"content": ""' not in line)
                os.kill(worker, signal.SIGSTOP)
            while (after := [figure(http, name) for name in ends]) == before:
                assert server.workers == [worker]
        finally:
            os.kill(worker, signal.SIGCONT)
        answer = http.post("/v1/chat/completions", json=order | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text
        if after[0] == before[0]:
            continue
        written = figure(http, "qwenimg_tokens_total") - begun - 1
        longer = http.post("/v1/chat/completions", json=order | {"max_tokens": int(written) + 20}).json()
        whole = longer["usage"]["completion_tokens"]
        if whole > written:
            break
    print(f"seed {seed}: {written:.0f} tokens were written, of a text that has at least {whole}")
    assert 0 < written < whole


def test_a_prompt_is_rewritten_or_stays(http: httpx2.Client, model: str) -> None:
    """A random model keeps no quoted text: it writes twice, and the prompt stays, with a note."""
    given = {"prompt": "a cat", "model": model, "seed": 3}
    first, again, edit = (http.post("/api/rewrite", json=given | more).json() for more in ({}, {}, {"image": IMAGE}))
    print(first["text"][:60], "|", edit["text"][:60])
    assert first["text"] == again["text"] != edit["text"] and "note" not in first
    quoted = http.post("/api/rewrite", json=given | {"prompt": 'a sign that says "OPEN LATE"'}).json()
    assert quoted["text"] == 'a sign that says "OPEN LATE"' and "stays as it is" in quoted["note"]


def test_what_only_the_worker_knows_is_refused(http: httpx2.Client, model: str) -> None:
    broken = base64.b64encode(png()[:60]).decode()
    narrow = base64.b64encode(png(np.zeros((1, 400, 3), np.uint8))).decode()
    for path, data, word in (
        ("/api/describe", {"image": broken, "model": model}, "cannot be read"),
        ("/api/describe", {"image": narrow, "model": model}, "too narrow"),
        ("/api/describe", {"image": IMAGE, "model": "shapes"}, "the built-in model"),
        (
            "/v1/chat/completions",
            {"messages": asked("x"), "model": "shapes"},
            "the built-in model writes no texts",
        ),
        ("/v1/chat/completions", {"messages": asked("x " * 3_000), "model": model}, "tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "x " * 3_000}, *asked("x")], "model": model},
            "the instruction has",
        ),
    ):
        answer = http.post(path, json=data)
        error = answer.json()["error"]
        assert answer.status_code == 400 and word in error["message"], answer.text
        assert "/" not in error["message"] and error["message"].isprintable() and len(error["message"]) <= 300


def test_chat_markers_in_a_question_are_text(client: openai.OpenAI, model: str) -> None:
    """As control tokens they would end the question: four of them would count as four tokens."""
    marked, plain = (
        client.chat.completions.create(model=model, messages=asked(text), max_tokens=1).usage  # type: ignore[arg-type]
        for text in ("<|im_end|>" * 4, "x")
    )
    assert marked is not None and plain is not None
    print(f"{marked.prompt_tokens - plain.prompt_tokens + 1} tokens of four markers")
    assert marked.prompt_tokens - plain.prompt_tokens > 12


def test_the_page_knows_who_describes(http: httpx2.Client, model: str) -> None:
    http.post("/api/describe", json={"image": IMAGE, "model": model})
    answer = http.get("/api/models").json()
    assert "models" in answer, answer
    rows = {row["id"]: row for row in answer["models"]}
    assert rows[model]["describes"] is True


@pytest.mark.rest
def test_a_language_model_writes_beside_a_model_that_does_not(tmp_path: Path) -> None:
    """The built-in model draws, and --with writes: the text of the command line; pictures it does not see."""
    language = tiny_language.write(tmp_path / "language", "smollm2")
    ran = cli(
        "rewrite", "a red cat", "--with", str(language), "--precision", "fp32", "--backend", "cpu", "-s", "3", "--quiet"
    )
    assert ran.code == 0, ran.err
    with (
        serving(tmp_path / "g", "--with", language, "--precision", "fp32", backend="cpu") as running,
        running.http as http,
    ):
        answer = http.post("/api/rewrite", json={"prompt": "a red cat", "seed": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] + "\n" == ran.out.decode() and answer.json()["tokens"] > 5
        chat = {"messages": [{"role": "user", "content": "which cat?"}], "max_tokens": 9}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] > 1
        answer = http.post("/api/describe", json={"image": IMAGE})
        assert answer.status_code == 400 and "sees no pictures" in answer.text and str(tmp_path) not in answer.text
