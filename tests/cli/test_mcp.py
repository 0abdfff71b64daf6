"""`qwenimg mcp`: its tools, what keeps a client in the folder, and the library's own client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli
from support.processes import COMMAND, ENVIRONMENT, listing

import qwenimg
from qwenimg.cli.assistants.folder import MOST_BYTES
from qwenimg.cli.assistants.tools import MOST_PICTURES, Call, Ended, Tools
from qwenimg.cli.client_folder import Folder

SMALL = {"width": 64, "height": 48, "steps": 2}
PROMPT = {"prompt": "a red circle"}


@pytest.fixture(scope="module")
def pipes(folders: dict[str, Path]) -> Callable[[str], qwenimg.Pipeline]:
    opened: dict[str, qwenimg.Pipeline] = {}

    def one(backend: str) -> qwenimg.Pipeline:
        if backend not in opened:
            opened[backend] = qwenimg.load(folders["sd15"], backend=backend, precision="fp32")
        return opened[backend]

    return one


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder, with a picture in it, beside one that is secret."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8))
    for name in ("in/cat.png", "in/sub/dog.png", "secret.png"):
        picture.save(tmp_path / name)
    return tmp_path / "in"


@pytest.fixture
def tools(pipes: Callable[[str], qwenimg.Pipeline], place: Path) -> Tools:
    return Tools(pipes("cpu"), Folder(place), 600.0)


def run(tools: Tools, tool: str, /, **arguments: Any) -> Any:
    return tools.run(tool, arguments, Call())


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_pictures_are_written_into_the_folder_and_returned(
    pipes: Callable[[str], qwenimg.Pipeline], place: Path, backend: str
) -> None:
    tools, before = Tools(pipes(backend), Folder(place), 600.0), {*listing(place)}
    answer = run(tools, "draw", **PROMPT, **SMALL, seed=7, count=2)
    assert not answer.is_error and len(answer.pictures) == 2
    assert {*listing(place)} - before == {"a-red-circle.png", "a-red-circle-2.png"}
    expected = [pipes(backend)("a red circle", **SMALL, seed=seed).pixels for seed in (7, 8)]
    for png, name, pixels in zip(answer.pictures, ("a-red-circle", "a-red-circle-2"), expected, strict=True):
        for source in (io.BytesIO(png), place / f"{name}.png"):
            assert np.array_equal(np.asarray(Image.open(source)), pixels)
    assert answer.text.splitlines()[0] == "a-red-circle.png: 64x48, seed 7, 2 steps"
    edited = run(tools, "edit", **PROMPT, steps=4, seed=7, image="cat.png", name="made")
    expected_edit = pipes(backend)("a red circle", steps=4, seed=7, image=place / "cat.png").pixels
    assert np.array_equal(np.asarray(Image.open(place / "made.png")), expected_edit) and not edited.is_error
    text = base64.b64encode((place / "sub" / "dog.png").read_bytes()).decode()
    for image in ({"image": "sub/dog.png"}, {"image_base64": text}, {"image_base64": f"data:image/png;base64,{text}"}):
        again = run(tools, "edit", **PROMPT, steps=4, seed=7, **image)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(again.pictures[0]))), expected_edit)
    masked = run(tools, "edit", **PROMPT, steps=4, seed=7, image="cat.png", mask_base64=text)
    assert not masked.is_error, masked


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_texts_are_those_of_the_commands(tiny_edit: dict[str, Path], place: Path, backend: str) -> None:
    model = str(tiny_edit["qwen-2511"])
    weights = ("-m", model, "--backend", backend, "--precision", "fp32", "--quiet")
    with closing(qwenimg.load(model, backend=backend, precision="fp32")) as pipe:
        tools = Tools(pipe, Folder(place), 600.0)
        before = pipe.runtime.interrupt
        made = run(tools, "rewrite", **PROMPT, seed=3)
        assert not made.is_error and made.text.splitlines()[0] == (
            cli("rewrite", PROMPT["prompt"], *weights, "-s", "3").out.decode().strip()
        ), made
        asked = ("describe", str(place / "cat.png"), *weights)
        for arguments, options in (({}, ()), ({"ask": "what? <lora:a:1>"}, ("--ask", "what? <lora:a:1>"))):
            answer = run(tools, "describe", image="cat.png", **arguments)
            assert not answer.is_error and answer.text == cli(*asked, *options).out.decode().strip(), answer
        for tool, arguments in (
            ("rewrite", {"prompt": 3}), ("rewrite", {"prompt": " "}), ("rewrite", {"prompt": "a", "seed": "x"}),
            ("describe", {}), ("describe", {"image": "../secret.png"}), ("describe", {"image": "cat.png", "ask": 3}),
            ("describe", {"image": "cat.png", "tags": True, "ask": "x"}), ("describe", {"image": ["cat.png"] * 2}),
            ("rewrite", {"prompt": "a <lora:x:1>"}),
        ):  # fmt: skip
            wrong = run(tools, tool, **arguments)
            assert wrong.is_error and "\n" not in wrong.text and str(place) not in wrong.text, (tool, arguments)
        late = Tools(pipe, Folder(place), 1e-9).run("rewrite", PROMPT, Call())
        assert late.is_error and "the --deadline" in late.text
        assert pipe.runtime.interrupt is before and "language model" not in pipe.model.residents.opened


@pytest.mark.sample(0)
def test_a_model_that_cannot_write_says_so(tools: Tools) -> None:
    answer = run(tools, "rewrite", **PROMPT)
    assert answer.is_error and "text encoder" in answer.text and "\n" not in answer.text


@pytest.mark.sample(0)
def test_plan_and_models_draw_nothing(tools: Tools, place: Path) -> None:
    before = listing(place)
    assert "takes about" in run(tools, "plan", **SMALL).text
    listed = run(tools, "models").text
    assert listed.startswith("open: tiny-sd15, {") and "qwen-image" in listed and "license" in listed
    assert listing(place) == before


TRICKS = [
    "../secret.png", "/etc/passwd", "sub/../../secret.png", "sub/../cat.png", "link.png", "linked/secret.png", "", ".",
    "sub", "fifo.png", "none.png", "cat.png\0", "\ud800.png", "C:\\cat.png", "~/cat.png", "a" * 5000, "round", 7, None,
    ["../secret.png"], ["cat.png"] * 11, [], {"a": 1}, "http://example.org/cat.png", "file:///etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS, ids=lambda one: repr(one)[:20].encode("ascii", "replace").decode())
def test_no_name_reaches_another_folder(tools: Tools, place: Path, name: object) -> None:
    (place / "link.png").symlink_to("../secret.png")
    (place / "linked").symlink_to("..")
    (place / "round").symlink_to("round")
    os.mkfifo(place / "fifo.png")
    before = listing(place)
    for field in ("image", "mask"):
        given = {"image": "cat.png"} | {field: name} if name is not None or field == "image" else {"image": None}
        answer = run(tools, "edit", **PROMPT, **SMALL, **given)
        assert answer.is_error and not answer.pictures
        assert len(answer.text) <= 300 and answer.text.isprintable() and str(place.parent) not in answer.text, answer
    assert listing(place) == before


@pytest.mark.parametrize(
    "name", ["../out", "/tmp/out", "a/b", ".hidden", "", "..", "a.png", "a\0", "\ud800", "a b", "-o", "a" * 200, 7, []]
)
def test_no_name_of_a_new_file_leaves_the_folder(tools: Tools, place: Path, name: object) -> None:
    before = listing(place), listing(place.parent)
    answer = run(tools, "draw", **PROMPT, **SMALL, name=name)
    assert answer.is_error and answer.text.startswith("name is ") and (listing(place), listing(place.parent)) == before


def test_a_file_that_is_there_is_kept(tools: Tools, place: Path) -> None:
    (place / "cat-2.png").symlink_to("../nowhere.png")
    kept = (place / "cat.png").read_bytes()
    answer = run(tools, "draw", **PROMPT, **SMALL, name="cat")
    assert answer.text.startswith("cat-3.png: ") and (place / "cat.png").read_bytes() == kept
    assert not (place.parent / "nowhere.png").exists()


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("nothing", {}, "no tool 'nothing'"),
        ("draw", PROMPT | {"lora": "/etc/passwd"}, "draw takes no 'lora'"),
        ("draw", PROMPT | {"latents": "x.npy"}, "draw takes no 'latents'"),
        ("draw", PROMPT | {"output": "/tmp/x"}, "draw takes no 'output'"),
        ("draw", PROMPT | {"image": "cat.png"}, "draw takes no 'image'"),
        ("draw", {}, "the prompt is empty"),
        ("draw", {"prompt": 7}, "prompt"),
        ("draw", {"prompt": "\ud800"}, "prompt"),
        ("draw", PROMPT | {"count": MOST_PICTURES + 1}, "choose 1 to"),
        ("draw", PROMPT | {"count": True}, "choose 1 to"),
        ("draw", PROMPT | {"seed": "1-4"}, "seed is 1-4"),
        ("draw", PROMPT | {"seed": 2**64}, "seed"),
        ("draw", PROMPT | {"seed": 2**64 - 1, "count": 2}, "seed"),
        ("draw", PROMPT | {"width": 10**30}, "outside"),
        ("draw", PROMPT | {"steps": float("nan")}, "steps"),
        ("draw", PROMPT | {"guidance": float("inf")}, "guidance"),
        ("draw", PROMPT | {"sampler": "eulr"}, "did you mean"),
        ("edit", PROMPT, "image is missing"),
        ("edit", PROMPT | {"image": "cat.png", "image_base64": "eA=="}, "give one"),
        ("edit", PROMPT | {"image_base64": "!!"}, "no picture in base64"),
        ("edit", PROMPT | {"image_base64": "eHh4"}, "is no PNG"),
        ("edit", PROMPT | {"image_base64": ""}, "no text in base64"),
        ("edit", PROMPT | {"image_base64": "A" * (MOST_BYTES * 2)}, "more than 32 MB"),
        ("plan", {"width": 0}, "outside 1 to 16384"),
        ("models", {"prompt": "x"}, "models takes no 'prompt'"),
    ],
)
def test_a_wrong_argument_is_answered_in_one_line(
    tools: Tools, place: Path, tool: str, arguments: Any, told: str
) -> None:
    before = listing(place)
    answer = run(tools, tool, **({} if tool in ("models", "nothing") else SMALL if tool != "plan" else {}) | arguments)
    assert answer.is_error and told in answer.text and len(answer.text) <= 300 and answer.text.isprintable(), answer
    assert listing(place) == before


def test_a_call_ends_by_its_deadline_and_by_its_client(tools: Tools, place: Path) -> None:
    before = listing(place)
    answer = Tools(tools.pipe, tools.folder, 1e-9).run("draw", {**PROMPT, **SMALL, "steps": 5}, Call())
    assert answer.is_error and "--deadline" in answer.text
    call = Call(progress=lambda done, total: call.ended.set())
    with pytest.raises(Ended):
        tools.run("draw", {**PROMPT, **SMALL, "steps": 5}, call)
    assert listing(place) == before and not run(tools, "draw", **PROMPT, **SMALL).is_error  # it is free again


# The command

mcp_library = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("mcp") is None, reason="the library mcp is not installed"
)


@pytest.mark.sample(0)
def test_the_command_needs_a_folder(tmp_path: Path) -> None:
    cli("mcp").refused(2, "--folder")
    (tmp_path / "file").write_text("x")
    pytest.importorskip("mcp")
    cli("mcp", "--folder", str(tmp_path / "file"), "-m", "shapes").refused(2, "file")


@mcp_library
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_the_librarys_own_client(folders: dict[str, Path], place: Path, backend: str) -> None:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    arguments = [*COMMAND[1:], "mcp", "-m", str(folders["sd15"]), "--backend", backend, "--folder", str(place)]
    server = StdioServerParameters(command=COMMAND[0], args=arguments, env=ENVIRONMENT)
    seen: list[tuple[float, float | None]] = []

    async def told(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total))

    async def talk() -> None:
        async with Client(stdio_client(server)) as client:
            listed = (await client.list_tools()).tools
            assert {tool.name for tool in listed} == {"draw", "edit", "rewrite", "describe", "plan", "models"}
            made = await client.call_tool("draw", PROMPT | SMALL | {"seed": 7}, progress_callback=told)
            assert not made.is_error and [one.type for one in made.content] == ["text", "image"]
            assert made.content[1].mime_type == "image/png"
            assert base64.b64decode(made.content[1].data) == (place / "a-red-circle.png").read_bytes()
            wrong = await client.call_tool("edit", PROMPT | {"image": "../secret.png"})
            assert wrong.is_error and "not in the folder" in wrong.content[0].text

    asyncio.run(asyncio.wait_for(talk(), 120))
    assert seen[-1] == (2, 2)


def started(folders: dict[str, Path], place: Path) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "mcp", "-m", str(folders["sd15"]), "--backend", "cpu", "--folder", str(place)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT)


def lines(*messages: dict[str, Any]) -> bytes:
    return b"".join(json.dumps({"jsonrpc": "2.0"} | one).encode() + b"\n" for one in messages)


HELLO = (
    {
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    },
    {"method": "notifications/initialized"},
)


def draws(number: int, steps: int) -> dict[str, Any]:
    arguments = PROMPT | SMALL | {"steps": steps, "name": "long"}
    return {"id": number, "method": "tools/call", "params": {"name": "draw", "arguments": arguments}}


@mcp_library
@pytest.mark.sample(0)
def test_closed_standard_input_ends_it(folders: dict[str, Path], place: Path) -> None:
    """Nothing but messages is on standard output, whatever a client sends; a picture that is drawn ends first."""
    process = started(folders, place)
    noise = (
        b"not json\n{}\n[1]\n\xff\xfe\n\n"
        + json.dumps({"jsonrpc": "2.0", "id": 9, "method": "no/such"}).encode()
        + b"\n"
    )
    out, err = process.communicate(lines(*HELLO) + noise + lines(draws(2, 900)), timeout=120)
    print(err.decode()[-300:])
    assert process.returncode == 0 and b"Traceback" not in err
    answers = [json.loads(line) for line in out.splitlines()]
    assert answers[0]["result"]["serverInfo"]["name"] == "qwenimg"
    assert not (place / "long.png").exists() and listing(place) == ["cat.png", "sub"]


@mcp_library
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sample(0)
def test_a_signal_ends_it(folders: dict[str, Path], place: Path, number: int, code: int) -> None:
    process = started(folders, place)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(lines(*HELLO, draws(2, 900)))
    process.stdin.flush()
    assert b"serverInfo" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and b"Traceback" not in err and b"stopped by a signal" in err
    assert listing(place) == ["cat.png", "sub"]


def test_the_message_for_the_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("qwenimg.cli.commands.mcp.find_spec", lambda name: None)
    cli("mcp", "--folder", str(tmp_path)).refused(3, "pip install '.[mcp]'")
    assert listing(tmp_path) == []
