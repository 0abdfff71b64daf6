"""The command `serve`: draw for programs and browsers, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from qwenimg.cli import places, streams
from qwenimg.cli.client_folder import Folder
from qwenimg.cli.options import FILE, Number
from qwenimg.cli.signals import Stop
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean, shown_path

MAX_TOKEN = 4096  # bytes of the file
MIN_TOKEN = 16  # characters
_NEEDED = ("starlette", "uvicorn", "python_multipart", "prometheus_client")


@click.command("serve")
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="The address to listen on; default 127.0.0.1. Others need --token-file.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7860,
    metavar="N",
    help="The port; default 7860, 0 takes a free one.",
)
@click.option(
    "--host-name", "host_names", multiple=True, metavar="NAME", help="Also accept requests to this host name."
)
@click.option("--token-file", type=FILE, metavar="FILE", help="Serve only clients that send the token in FILE.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FOLDER",
    help="The folder of the gallery and its jobs; default one in your home.",
)
@click.option(
    "--queue", type=click.IntRange(1, 10_000), default=16, metavar="N", help="How many requests may wait; default 16."
)
@click.option(
    "--deadline",
    type=Number(0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    help="The longest time for a request; default 600.",
)
@click.option(
    "--served-name",
    "served_names",
    multiple=True,
    metavar="NAME",
    help="A further name for the first model, such as dall-e-2.",
)
@click.option("--lora", "loras", multiple=True, metavar="FILE", help="A LoRA that requests may use.")
@click.option(
    "--training",
    type=FILE,
    metavar="FOLDER",
    help="Train LoRAs for requests: their pictures are in folders of FOLDER, and the LoRAs too.",
)
@click.option(
    "--control", "controls", multiple=True, metavar="NETWORK", help="A control network that requests may use."
)
@click.option(
    "--with",
    "rewrite_with",
    metavar="FOLDER|FILE",
    help="The language model that writes texts, in place of the models' text encoders.",
)
@places.declared("model", multiple=True, help="A model to serve; repeat it for more. One is in memory at a time.")
@places.declared("backend", multiple=True, help="The backend; repeat it for more workers, such as cuda:0 and cuda:1.")
@places.declared(*places.OF_WORKERS, "cache_prompts", "offline")
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    host: str,
    port: int,
    host_names: tuple[str, ...],
    token_file: Path | None,
    output: Path | None,
    queue: int,
    deadline: float,
    served_names: tuple[str, ...],
    loras: tuple[str, ...],
    controls: tuple[str, ...],
    training: Path | None,
    **given: Any,
) -> int:
    """Draw for programs and browsers, over HTTP: OpenAI's images API, AUTOMATIC1111's, and jobs with a gallery.

    It prints its address, and on standard error when it is ready. Ctrl-C or SIGTERM stops it once what is being drawn
    is done."""
    for package in _NEEDED:
        if find_spec(package) is None:
            raise BackendMissing(f"serve needs {package}; in the clone of qwenimg: pip install '.[serve]'")
    from qwenimg.cli.serve import app
    from qwenimg.cli.serve.offered import Offer, search_in_process
    from qwenimg.cli.serve.settings import Settings

    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    token = "" if token_file is None else _token(token_file)
    _check_public(host, token)
    backends = given.pop("backend") or ("auto",)
    names = given.pop("model") or (None,)
    if training is not None and not is_folder(training):
        raise UsageError(f"{clean(training)}: no folder; --training names the one with the folders of pictures")
    folder = "" if training is None else str(Folder(training).path)
    options = places.pop_opening(given)
    offered = search_in_process(Offer(names=names, options=options, loras=loras, controls=controls, training=folder))
    models = offered.models
    taken = {*models} & {*served_names}
    if taken:
        raise UsageError(f"--served-name {clean(taken.pop(), 60)}: is the name of a served model already")
    settings = Settings(
        models=models,
        loras=offered.loras,
        controls=offered.controls,
        adapters=offered.adapters,
        upscalers=offered.upscalers,
        embeddings=offered.embeddings,
        embedding_sizes=offered.embedding_sizes,
        training=folder,
        aliases=dict.fromkeys(served_names, next(iter(models))),
        backends=tuple(backends),
        hosts=_hosts(host, host_names),
        token=token,
        queue=queue,
        deadline=deadline,
    )
    with contextlib.closing(_listener(host, port)) as listener:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}"
        streams.put(f"{address}\n".encode())
        streams.say(f"qwenimg: {', '.join(models)}; loading, then ready; Ctrl-C stops it")
        gallery = _gallery() if output is None else output.absolute()
        code, text = asyncio.run(app.serve(settings, gallery, listener, _say, stop.serving))
    if code:
        streams.say(f"qwenimg: error: {text}")
    return code


def _say(text: str) -> None:
    streams.say(f"qwenimg: {text}")


def _gallery() -> Path:
    from platformdirs import user_data_path

    return user_data_path("qwenimg", appauthor=False) / "gallery"


def _token(file: Path) -> str:
    """Read the token in `file`."""
    from qwenimg.common.base.errors import ModelError
    from qwenimg.common.base.safe_files import open_regular

    try:
        with contextlib.closing(open_regular(file)) as opened:
            raw = opened.read(0, min(opened.size, MAX_TOKEN + 1))
    except ModelError as error:
        raise UsageError(str(error)) from None
    text = raw.decode("ascii", "replace").strip()
    if len(raw) > MAX_TOKEN or len(text) < MIN_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"{shown_path(file)}: a token is one line of at least {MIN_TOKEN} printable ASCII characters")
    return text


def _check_public(host: str, token: str) -> None:
    """Raise UsageError for a public address without a token."""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local and not token:
        raise UsageError(f"--host {clean(host, 60)}: others could use this server; give --token-file FILE too")


def _hosts(host: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return the values of the header Host that are accepted besides those of this machine."""
    bound = () if host in ("0.0.0.0", "::") else (f"[{host}]" if ":" in host else host,)
    return frozenset(name.lower() for name in (*bound, *names))


def _listener(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # from here on clients wait for the server, and are not refused
    except OSError as error:
        reason = clean(error.strerror or error, 80)
        raise UsageError(f"--host {clean(host, 60)} --port {port}: {reason}; give another --port") from None
    return listener
