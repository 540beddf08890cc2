"""Which pages may read what the proxy itself says on the data plane: those that llama-server lets read what it says.

Whom it lets depends on how it was started. A browser asks before it sends anything (the preflight, which is relayed),
so the engine's last word about an origin is known by the time that one of its requests is refused.
"""

from collections import OrderedDict

from aiohttp import web

from polykv_proxy.upstream import UpstreamResponse

ALLOW = "Access-Control-Allow-Origin"
MAX_ORIGINS, MAX_LENGTH = 256, 256

_ALLOWED = web.RequestKey("polykv_cors", dict[str, str])


class Cors:
    """What the engine said of each origin, the last of them."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, str] = OrderedDict()

    def heard(self, request: web.Request, upstream: UpstreamResponse) -> None:
        """The engine's answer to a preflight."""
        origin = request.headers.get("Origin", "")
        if not 0 < len(origin) <= MAX_LENGTH:
            return
        self._said.pop(origin, None)
        said = next((value for name, value in upstream.headers if name.lower() == ALLOW.lower()), "")
        if said and len(said) <= MAX_LENGTH:
            self._said[origin] = said
            if len(self._said) > MAX_ORIGINS:
                self._said.popitem(last=False)

    def note(self, request: web.Request) -> None:
        """Before anything is answered to it."""
        said = self._said.get(request.headers.get("Origin", ""))
        if said is not None:
            request[_ALLOWED] = {ALLOW: said}


def allowed(request: web.Request) -> dict[str, str]:
    """Headers of an answer that the engine did not give."""
    headers: dict[str, str] = request.get(_ALLOWED, {})
    return headers
