"""From what a caller has (a prompt, messages, a session) to tokens.

``messages`` must give exactly the tokens that any chat starting with these messages and tools will start with. No
template is known here, so the engine renders several continuations and what they have in common is the answer: two
different user turns, an assistant's turn, a whole turn with the next question (templates put instructions before the
last question), and the messages alone with the cue to answer. A template may refuse a continuation (two users in a
row); at least two must go through.
"""

import asyncio
from typing import Any

from polykv_proxy.control.orders import Source
from polykv_proxy.errors import InvariantError, RequestError, SharingUnsupported
from polykv_proxy.tree.prefix import Tokens, lcp_tokens, make_tokens
from polykv_proxy.upstream import EngineClient, Rendered

CHAT, COMPLETION = "/v1/chat/completions", "/completion"

# Two user turns that part at their first token, one of the assistant, and one of both.
PROBES: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hi"},),
    ({"role": "user", "content": "9 is a number"},),
    ({"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Hi"}),
    ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "9"}),
    (),
)


async def fetch_tokens(engine: EngineClient, source: Source) -> Tokens:
    """Tokens of every source but a session and ``own_tokens``.

    Raises:  RequestError (400), SharingUnsupported (501) with media, UpstreamError and its heirs
    """
    if source.tokens is not None:
        return make_tokens(source.tokens)
    if source.prompt is not None:
        return _plain(await engine.render(COMPLETION, {"prompt": source.prompt}), "prompt")
    if source.messages is not None:
        return await _fetch_common(engine, source)
    raise InvariantError("this source needs no tokens of the engine")


async def _fetch_common(engine: EngineClient, source: Source) -> Tokens:
    body: dict[str, Any] = {}
    if source.tools is not None:
        body["tools"] = source.tools
    if source.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = source.chat_template_kwargs
    messages = source.messages or []
    answers = await asyncio.gather(
        *(engine.render(CHAT, body | {"messages": [*messages, *probe]}) for probe in PROBES), return_exceptions=True
    )
    rendered: list[Tokens] = []
    refused: list[RequestError] = []
    for answer in answers:
        if isinstance(answer, RequestError):
            refused.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            rendered.append(_plain(answer, "messages"))
    if len(rendered) < 2:
        raise refused[0]
    n_common = min(lcp_tokens(rendered[0], other) for other in rendered[1:])
    if n_common == 0:
        raise RequestError("chats that start with these messages have no token in common", param="messages")
    return rendered[0][:n_common]


def _plain(rendered: Rendered, param: str) -> Tokens:
    if rendered.has_media:
        raise SharingUnsupported("a pool cannot hold images or audio", param=param)
    if rendered.n_prompts != 1:
        raise RequestError("a pool has one prompt, not a list of them", param=param)
    return make_tokens(rendered.tokens, param=param)
