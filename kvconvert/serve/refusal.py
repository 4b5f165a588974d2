"""What a client is told when its request is not served, in the form of OpenAI's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import JSONResponse

from kvconvert.errors import KvconvertError, QueueFullError, UsageError, printable

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
MOST_LETTERS = 1000
_LATER = {429: "1", 503: "5"}  # seconds after which a client may come again


class Refusal(Exception):
    """A request that is not served.

    Attributes:
        status: of the HTTP response.
        message: one sentence; what a client sent is cut in it, and its control characters are escaped.
        param: the field concerned.
        code: by which programs tell refusals apart.
        headers: further headers of the HTTP response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.headers = dict(headers or {})
        self.status, self.message, self.code = status, printable(message[:MOST_LETTERS]), code
        self.param = param if param is None else printable(param[:MOST_LETTERS])

    def body(self) -> dict[str, dict[str, str | None]]:
        """As JSON."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response; `Retry-After` where the same request may succeed later."""
        headers = dict(self.headers)
        if self.status in _LATER:
            headers["Retry-After"] = _LATER[self.status]
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def refusal_of(error: KvconvertError | ValidationError) -> Refusal:
    """The refusal of a request that the Engine, the tokenizer or the body's model does not take."""
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), code="queue_full")
    if isinstance(error, KvconvertError):
        if not isinstance(error, UsageError):
            return Refusal(500, str(error))
        named = re.match(r"`(\w+)` ", str(error))  # an argument of the Engine's, which is called as the field is
        return Refusal(400, str(error), param=named and named[1])
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ").replace(" after validation", "").rstrip(".")
    if first["type"] == "model_type":  # which names a class
        message = "Input should be an object"
    # Of what may have several forms, the first of them is named as well.
    where = ".".join(f"{name!s:.100}" for name in first["loc"] if "[" not in str(name))
    code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
    param = str(first["loc"][0]) if where else None
    return Refusal(400, f"{where}: {message}." if where else f"{message}.", param=param, code=code)
