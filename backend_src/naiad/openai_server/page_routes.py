"""The routes of the page: `/`, and the files that it loads from `/page/`."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ETag, web

from naiad.openai_server.api.errors import APIError
from naiad.openai_server.route import Route

_FOLDER = Path(__file__).parent / "page"
_INDEX = "index.html"
_UNNEEDED = re.compile(rb"^[ \t]*(?://.*\n|/\*.*\*/\n)?", re.MULTILINE)
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing inline, nothing from another host, and no sink that would make markup of text.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A reload asks whether there is a new version.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page.

    Attributes:
        content: the file.
        packed: the file, compressed with gzip.
        content_type: its media type.
        tag: changes with the content.
    """

    content: bytes
    packed: bytes
    content_type: str
    tag: str


class PageRoutes:
    """Handlers of the page's files, which are read once."""

    def __init__(self) -> None:
        """Read the files."""
        self._assets = {path.name: _read(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route(
                method="GET",
                path="/",
                handler=self.index,
                summary="The page: chat with every model, and watch the engine work.",
                media_type="text/html",
            ),
            Route(
                method="GET",
                path="/page/{name}",
                handler=self.asset,
                summary="A file that the page loads.",
                media_type="*/*",
            ),
        ]

    async def index(self, request: web.Request) -> web.Response:
        """Answer `GET /`."""
        return _answer(request, self._assets[_INDEX])

    async def asset(self, request: web.Request) -> web.Response:
        """Answer `GET /page/{name}`."""
        name = request.match_info["name"]
        if name not in self._assets:
            raise APIError(404, f"The page has no file {name[:80]!r}.")
        return _answer(request, self._assets[name])


def _read(path: Path) -> Asset:
    # Browsers need neither indentation nor lines that are only a comment: a tenth of all.
    content = _UNNEEDED.sub(b"", path.read_bytes())
    tag = hashlib.sha256(content).hexdigest()[:32]
    return Asset(content, gzip.compress(content, mtime=0), _TYPES[path.suffix], tag)


def _answer(request: web.Request, asset: Asset) -> web.Response:
    if any(each.value in (asset.tag, "*") for each in request.if_none_match or ()):
        response = web.Response(status=304, headers=_HEADERS)
    else:
        is_packed = "gzip" in request.headers.get("Accept-Encoding", "")
        body = asset.packed if is_packed else asset.content
        response = web.Response(body=body, content_type=asset.content_type, charset="utf-8", headers=_HEADERS)
        if is_packed:
            response.headers["Content-Encoding"] = "gzip"
    # Weak: the same file may come compressed or not.
    response.etag = ETag(asset.tag, is_weak=True)
    return response
