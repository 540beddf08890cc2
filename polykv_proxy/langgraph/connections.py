"""HTTP of a chat model: nothing of it belongs to one event loop, and nothing is read from the environment.

openai's asynchronous client keeps connections of the event loop that opened them, and fails in the next one. Here each
loop has a transport of its own and a connection ends with its request, so there is nothing to close either. A request
takes much longer than the connection before it.
"""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import openai

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.client.wire import Wire

ONCE = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class EachLoop(httpx.AsyncBaseTransport):
    """Passes requests to the transport of the running event loop, made by ``make`` when it is first used there."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]):
        self._make = make
        self._of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncBaseTransport]
        self._of = weakref.WeakKeyDictionary()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        transport = self._of.get(loop)
        if transport is None:
            transport = self._of[loop] = self._make()
        return await transport.handle_async_request(request)


def sync_transport(base_url: str) -> httpx.BaseTransport:
    return httpx.HTTPTransport(verify=_is_tls(base_url), limits=ONCE)


def async_transport(base_url: str) -> httpx.AsyncBaseTransport:
    return EachLoop(lambda: httpx.AsyncHTTPTransport(verify=_is_tls(base_url), limits=ONCE))


def make_clients(
    root_url: str,
    *,
    http: httpx.Client | None,
    async_http: httpx.AsyncClient | None,
    **options: Any,
) -> tuple[openai.OpenAI, openai.AsyncOpenAI]:
    """Make openai's clients of the proxy at ``root_url``; ``options`` are theirs. They show no organization or project:
    the user's ``OPENAI_ORG_ID`` is no business of this server.
    """
    base_url = f"{root_url}/v1"
    http = http or httpx.Client(transport=sync_transport(root_url), trust_env=False, follow_redirects=True)
    async_http = async_http or httpx.AsyncClient(
        transport=async_transport(root_url), trust_env=False, follow_redirects=True
    )
    # openai takes clients of httpx and of its successor; its annotations name the latter only.
    sync = openai.OpenAI(base_url=base_url, http_client=http, **options)  # type: ignore[arg-type]
    asynchronous = openai.AsyncOpenAI(base_url=base_url, http_client=async_http, **options)  # type: ignore[arg-type]
    for made in (sync, asynchronous):
        made.organization = made.project = None
    return sync, asynchronous


def make_sdks(root_url: str, api_key: str | None) -> tuple[PolyKVClient, AsyncPolyKVClient]:
    """Make the SDK's clients of the same proxy: for the pacer, and for what is no generation."""
    return (
        PolyKVClient(root_url, api_key=api_key, transport=sync_transport(root_url)),
        AsyncPolyKVClient(root_url, api_key=api_key, transport=async_transport(root_url)),
    )


def root_url(given: str | None) -> str:
    """The proxy's address without ``/v1``: the one given, or the environment's. Raises ValueError."""
    return Wire(given, api_key=None, admin_key=None, timeout=None, max_retries=0).base_url


def _is_tls(base_url: str) -> bool:
    """Without TLS its certificates need not be read, which takes longer than all the rest."""
    return base_url.startswith("https:")
