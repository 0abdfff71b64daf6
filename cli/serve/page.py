"""The page for browsers: one file. Its Content-Security-Policy allows its script and style by their hashes."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

_TAGS = ("script", "style")


class Page:
    """The route of the page."""

    def __init__(self) -> None:
        self.data = file().read_bytes()
        self.policy = policy(self.data.decode())

    def routes(self) -> list[Route]:
        return [Route("/", self.page, methods=["GET"])]

    async def page(self, request: HttpRequest) -> Response:
        """Send the page."""
        headers = {"content-security-policy": self.policy, "cross-origin-opener-policy": "same-origin"}
        return Response(self.data, media_type="text/html; charset=utf-8", headers=headers)


def file() -> Path:
    """Return the file of the page."""
    return Path(__file__).with_name("page.html")


def policy(html: str) -> str:
    """Return the Content-Security-Policy of the page: only its own script and style run, it connects to this server
    only, cannot be framed, and makes no markup from text."""
    allowed = {tag: " ".join(map(_hash, re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL))) for tag in _TAGS}
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
