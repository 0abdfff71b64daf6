"""When httpx2 gives up a server that sends a byte every half second, and when `pull` does: both with a limit of 2 s.

python tools/measure_http_client.py

huggingface_hub brings httpx2 (before 2.0: httpx). Its limits are for each read, so a trickle never ends them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import httpx2

from qwenimg.common.transfer import http

LIMIT, PAUSE, PATIENCE = 2.0, 0.5, 15.0  # seconds
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


def trickling(at_once: bytes) -> str:
    """Start a server that sends `at_once` and then a byte every PAUSE. Return its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        try:
            connection.sendall(at_once)
            for byte in (HEAD + bytes(1000))[len(at_once) :]:
                time.sleep(PAUSE)
                connection.sendall(bytes([byte]))
        except OSError:
            return

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def by_httpx(address: str) -> None:
    """Read the answer with httpx2."""
    with httpx2.stream("GET", address, timeout=LIMIT, trust_env=False) as response:
        response.read()


def by_pull(address: str) -> None:
    """Read the answer with the client of `pull`, once."""
    response, _ = http.open_url(http.connect(address, None), address, "a file")
    list(http.pieces(response, 1000))


def seconds(call: Callable[[str], None], address: str) -> str:
    """Return when `call` ends, in words; it is left alone after PATIENCE."""
    ended: list[str] = []

    def run() -> None:
        try:
            call(address)
        except Exception as error:
            ended.append(f"{time.monotonic() - begun:.1f} s, {type(error).__name__}: {error}")

    begun = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return ended[0] if ended else f"still waiting after {PATIENCE:.0f} s"


def main() -> None:
    """Print a line for each client and each part of an answer."""
    http.TIMEOUT = LIMIT
    for part, at_once in (("head", b""), ("body", HEAD)):
        for name, call in (("httpx2", by_httpx), ("pull", by_pull)):
            print(f"{part}, {name}: {seconds(call, trickling(at_once))}")


if __name__ == "__main__":
    main()
