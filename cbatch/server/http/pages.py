"""The live page's files. They are public, since they contain no data. The page asks for an API key
if the server requires one."""

from __future__ import annotations

from pathlib import Path

from litestar import Response as HttpResponse
from litestar import get
from litestar.handlers import HTTPRouteHandler

_FOLDER = Path(__file__).parent / "page"
_FILES = {  # litestar adds the charset
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in ("page.js", "draw.js", "slots.js")},
}
PAGE_PATHS = tuple(_FILES)
# Only this server's own resources, no inline script or style, no framing by other pages.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[HTTPRouteHandler]:
    return [_route(path, *about) for path, about in _FILES.items()]


def _route(path: str, name: str, media_type: str) -> HTTPRouteHandler:
    content = (_FOLDER / name).read_bytes()

    @get(path)
    async def page_file() -> HttpResponse[bytes]:
        return HttpResponse(content, media_type=media_type, headers=_HEADERS)

    return page_file
