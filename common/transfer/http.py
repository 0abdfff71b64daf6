"""GET requests to a hub: redirects, proxies, certificates, stalls, and retries.

Redirects are followed here and not by urllib, which would send the token to the next host. A connection that is
refused, cut, silent or too slow raises `Interrupted`, and `persist` tries again a few times.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import string
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, TypeVar
from urllib.error import URLError
from urllib.parse import quote, urljoin, urlsplit

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import CHUNK
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.base.version import __version__

RETRIES = 6  # in a row; a connection that brought much resets the count
BACKOFF = 1.0  # seconds before the first retry; each further one waits twice as long
MAX_WAIT = 300.0  # the most seconds to wait when a server asks for it
TIMEOUT = 30.0  # seconds to connect and answer, and the period over which SLOW is measured
SLOW = 1024  # bytes per second
REDIRECTS = 10
MAX_JSON = 16 << 20  # bytes

_HOST = re.compile(
    r"(?=.{1,253}\Z)([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?|(?=[^:]*:)[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9]{1,16})?"
)

HUB = "https://huggingface.co"
"""The hub itself, where terms are accepted, whatever HF_ENDPOINT is."""
TOKENS = f"{HUB}/settings/tokens"
_REPO_OF = re.compile(r"/(?:api/models/)?([\w.-]+/[\w.-]+)/(?:resolve|revision)/", re.ASCII)

Echo = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A hub, and the token that no other server may see."""

    endpoint: str
    token: str | None = field(default=None, repr=False)

    def owns(self, url: str) -> bool:
        """Return whether `url` is on the hub itself: same scheme, host and port."""
        here, there = urlsplit(self.endpoint), urlsplit(url)
        return (here.scheme, here.netloc.lower()) == (there.scheme, there.netloc.lower())


def check_endpoint(endpoint: str) -> None:
    """Raise UsageError for an address that no request can be made to."""
    fault = address_fault(endpoint)
    if fault is None and ("?" in endpoint or "#" in endpoint):
        fault = "has a query"
    if fault is not None:  # not shown: it may hold a password
        raise UsageError(f"HF_ENDPOINT {fault}; give an address such as https://huggingface.co, or unset it")


def connect(endpoint: str, token: str | None) -> Server:
    """Return the hub at `endpoint`. Raises UsageError for an address or a token that no request can be made with."""
    check_endpoint(endpoint)
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError("HF_TOKEN, or the file of the token, holds what no token holds: copy it again, or unset it")
    return Server(endpoint=endpoint.rstrip("/"), token=token)


def address_fault(url: str) -> str | None:
    """Return the reason why no request can be made to `url`, or None."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is no address"
    if parts.scheme not in ("http", "https"):
        return "begins with neither http:// nor https://"
    if not parts.hostname or port == 0 or not (url.isascii() and url.isprintable() and " " not in url):
        return "is no address"
    if "@" in parts.netloc:
        return "holds a user name"
    return None if _HOST.fullmatch(parts.hostname) else "is no address"


class Interrupted(Exception):
    """A failure worth another try, after `wait` seconds. `moved`: much data had come, so the count of failures
    restarts."""

    def __init__(self, reason: str, *, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait, self.moved = wait, False


def get_json(server: Server, url: str, what: str, echo: Echo) -> object:
    """Get the JSON at `url`. `what`: its subject, for errors. Raises ModelError."""

    def attempt() -> bytes:
        response, _ = open_url(server, url, what)
        with closing(response):
            body = b"".join(pieces(response, MAX_JSON + 1))
            length = number(response.headers.get("Content-Length"))
        if len(body) > MAX_JSON:
            raise ModelError(f"{what}: the server's answer has more than {MAX_JSON:,} bytes")
        if length is not None and len(body) < length:
            raise Interrupted("the answer was cut")
        return body

    raw = persist(attempt, what, echo, retries=min(RETRIES, 2))
    return strict_json(raw, f"{server.endpoint}: {what}", depth=32, values=1_000_000)


def persist(attempt: Callable[[], T], what: str, echo: Echo, *, retries: int | None = None) -> T:
    """Call `attempt`, and again after a while on Interrupted. Raises ModelError after too many failures in a row."""
    failures = 0
    most = RETRIES if retries is None else retries
    while True:
        try:
            return attempt()
        except Interrupted as error:
            failures = 1 if error.moved else failures + 1
            if failures > most:
                raise ModelError(f"{what}: {error}, {failures} times in a row; pull again goes on from here") from None
            wait = max(BACKOFF * 2 ** (failures - 1), min(error.wait, MAX_WAIT))
            echo(f"{what}: {error}; trying again in {wait:.3g} s")
            time.sleep(wait)


class _AsIs(urllib.request.HTTPErrorProcessor):
    """A processor that returns redirects and errors as responses."""

    def http_response(self, request: object, response: Any) -> Any:
        return response

    https_response = http_response


def open_url(
    server: Server, url: str, what: str, *, first: int | None = None
) -> tuple[http.client.HTTPResponse, str | None]:
    """Open `url` and follow redirects. Return the response, from byte `first` on if the server supports it, and the
    hub's etag of the file, or None. Raises Interrupted, and ModelError for a failure that another try would not
    change."""
    # A range is requested even from byte 0: hubs refuse to send very large files otherwise.
    headers = {} if first is None else {"Range": f"bytes={first}-"}
    etag = None
    for _ in range(REDIRECTS):
        response = _request(server, url, headers)
        if server.owns(url):  # etags of another host say nothing about the bytes
            etag = response.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"') or etag
        if response.status in (200, 206):
            return response, etag
        response.close()
        if response.status in (301, 302, 303, 307, 308):
            url = _next(url, response.headers.get("Location"), what)
        elif response.status == 416 and headers:
            headers = {}
        else:
            _refuse(response, what, url, on_hub=server.owns(url))
    raise ModelError(f"{what}: the server redirects more than {REDIRECTS} times")


def _request(server: Server, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    headers = headers | {"User-Agent": f"qwenimg/{__version__}", "Accept-Encoding": "identity"}
    if server.token and server.owns(url):
        headers["Authorization"] = f"Bearer {server.token}"
    host = clean(urlsplit(url).hostname, 60)
    try:
        response = _opener().open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise ModelError(
                f"{host}: its certificate cannot be verified; set SSL_CERT_FILE to the right ones"
            ) from None
        if isinstance(reason, (str, ValueError, http.client.InvalidURL)) and not isinstance(reason, OSError):
            raise ModelError(f"{host}: cannot be asked ({clean(reason, 80)}): check the proxy settings") from None
        raise Interrupted(f"no answer from {host}: {_reason(reason)}") from None
    assert isinstance(response, http.client.HTTPResponse), response
    return response


class _Timely(http.client.HTTPResponse):
    """A response whose whole head must come within TIMEOUT; the socket's own limit is for each byte."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._socket = sock

    def begin(self) -> None:
        late = threading.Timer(TIMEOUT, self._give_up)
        late.daemon = True
        late.start()
        try:
            super().begin()
        finally:
            late.cancel()
            del self._socket  # only the body keeps it open

    def _give_up(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the head has just come
            self._socket.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    response_class = _Timely


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Timely


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Connection, request)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._verified = context

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnection, request, context=self._verified)


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Return an opener with the proxies of the environment, and certifi's certificates if Python has none."""
    paths = ssl.get_default_verify_paths()
    bundle = None
    if not paths.cafile and not paths.capath:
        with contextlib.suppress(ImportError):
            import certifi

            bundle = certifi.where()
    context = ssl.create_default_context(cafile=bundle)
    return urllib.request.build_opener(_AsIs, _Plain, _Secure(context))


def pieces(response: http.client.HTTPResponse, count: int) -> Iterator[bytes]:
    """Yield at most `count` bytes of the body, as they come. Raises Interrupted."""
    since, brought = time.monotonic(), 0
    while count > 0:
        try:
            piece = response.read1(min(CHUNK, count))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Interrupted(f"the connection broke: {_reason(error)}") from None
        if not piece:
            return
        yield piece
        count, brought = count - len(piece), brought + len(piece)
        if (seconds := time.monotonic() - since) > TIMEOUT:
            if brought < SLOW * seconds:
                raise Interrupted(f"too slow: {brought / seconds:.0f} bytes per second")
            since, brought = time.monotonic(), 0


def _next(url: str, location: str | None, what: str) -> str:
    """Return the address of a redirect: HTTP or HTTPS, and never from HTTPS to HTTP. Raises ModelError."""
    try:
        target = quote(urljoin(url, location or ""), safe=string.punctuation, encoding="latin-1")
        fault = address_fault(target)
    except ValueError:
        fault = "is no address"
    if not location or fault or (urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https"):
        raise ModelError(f"{what}: the server redirects to '{clean(location, 80)}', which is not followed")
    return target


def _refuse(response: http.client.HTTPResponse, what: str, url: str, *, on_hub: bool) -> NoReturn:
    status, wait = response.status, number(response.headers.get("Retry-After"))
    # Links to the host of the data expire; the hub gives a new one.
    if status in (408, 429) or status >= 500 or (status in (400, 401, 403) and not on_hub):
        raise Interrupted(f"HTTP {status} {clean(response.reason, 40)}".rstrip(), wait=float(wait or 0))
    if status == 403 or response.headers.get("X-Error-Code") == "GatedRepo":
        raise ModelError(f"{what}: {not_granted(url)}")
    if status == 401:
        raise ModelError(f"{what}: does not exist or is private: check the name, or set HF_TOKEN")
    if status in (404, 410):
        raise ModelError(f"{what}: is not on the hub (HTTP {status}): check the name and HF_ENDPOINT")
    raise ModelError(f"{what}: the server answers HTTP {status} {clean(response.reason, 40)}")


def not_granted(url: str) -> str:
    """Return the advice for a model whose license must be accepted first, by an address of one of its files."""
    match = _REPO_OF.search(urlsplit(url).path)
    page = f"at {HUB}/{match[1]}" if match else "on its page of the hub"
    return f"access is not granted: accept its terms {page}, and set HF_TOKEN to a token of that account ({TOKENS})"


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing for {TIMEOUT:g} s"
    return clean(getattr(error, "strerror", None) or error or type(error).__name__, 80)


def number(text: str | None) -> int | None:
    """Return the number in a header; None without one."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None
