"""The contract, sentence by sentence, against the real application in front of the fake engine.

One module per section. Other tests look at how the rooms work; these only look at what a client sees: status, headers,
fields, exit status. ``proxy`` (auto mode), ``explicit`` and ``make_proxy`` are those of the relay's tests.
"""

from typing import Any

import httpx

from tests.relay.conftest import Proxy, explicit, make_proxy, proxy

__all__ = ["RECEIPT", "ask", "error_of", "explicit", "made", "make_proxy", "proxy", "refused"]

RECEIPT = {
    "pool_id",
    "session_id",
    "prefix_n_tokens",
    "cached_n_tokens",
    "miss_reason",
    "session_tps",
    "ctx_used",
    "ctx_total",
    "ctx_headroom_tokens",
    "sessions_remaining",
    "hold_ms",
}


async def ask(proxy: Proxy, prompt: Any, **fields: Any) -> dict[str, Any]:
    """A native completion; its receipt."""
    answer = await proxy.client.post("/completion", json={"prompt": prompt, "n_predict": 2, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return (body[-1] if isinstance(body, list) else body)["polykv"]


async def made(proxy: Proxy, path: str = "/polykv/pools", **body: Any) -> dict[str, Any]:
    """Create (or fork, with ``path``) over HTTP."""
    answer = await proxy.client.post(path, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after checking the shape that every error of ours has."""
    body = answer.json()
    assert body["src"] == "polykv_proxy"
    error = body["error"]
    assert {"message", "type", "code"} <= error.keys()
    assert error["message"]
    assert error["code"].replace("_", "").isalpha()
    assert error["code"].islower()
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    return error


async def refused(proxy: Proxy, method: str, path: str, body: Any = None, **kw: Any) -> tuple[int, str]:
    """(status, code) of a request that must not succeed."""
    answer = await proxy.client.request(method, path, json=body, **kw)
    assert answer.status_code >= 400, answer.text
    return answer.status_code, error_of(answer)["code"]
