"""An answer in JSON."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse


class JsonAnswer(JSONResponse):
    """JSON in ASCII: a text with half of a surrogate pair, such as the name of a file in a recipe, can be sent too."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
