"""A real llama-server, asked directly and through the proxy: the same bytes, but for what any two runs differ in.

Raw sockets on both sides. Left out of the comparison: times, ids, slots, ``x-request-id``, the headers of one hop, and
where chunks are cut.
"""

import codecs
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from polykv_proxy.relay.doors import engine_path
from tests.engine.conftest import POOLS, SMALL, Launcher, chat_model, launch_shared
from tests.engine.hooks import Engine
from tests.relay.conftest import ProxyMaker
from tests.relay.raw import connected, exchange, get, post, unchunked

__all__ = ["chat_model", "launch_shared"]

pytestmark = pytest.mark.engine

JSON = "Content-Type: application/json\r\n"
CHAT, STREAM = "/v1/chat/completions", "/v1/stream?conv_id=org%2Frepo%3A%3Ac1"
PAGE = b"<!doctype html><title>h\xc3\xa9</title>" + bytes(range(256)) * 20
ORIGIN = "Origin: http://a.example\r\n"
ASKS = ORIGIN + "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n"
# The cache must not know more the second time: another batch may round otherwise.
GREEDY = {"temperature": 0, "seed": 1, "cache_prompt": False}
SAID = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Name a colour: h\u00e9, \u65e5\u672c"}]


def body(path: str, **fields: Any) -> bytes:
    prompts: dict[str, dict[str, Any]] = {
        "/completion": {"prompt": "Once upon", "n_predict": 8, "n_probs": 2},
        "/v1/completions": {"prompt": "Once upon", "max_tokens": 4},
        CHAT: {"messages": SAID, "max_tokens": 8, "logprobs": True},
        "/v1/messages": {"system": "Answer.", "messages": SAID[1:], "max_tokens": 8},
        "/v1/responses": {"instructions": "Answer.", "input": "Name a colour.", "max_output_tokens": 8},
    }
    return orjson.dumps(prompts[path] | GREEDY | fields)


def in_chunks(path: str, sent: bytes) -> bytes:
    head = post(path, b"", JSON).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return (
        head
        + b"".join(b"%x\r\n%s\r\n" % (len(sent[i : i + 7]), sent[i : i + 7]) for i in range(0, len(sent), 7))
        + (b"0\r\n\r\n")
    )


CHATS = {
    f"{path} {kind}": post(path, body(path, **extra), JSON)
    for path in ("/completion", "/v1/completions", CHAT, "/v1/messages", "/v1/responses")
    for kind, extra in {"whole": {}, "stream": {"stream": True}}.items()
}
REQUESTS: dict[str, bytes] = {
    "page": get("/", "Accept-Encoding: gzip\r\n"),
    "page, a part of it": get("/index.html", "Range: bytes=5-20\r\n"),
    "page, HEAD": get("/", method="HEAD"),
    "page's worker": get("/sw.js"),
    "no such page": get("/nope.html"),
    "models": get("/v1/models"),
    "models, HEAD": get("/v1/models", method="HEAD"),
    "models, of a page": get("/v1/models", ORIGIN),
    "health": get("/health"),
    "props, HEAD": get("/props", method="HEAD"),
    "chat, HEAD": get(CHAT, method="HEAD"),
    "preflight": get(CHAT, ASKS, "OPTIONS"),
    "preflight of the server": get("*", ASKS, "OPTIONS"),
    "PUT": get("/v1/models", method="PUT"),
    "PATCH": get("/v1/models", method="PATCH"),
    "DELETE": get("/nope", method="DELETE"),
    "TRACE": get("/v1/models", method="TRACE"),
    "escaped target": get("/v1/%6dodels?a=%20b&c=d+e"),
    "two slashes": get("//v1//models"),
    "dots": get("/v1/../v1/models"),
    "tokenize": post("/tokenize", b'{"content":"h\xc3\xa9 <|im_start|>","with_pieces":true}', JSON),
    "tokenize in chunks": in_chunks("/tokenize", b'{"content":"x"}'),
    "template": post("/apply-template", orjson.dumps({"messages": SAID}), JSON),
    "embeddings that are off": post("/v1/embeddings", b'{"input":"x"}', JSON),
    "count": post("/v1/messages/count_tokens", body("/v1/messages"), JSON),
    "several prompts": post("/completion", orjson.dumps({"prompt": ["Once", "upon"], "n_predict": 4} | GREEDY), JSON),
    "no prompt": post("/completion", b'{"n_predict":4}', JSON),
    "no messages": post(CHAT, b"{}", JSON),
    "an array": post(CHAT, b"[1]", JSON),
    "a wrong type": post(CHAT, b'{"messages":7}', JSON),
    "too long": post("/completion", orjson.dumps({"prompt": "word " * 9000}), JSON),
    "a byte order mark": post(CHAT, codecs.BOM_UTF8 + body(CHAT), JSON),
    "NULs at the end": post(CHAT, body(CHAT) + b"\0\0", JSON),
    "in chunks": in_chunks(CHAT, body(CHAT)),
    "an escaped path": post("/v1/chat/complet%69ons", body(CHAT), JSON),
    "an escaped path of another kind": post("/v1/chat/%u0063ompletions", body(CHAT), JSON),
    "a field nobody knows": post(CHAT, body(CHAT, x_unknown={"a": [1.5, None]}), JSON),
    "usage": post(CHAT, body(CHAT, stream=True, stream_options={"include_usage": True}), JSON),
    "progress": post(CHAT, body(CHAT, stream=True, return_progress=True, timings_per_token=True), JSON),
    **CHATS,
}
BAD_JSON = {
    "cut": post(CHAT, b'{"messages":[', JSON),
    "empty": post(CHAT, b"", JSON),
    "none": post(CHAT, b"\xff{}", JSON),
}

_TIMES = rb'"(created|created_at|completed_at|started_at|id_slot|\w+_ms|\w+_per_second)":-?[\d.e+-]+'
_IDS = rb'"(id|item_id)":"[^"]*"'
_HOP = (b"connection:", b"keep-alive:", b"x-request-id:", b"content-length:", b"transfer-encoding:")


def steady(head: bytes, said: bytes, method: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Status line, headers and body without what differs between two runs."""
    line, *headers = head.rstrip(b"\r\n").split(b"\r\n")
    chunked = b"transfer-encoding: chunked" in head.lower()
    said = unchunked(said) if chunked else said
    kept = [header for header in headers if not header.lower().startswith(_HOP)]
    if (method == b"HEAD" or not said) and b" 204 " not in line:  # nothing else says whether it is right
        kept += [header for header in headers if header.lower().startswith(b"content-length:")]
    said = re.sub(_IDS, rb'"\1":""', re.sub(_TIMES, rb'"\1":0', said))
    return line, kept, said


async def ask(url: str, request: bytes) -> tuple[bytes, list[bytes], bytes]:
    head, said = await exchange(url, request, 60)
    return steady(head, said, request.split(b" ")[0])


@pytest.fixture(scope="module", params=["patched", "stock"])
def engine(request: pytest.FixtureRequest, launch_shared: Launcher, tmp_path_factory: Any) -> Iterator[Engine]:
    site: Path = tmp_path_factory.mktemp("site")
    (site / "index.html").write_bytes(PAGE)
    (site / "sw.js").write_bytes(b"self;")
    pools = POOLS if request.param == "patched" else ()
    return launch_shared(request.param, "dense", *SMALL, *pools, "--path", str(site), "--metrics", "--slots")


@pytest.mark.parametrize("mode", ["auto", "explicit"])
async def test_the_same_bytes(engine: Engine, make_proxy: ProxyMaker, mode: str) -> None:
    asked = REQUESTS | (BAD_JSON if mode == "explicit" else {})
    wrong = {}
    async with make_proxy(engine.server.url, mode=mode) as proxy:
        for name, request in asked.items():
            direct, through = await ask(engine.server.url, request), await ask(proxy.url, request)
            if direct != through:
                wrong[name] = (direct, through)
    assert wrong == {}


async def test_who_waits_to_be_told_to_go_on_is_told(engine: Engine, make_proxy: ProxyMaker) -> None:
    sent = body(CHAT)
    async with make_proxy(engine.server.url) as proxy:
        replies = []
        for url in (engine.server.url, proxy.url):
            async with connected(url) as (reader, writer):
                writer.write(post(CHAT, b"", JSON + "Expect: 100-continue\r\n").replace(b": 0", b": %d" % len(sent)))
                told = await reader.readuntil(b"\r\n\r\n")
                writer.write(sent)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
                replies.append((told.split(b"\r")[0], steady(head, await reader.readexactly(length), b"POST")))
    assert replies[0] == replies[1]
    assert replies[0][0] == b"HTTP/1.1 100 Continue"


async def test_a_stream_can_be_resumed_as_there(engine: Engine, make_proxy: ProxyMaker) -> None:
    """What was streamed through the proxy is kept by the engine, and offsets in it are the client's own count."""
    asked = post(CHAT, body(CHAT, stream=True), JSON + "X-Conversation-Id: org/repo::c1\r\n")
    lookup = post("/v1/streams/lookup", b'{"conversation_ids":["org/repo::c1","other"]}', JSON)
    async with make_proxy(engine.server.url) as proxy:
        _, said = await exchange(proxy.url, asked, 60)
        whole = unchunked(said)
        for offset in (0, 1, 17, len(whole) - 3, len(whole), len(whole) + 9):
            for url in (engine.server.url, proxy.url):
                _, rest = await exchange(url, get(f"{STREAM}&from={offset}"), 60)
                assert unchunked(rest) == whole[offset:]
        assert await ask(engine.server.url, lookup) == await ask(proxy.url, lookup)
        for method, target in (("DELETE", STREAM), ("DELETE", STREAM), ("GET", STREAM), ("GET", "/v1/stream")):
            gone = get(target, "Connection: close\r\n", method)
            direct, through = await ask(engine.server.url, gone), await ask(proxy.url, gone)
            assert direct == through


async def test_a_path_is_read_here_as_there(engine: Engine) -> None:
    """What is thought to be a route of the engine's is one, and nothing else is."""
    chance, n_found = random.Random(7), 0
    for _ in range(200):
        path = "/" + "".join(spelled(character, chance) for character in "health")
        head, _ = await exchange(engine.server.url, get(path, "Connection: close\r\n"))
        found = head.split(b" ")[1] == b"200"
        assert found == (engine_path(path) == "/health"), path
        n_found += found
    assert 20 < n_found < 180


def spelled(character: str, chance: random.Random) -> str:
    """A character as it could stand in a path, mostly still that one."""
    code = ord(character)
    right = [character] * 4 + [
        f"%{code:02x}",
        f"%{code:02X}",
        f"%u{code:04x}",
        f"{character}%ud8Ff",
        f"%uDC00{character}",
    ]
    wrong = [
        f"%25{code:02x}",
        f"%U{code:04x}",
        f"%u{code:03x}",
        f"%{code:01x}",
        f"{character}%",
        f"%u00{code:02x}0",
        "%zz",
    ]
    return chance.choice(wrong if chance.random() < 0.08 else right)


async def test_no_spelling_shows_the_hooks(engine: Engine, make_proxy: ProxyMaker) -> None:
    """llama-server takes each of these for one of them, where it has them. Here it is a 404."""
    hooks, _ = await exchange(engine.server.url, get("/polykv/engine/stats"))
    async with make_proxy(engine.server.url) as proxy:
        for spelled in ("/%70olykv/engine/stats", "/%u0070olykv/engine/stats", "/po%ud800lykv/engine/stats"):
            head, _ = await exchange(engine.server.url, get(spelled))
            assert head.split(b" ")[1] == hooks.split(b" ")[1]
            head, said = await exchange(proxy.url, get(spelled))
            assert head.split(b" ")[1] == b"404"
            assert b'"src":"polykv_proxy"' in said
