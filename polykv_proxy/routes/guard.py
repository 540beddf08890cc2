"""Who may come in: keys, the loopback rule, and no pages from elsewhere.

    keys      data keys open the data plane; the admin key opens everything. Without an admin key, data keys open the
              control plane too. Compared in constant time, against all of them.
    loopback  without any key at all, the control plane answers only peers on this machine that come directly, whichever
              of the proxy's addresses they come to: a request that a reverse proxy forwarded is not from this machine.
    pages     and of those only what is addressed to this machine by name: a foreign ``Host`` (DNS rebinding; in an
              absolute target its authority, which counts instead) or ``Origin`` (a page in a browser) is refused.

How it is mounted: the application makes one ``Guard(settings)`` and calls ``guard.check(request, control=...)`` before
anything else is done with a request; it raises ``KeyWrong`` (401) or ``Forbidden`` (403). ``control`` is True for
``/polykv/*`` and for ``/slots`` (which shows prompts), False for what is relayed. Public on the data plane, as in
llama-server: ``GET /health``, ``GET /v1/health``, the files of its web page (which asks for the key itself) and
``OPTIONS``, a browser's preflight. The control plane has no CORS.
"""

import hashlib
import hmac
import re
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from aiohttp import web

from polykv_proxy.config import Settings
from polykv_proxy.errors import Forbidden, KeyWrong

PUBLIC = frozenset({"/health", "/v1/health"})
_PAGE = re.compile(
    r"/(index\.html|sw\.js|workbox-[\w-]+\.js|manifest\.webmanifest|build\.json|_app/[\w./-]+"
    r"|(favicon|apple-touch-icon|apple-splash|pwa|maskable-icon)[\w-]*\.(ico|svg|png))?",
    re.ASCII,
)
_HELP = "set POLYKV_ADMIN_KEY and send it"
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")


class Guard:
    """Pure but for the request it looks at. Keys are only kept as hashes."""

    def __init__(self, settings: Settings):
        admin = settings.admin_key.get_secret_value() if settings.admin_key is not None else None
        self._admin = [_digest(admin)] if admin is not None else []
        self._data = [_digest(key) for key in settings.data_keys]

    @property
    def open(self) -> bool:
        """No key is set at all."""
        return not self._admin and not self._data

    def check(self, request: web.Request, *, control: bool) -> None:
        """Let a request pass.

        Raises:  KeyWrong (401), Forbidden (403)
        """
        if not control:
            public = request.method == "OPTIONS" or (request.method in ("GET", "HEAD") and _is_public(request.path))
            if self._data and not public and not self._holds(request, self._data + self._admin):
                raise KeyWrong("a valid API key is needed: Authorization: Bearer KEY")
            return
        if self._admin:
            if self._holds(request, self._admin):
                return
            if self._data and self._holds(request, self._data):
                raise Forbidden("this needs the admin key, not a data key")
            raise KeyWrong("the admin key is needed: Authorization: Bearer KEY")
        if self._data:
            if not self._holds(request, self._data):
                raise KeyWrong("a valid API key is needed: Authorization: Bearer KEY")
            return
        self._check_local(request)

    def _holds(self, request: web.Request, keys: list[bytes]) -> bool:
        """Whether the request shows one of the keys. Every key is compared, so the time says nothing."""
        held = False
        for shown in _shown_keys(request):
            digest = _digest(shown)
            for key in keys:
                held |= hmac.compare_digest(digest, key)
        return held

    def _check_local(self, request: web.Request) -> None:
        if not is_loopback_peer(request):
            raise Forbidden("without a key the control plane only answers this machine: set POLYKV_ADMIN_KEY")
        if any(name in request.headers for name in _FORWARDED):
            raise Forbidden("without a key the control plane does not answer forwarded requests: set POLYKV_ADMIN_KEY")
        hosts = request.headers.getall("Host", [])
        if len(hosts) > 1 or (hosts and not _names_this_machine("http://" + hosts[0])):
            raise Forbidden(f"without a key the control plane answers only to a Host of this machine: {_HELP}")
        if not request.raw_path.startswith("/") and not _names_this_machine(_origin_of(request.raw_path)):
            raise Forbidden(f"without a key the control plane answers only to targets of this machine: {_HELP}")
        origins = request.headers.getall("Origin", [])
        if any(not _names_this_machine(origin) for origin in origins):
            raise Forbidden(f"without a key the control plane answers no page of another machine: {_HELP}")
        if request.headers.get("Sec-Fetch-Site", "none").lower() not in ("none", "same-origin", "same-site"):
            raise Forbidden(f"without a key the control plane answers no request of a foreign page: {_HELP}")


def _is_public(path: str) -> bool:
    return path in PUBLIC or (_PAGE.fullmatch(path) is not None and ".." not in path)


def is_loopback_peer(request: web.Request) -> bool:
    """Whether the connection comes from this machine. A UNIX socket does."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if isinstance(peer, str | bytes):
        return True
    return isinstance(peer, tuple) and bool(peer) and _is_loopback(str(peer[0]))


def _shown_keys(request: web.Request) -> list[str]:
    """Keys as clients show them: Bearer, the bare key (llama-server takes it, too), or Anthropic's header."""
    shown = [value.strip() for value in request.headers.getall("X-Api-Key", [])]
    for value in request.headers.getall("Authorization", []):
        scheme, _, key = value.strip().partition(" ")
        shown.append(key.strip() if scheme.lower() == "bearer" else value.strip())
    return [key for key in shown if key][:4]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _names_this_machine(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        return False
    if host is None or parts.username is not None or parts.path not in ("", "/"):
        return False
    return host in ("localhost", "localhost.") or _is_loopback(host)


def _origin_of(target: str) -> str:
    """Scheme and authority of an absolute request target."""
    scheme, separator, rest = target.partition("://")
    return scheme + separator + re.split(r"[/?#\\]", rest, maxsplit=1)[0]


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
