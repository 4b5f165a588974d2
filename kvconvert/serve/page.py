"""The page at `/`: one file that talks to the server it came from, and what it tells about the bundle."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from starlette.responses import HTMLResponse, Response

from kvconvert.cache import ModelCache


@dataclass(frozen=True)
class BundleFacts:
    """What is told of a bundle.

    Attributes:
        rows: names and texts.
        cache: of its quantized layers; None where none is quantized.
    """

    rows: tuple[tuple[str, str], ...] = ()
    cache: ModelCache | None = None

    @classmethod
    def of(cls, bundle: str, config: Any) -> BundleFacts:
        """Those of a bundle that was loaded.

        Args:
            bundle: its directory or its id on the Hub.
            config: the configuration of its model.
        """
        from kvconvert.bundle.describe import describe, kv_cache
        from kvconvert.bundle.locate import locate
        from kvconvert.bundle.reader import open_bundle
        from kvconvert.models.configuration import context_length, sliding_windows

        manifest = open_bundle(locate(bundle), verify="headers").manifest
        windows = sliding_windows(config) if any(manifest.schemes()) else []
        found = describe(manifest, windows, context_length(config))
        cache = kv_cache(manifest, windows)
        rows = (*found.facts, ("weights", found.weights), ("cache", found.cache))
        return cls(rows, cache if cache.layers else None)

    def at(self, tokens: int) -> dict[str, float] | None:
        """Bytes of the cache of so many tokens, and what 16 bits would take."""
        if self.cache is None or tokens < 1:
            return None
        return {"bytes": self.cache.exact_bytes(tokens), "plain_bytes": self.cache.plain_bytes(tokens)}


def page() -> Response:
    """The page, whose policy allows its own script and style, and requests to its own server."""
    text = resources.files("kvconvert.serve").joinpath("page.html").read_text(encoding="utf8")
    allowed = {}
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        allowed[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
