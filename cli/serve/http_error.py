"""A refusal of a request, with its HTTP status."""

from __future__ import annotations

from qwenimg.common.base.text import short


class HttpError(Exception):
    """A request is refused or has failed."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        after: float | None = None,
    ) -> None:
        """Create an error. kind: OpenAI's type. param: the field that is wrong. after: seconds until another try may
        succeed; without it the same request would fail again."""
        text = short(text)
        super().__init__(text)
        self.status, self.text, self.kind, self.param, self.code, self.after = status, text, kind, param, code, after

    @property
    def headers(self) -> dict[str, str]:
        """The headers by which clients decide whether they try again."""
        if self.after is not None:
            return {"retry-after": str(max(1, min(120, round(self.after))))}
        return {"x-should-retry": "false"}
