"""``UpstreamResponse``: a relayed reply, byte for byte."""

from typing import Self

import aiohttp

from polykv_proxy.upstream.errors import FOREIGN, map_client_error
from polykv_proxy.upstream.headers import returnable, text_of
from polykv_proxy.upstream.short import ShortReply


def asked_for(method: str, path_qs: str) -> str:
    """How a request is called in errors: what a query says is nobody's business."""
    return f"{method} {path_qs.partition('?')[0]}"


class UpstreamResponse:
    """A reply of which only the head was read. Read it to the end, or ``close`` it: the engine then stops working."""

    def __init__(self, response: aiohttp.ClientResponse | ShortReply, method: str, path_qs: str):
        self._response = response
        self._method, self._path_qs = method, path_qs
        self.status = response.status
        self.reason = response.reason or ""

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(k.decode("latin-1"), text_of(v)) for k, v in self._response.raw_headers]

    @property
    def content_type(self) -> str:
        return self._response.headers.get("Content-Type", "")

    def returnable_headers(self) -> list[tuple[str, str]]:
        return returnable(self._response.raw_headers)

    async def read_piece(self) -> bytes:
        """Give the next piece of the body as it came, b"" at the end.

        Raises:  UpstreamUnavailable when it breaks off
        """
        try:
            return await self._response.content.readany()
        except FOREIGN as e:
            raise map_client_error(e, asked_for(self._method, self._path_qs)) from e

    def read_at_once(self) -> bytes | None:
        """Give what is left of the body when all of it has come, without waiting; None when more may come."""
        content = self._response.content
        if not content.is_eof() or content.exception() is not None:
            return None
        return content.read_nowait()

    async def read(self) -> bytes:
        """Give the whole body."""
        try:
            return await self._response.content.read()
        except FOREIGN as e:
            raise map_client_error(e, asked_for(self._method, self._path_qs)) from e

    def close(self) -> None:
        """Close the connection at once, unless everything was read."""
        self._response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
