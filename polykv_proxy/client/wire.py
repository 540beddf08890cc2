"""How a call goes over HTTP, apart from sending it: address, keys, what an answer or a failure means, when to repeat.

Repeated is a GET that was answered 429, 502, 503 or 504 or whose connection broke, and any request that certainly never
reached the proxy: at most ``max_retries`` times, after what the server asked to wait (not when that is more than 60 s),
else a growing time; both with jitter, so that not all come back at once.
"""

import ipaddress
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import httpx

from polykv_proxy import __version__
from polykv_proxy.client.asking import Call, StreamCall
from polykv_proxy.client.errors import (
    PolyKVError,
    PolyKVTimeoutError,
    PolyKVUnavailableError,
    error_of,
    retry_after_of,
)

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8090"
DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""A long pool takes minutes to prefill."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=5.0)
MAX_RETRY_AFTER_S = 60.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
JITTER = 0.25
AGAIN = (429, 502, 503, 504)
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Wire:
    """Shared by both clients; knows nothing of either's way to wait."""

    def __init__(
        self,
        base_url: str | None,
        *,
        api_key: str | None,
        admin_key: str | None,
        timeout: float | httpx.Timeout | None,
        max_retries: int,
        u: Callable[[], float] = random.random,
    ):
        given = base_url or os.environ.get("POLYKV_BASE_URL") or os.environ.get("POLYKV_URL") or DEFAULT_URL
        self.base_url = _checked(given)
        self.api_key = api_key or _first(os.environ.get("POLYKV_API_KEY"))
        self.admin_key = admin_key or os.environ.get("POLYKV_ADMIN_KEY") or None
        self.timeout = timeout if timeout is not None else DEFAULT_TIMEOUT
        self.max_retries = max_retries
        self._u = u

    def options(self) -> dict[str, Any]:
        """Of either of httpx's clients."""
        return {
            "base_url": self.base_url,
            "timeout": self.timeout,
            "limits": LIMITS,
            "headers": {"user-agent": f"polykv-client/{__version__}"},
            "trust_env": not _is_this_machine(httpx.URL(self.base_url).host),  # HTTP_PROXY is not for our own loopback
        }

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """Arguments of ``build_request``."""
        key = (self.admin_key or self.api_key) if call.control else (self.api_key or self.admin_key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if isinstance(call, StreamCall):
            headers["accept"] = "text/event-stream"
        url = call.path.lstrip("/")  # beneath the path of base_url, if it has one
        return {"method": call.method, "url": url, "params": dict(call.query), "json": call.body, "headers": headers}

    def pause_s(self, call: Call[Any], outcome: httpx.Response | httpx.HTTPError, attempt: int) -> float | None:
        """None: ``outcome`` is the answer. Else wait for so long and send it again.

        Raises:  PolyKVError when it is an error, and not worth another attempt
        """
        if isinstance(outcome, httpx.Response):
            if outcome.is_success or outcome.status_code in call.also:
                return None
            asked_s = retry_after_of(outcome.headers)
            again = call.idempotent and outcome.status_code in AGAIN and (asked_s or 0.0) <= MAX_RETRY_AFTER_S
            if not again or attempt >= self.max_retries:
                raise error_of(outcome.status_code, outcome.headers, outcome.content, pool_id=call.pool_id)
        else:
            asked_s = None
            lost = isinstance(outcome, httpx.TransportError) and not isinstance(outcome, httpx.TimeoutException)
            again = isinstance(outcome, NOT_SENT) or (call.idempotent and lost)
            if not again or attempt >= self.max_retries:
                raise self.failure(outcome) from outcome
        if asked_s is not None:
            return asked_s * (1.0 + JITTER * self._u())
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * (1.0 - JITTER + 2 * JITTER * self._u())

    def failure(self, error: httpx.HTTPError) -> PolyKVError:
        """What it means that there is no answer."""
        why = str(error) or type(error).__name__
        if isinstance(error, NOT_SENT):
            return PolyKVUnavailableError(
                f"the proxy at {self.base_url} cannot be reached: {why}; start it, or name another with base_url or "
                "POLYKV_BASE_URL",
                code="unreachable",
            )
        if isinstance(error, httpx.TimeoutException):
            said = f"no answer from {self.base_url} within the timeout ({why}); it may have been done all the same"
            return PolyKVTimeoutError(said, code="timeout")
        if isinstance(error, httpx.TransportError):
            said = f"the connection to {self.base_url} broke before the answer was complete: {why}"
            return PolyKVUnavailableError(said, code="incomplete")
        return PolyKVError(f"{self.base_url} sent an answer that cannot be read: {why}", code="unreadable")

    def result(self, call: Call[T], answer: httpx.Response) -> T:
        """Raises PolyKVError when it is not what such an answer looks like."""
        return _read(call.read, answer.content, answer)


class Events(Generic[T]):
    """The events of a streamed answer: bytes in, pieces out.

    Lines end with a line feed, nothing else: JSON may hold other characters that ``splitlines`` takes for ends.
    """

    def __init__(self, call: StreamCall[T], answer: httpx.Response):
        self._call, self._answer = call, answer
        self._rest = b""
        self._failed = False
        self.ended = call.ends is None

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Raises PolyKVError for an error that came as an event."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            value = value.strip()
            if name == b"event":
                self._failed = value == b"error"
            elif name in (b"data", b"error"):  # llama-server's native errors are a field of their own
                yield from self._piece(value, failed=self._failed or name == b"error")

    def _piece(self, value: bytes, *, failed: bool) -> Iterator[T]:
        call = self._call
        if value == b"[DONE]":
            self.ended = self.ended or bool(call.ends and call.ends(None))
            return
        event = _read(lambda body: body, value, self._answer)
        if failed or (isinstance(event, dict) and "error" in event and "choices" not in event):
            whole = value if isinstance(event, dict) and "error" in event else json.dumps({"error": event}).encode()
            raise error_of(None, self._answer.headers, whole, pool_id=call.pool_id)
        self.ended = self.ended or bool(call.ends and call.ends(event))
        yield _read(call.read, value, self._answer)

    def close(self) -> None:
        """The stream is over. Raises PolyKVUnavailableError when the answer was not."""
        if not self.ended:
            headers = self._answer.headers
            raise PolyKVUnavailableError(
                "the answer broke off before its end", code="incomplete", request_id=headers.get("x-request-id")
            )


def _read(read: Callable[[Any], T], content: bytes, answer: httpx.Response) -> T:
    try:
        return read(json.loads(content))
    except (ValueError, KeyError, IndexError, TypeError) as error:  # pydantic's are ValueErrors
        said = content[:200].decode("utf-8", "replace")
        raise PolyKVError(
            f"{answer.url.path} did not answer what was expected; is this the proxy? {said!r} ({error})",
            status_code=answer.status_code,
            code="unreadable",
            request_id=answer.headers.get("x-request-id"),
        ) from error


def _checked(given: str) -> str:
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url {given!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url {given!r} is not like {DEFAULT_URL}")
    return str(url).rstrip("/").removesuffix("/v1")  # as OpenAI clients write it


def _first(keys: str | None) -> str | None:
    """The proxy's own setting of that name may list several."""
    return (keys or "").split(",")[0].strip() or None


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
