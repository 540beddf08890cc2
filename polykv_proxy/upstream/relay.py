"""``EngineRelay``: how a request goes to llama-server as it is, and its reply comes back.

Rules it keeps:
    a POST is never sent twice, except once when connecting itself failed;
    redirects are not followed, bodies are not decompressed, and no reply is held back;
    there is no total timeout on a relayed request: a generation may take hours. Whoever asked may close it.

An idle connection is only used again within 2 s: llama-server closes it after 5, and a POST on a connection that is
just being closed could neither be repeated nor honestly be called failed.
"""

import asyncio
from collections.abc import AsyncIterable

import aiohttp
from yarl import URL

from polykv_proxy.errors import ConnectFailed
from polykv_proxy.upstream.errors import FOREIGN, map_client_error
from polykv_proxy.upstream.headers import RawHeaders, forwardable
from polykv_proxy.upstream.no_content import lenient
from polykv_proxy.upstream.response import UpstreamResponse, asked_for
from polykv_proxy.upstream.short import MAX_BYTES, Limits, ShortPosts

KEEPALIVE_S = 2.0
CONNECT_S = 5.0

LIMITS = Limits(max_line_size=65536, max_field_size=65536, read_bufsize=1 << 20)

Body = bytes | AsyncIterable[bytes] | None


class EngineRelay:
    """One engine, one connection pool. ``close`` it."""

    def __init__(self, base_url: str, api_key: str | None = None):
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._sessions: dict[bool, tuple[aiohttp.ClientSession, ShortPosts | None]] = {}

    async def close(self) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        for session, _ in sessions:
            await session.close()

    def _opened(self, *, own_connections: bool) -> tuple[aiohttp.ClientSession, ShortPosts | None]:
        opened = self._sessions.get(own_connections)
        if opened is None:
            connector = (
                aiohttp.TCPConnector(limit=0, force_close=True)
                if own_connections
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            )
            session = aiohttp.ClientSession(
                connector=lenient(connector),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, connect=None, sock_read=None),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                trust_env=False,
                **LIMITS,
            )
            opened = self._sessions[own_connections] = session, ShortPosts.over(session, self.base_url, LIMITS)
        return opened

    async def open(
        self,
        method: str,
        path_qs: str,
        headers: RawHeaders = (),
        body: Body = None,
        *,
        drop: frozenset[str] = frozenset(),
        streams: bool = False,
    ) -> UpstreamResponse:
        """Send a request as it is and give its reply as soon as the head is there.

        Headers of one hop, the client's key and those in ``drop`` are dropped here, the upstream key is added.
        ``path_qs`` goes out unchanged. ``streams``: the reply will come in chunks, so its connection is its own:
        llama-server hangs up after every chunked reply, although it announces ``keep-alive``, and the next POST on it
        would meet a closed door.

        Raises:  UpstreamUnavailable (503), UpstreamTimeout (504), UpstreamError (502)
        """
        sent = forwardable(headers, drop)
        if self._api_key is not None:
            sent.append(("Authorization", f"Bearer {self._api_key}"))
        try:
            return await self._request(method, path_qs, sent, body, streams=streams)
        except ConnectFailed:
            if body is not None and not isinstance(body, bytes):
                raise  # a stream that may have been touched
        await asyncio.sleep(0.05)
        return await self._request(method, path_qs, sent, body, streams=streams)

    async def _request(
        self, method: str, path_qs: str, headers: list[tuple[str, str]], body: Body, *, streams: bool
    ) -> UpstreamResponse:
        session, posts = self._opened(own_connections=streams)
        try:
            if posts is not None and method == "POST" and isinstance(body, bytes) and 0 < len(body) <= MAX_BYTES:
                return UpstreamResponse(await posts.send(path_qs, headers, body), method, path_qs)
            response = await session.request(
                method, self._url(path_qs), headers=headers, data=body, allow_redirects=False
            )
        except FOREIGN as e:
            raise map_client_error(e, asked_for(method, path_qs)) from e
        if "Transfer-Encoding" in response.headers and response.connection is not None:
            protocol = response.connection.protocol
            if protocol is not None:
                protocol.force_close()  # see ``open``: also for a stream that nobody foresaw
        return UpstreamResponse(response, method, path_qs)

    def _url(self, path_qs: str) -> URL:
        """``*``, the server itself, is no path of any URL: it goes out as it is."""
        if path_qs != "*":
            return URL(self.base_url + path_qs, encoded=True)
        base = URL(self.base_url, encoded=True)
        return URL.build(scheme=base.scheme, host=base.raw_host or "", port=base.port, path=path_qs, encoded=True)
