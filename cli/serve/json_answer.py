"""A response in JSON."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse


class JsonAnswer(JSONResponse):
    """JSON in ASCII, so that lone surrogates (in names of files in a recipe) can be sent."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
