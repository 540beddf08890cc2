"""The control plane as ``polykvctl`` speaks it: synchronous, one connection, errors that know their exit status.

Exit status: 1 the server answered an error, 2 the URL or key cannot be used, 3 the proxy cannot be reached.
"""

import ipaddress
import json
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import quote

import httpx

_CONNECT_S = 5.0
_NEXT = {
    "pool_not_found": "`polykvctl pools ls` shows what is there",
    "session_not_found": "`polykvctl sessions` shows who is there",
    "pool_has_children": "--recursive releases what is below it too",
    "upstream_unavailable": "is the llama-server of --upstream running? `polykvctl doctor` tells its URL",
}
"""What to do next, by the code of the error."""


class ControlProblem(Exception):
    """Why a command ends without its result. The message is one line for a person."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class ServerRefused(ControlProblem):
    """The server answered an error. ``body`` is its JSON, if it was JSON."""

    def __init__(self, message: str, *, status: int, body: Any = None):
        super().__init__(message)
        self.status = status
        self.body = body


class WrongUsage(ControlProblem):
    exit_code = 2


class Unreachable(ControlProblem):
    exit_code = 3


class ControlClient:
    """``with ControlClient(url, admin_key) as control: control.get("/polykv/pools")``

    No read timeout: making a long pool resident may take minutes. A request is sent once, never repeated.
    """

    def __init__(self, url: str, admin_key: str | None = None):
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        try:
            base = httpx.URL(self.url)
            if base.scheme not in ("http", "https") or not base.host or not 0 < (base.port or 80) < 65536:
                raise WrongUsage(f"--url {url!r} is not like http://127.0.0.1:8090")
            self._http = httpx.Client(
                base_url=base,
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                trust_env=not _is_this_machine(base.host),  # HTTP_PROXY is not for our own loopback
            )
        except httpx.InvalidURL as error:
            raise WrongUsage(f"--url {url!r}: {error}") from None
        except UnicodeEncodeError:
            raise WrongUsage("--admin-key has a character that no HTTP header can carry") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self._ask("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path)

    def events(self, path: str) -> Iterator[Any]:
        """What the events of a stream say, until it ends."""
        try:
            with self._http.stream("GET", path, headers={"accept": "text/event-stream"}) as answer:
                if not answer.is_success or not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    answer.read()
                    raise self._refused(answer)
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line.removeprefix("data:"))
        except httpx.TransportError as error:
            raise Unreachable(_not_reached(self.url, error)) from None

    def _ask(self, verb: str, path: str, body: Any = None) -> Any:
        try:
            answer = self._http.request(verb, path, json=body)
        except httpx.TransportError as error:
            raise Unreachable(_not_reached(self.url, error)) from None
        except httpx.DecodingError as error:
            raise ServerRefused(f"{self.url} sent an answer that cannot be read: {error}", status=0) from None
        parsed = _parsed(answer)
        if answer.is_success and parsed is not None:
            return parsed
        raise self._refused(answer)

    def _refused(self, answer: httpx.Response) -> ServerRefused:
        parsed = _parsed(answer)
        line = _no_proxy(self.url) if _is_llama_server(answer, parsed) else _complaint(answer, parsed)
        return ServerRefused(line, status=answer.status_code, body=parsed)


def pool_path(ref: str, *more: str) -> str:
    """Build the path of one pool; a name is quoted, so it can not become another path."""
    return "/".join(["/polykv/pools", quote(ref, safe=""), *more])


def _parsed(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _not_reached(url: str, error: httpx.TransportError) -> str:
    reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    line = f"the proxy at {url} cannot be reached: {reason}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        line += "; start it with `make up` or `polykvctl serve`, or name another with --url or POLYKV_URL"
    return line


def _is_llama_server(answer: httpx.Response, parsed: Any) -> bool:
    """Whether the engine answered in the proxy's place. Behind a web server only its words for a wrong path tell."""
    wrong_path = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
    return bool(answer.headers.get("server", "").startswith("llama.cpp") or parsed == wrong_path)


def _no_proxy(url: str) -> str:
    return (
        f"{url} is no PolyKV proxy: a llama-server answers there; the proxy listens on port 8090 by default, "
        "name it with --url or POLYKV_URL"
    )


def _complaint(answer: httpx.Response, parsed: Any) -> str:
    """One line out of the error object of the contract, or what there is instead."""
    status = f"HTTP {answer.status_code}"
    problem = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(problem, dict) or not isinstance(problem.get("message"), str):
        if answer.is_success:
            return f"{answer.url.path} did not answer JSON: is this the proxy?"
        return f"{answer.url.path}: {status} without a reason: is this the proxy?"
    code = problem.get("code")
    line = f"{problem['message']} ({code}, {status})" if isinstance(code, str) else f"{problem['message']} ({status})"
    if answer.status_code == 401:
        line += "; give the key with --admin-key or POLYKV_ADMIN_KEY"
    if code in _NEXT:
        line += f"; {_NEXT[code]}"
    if wait_s := answer.headers.get("retry-after"):
        line += f"; try again in {wait_s} s"
    return line


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
