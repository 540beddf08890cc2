"""Why a prefix that was expected to match did not: looks only when the engine reused less than the last prompt had.

    session  the prompt does not begin with its session's last one
    answer   it does, but not with what was answered: the client, or the template, leaves reasoning out or writes tool
             calls differently
    pool     it leaves the pool that was asked for, made of messages or a prompt that are remembered
    family   nothing of it was known, and another one's system prompt is the same but for a line of it: that line
             changes by itself (a date, a billing header), and keeps everything behind it from being shared

A request that matched costs a look at two numbers. Bodies are kept by reference, the oldest go first. Of those that
differ the place is told at once; the number of the first other token when the engine has rendered both, later.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import orjson

from polykv_proxy.control.compare import Unpooled
from polykv_proxy.control.divergence import Place, first_addition, first_difference, system_text, volatile_place
from polykv_proxy.control.orders import AttachPlan, AttachRequest, Source
from polykv_proxy.control.receipts import Divergence, RequestRecord
from polykv_proxy.errors import PolyKVError
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens, lcp_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.turns import Session

log = logging.getLogger("polykv.diverged")

Key = TypeVar("Key")

MAX_PROMPTS = 256
MAX_BYTES = 32 << 20
MAX_BODY_BYTES = 4 << 20
"""Larger ones are not kept."""

MAX_RENDERED_BYTES = 1 << 20
MAX_RENDERS = 8
"""So many divergences wait for the engine at most; of others the token is not told."""

CUE_TOKENS = 16
"""A prompt ends with at most so many tokens (the cue to answer) that another one need not have there."""

_CHATS = frozenset({"/chat/completions", "/v1/chat/completions"})

MIN_FAMILY_TOKENS = 64
_END = 64


@dataclass(slots=True, eq=False)
class LastPrompt:
    """``n_tokens``: as the engine counted them. ``n_answered``: those after it. ``tokens``: if it was rendered."""

    path: str
    body: Mapping[str, Any]
    n_bytes: int
    n_tokens: int | None = None
    tokens: Tokens | None = None
    n_answered: int = 0


class _Shelf(OrderedDict[Key, LastPrompt], Generic[Key]):
    """A bounded memory, longest unused out first."""

    n_bytes = 0

    def put(self, key: Key, prompt: LastPrompt) -> None:
        self.drop(key)
        if prompt.n_bytes > MAX_BODY_BYTES:
            return
        self[key] = prompt
        self.n_bytes += prompt.n_bytes
        while len(self) > MAX_PROMPTS or self.n_bytes > MAX_BYTES:
            self.n_bytes -= self.popitem(last=False)[1].n_bytes

    def drop(self, key: Key) -> None:
        before = self.pop(key, None)
        if before is not None:
            self.n_bytes -= before.n_bytes


class Said(NamedTuple):
    """What a request said, as the engine got it. ``family``: who it belongs together with, if it said so."""

    path: str
    body: Mapping[str, Any]
    n_bytes: int
    family: str | None = None


class Divergences:
    """``render``: a body's prompts, one step at a time; ``can_render``: the engine can be asked.

    ``reuses_any``: it reuses whatever is alike; a recurrent model goes back to a checkpoint. ``message_at``: which
    message of a chat a token is of.
    """

    def __init__(
        self,
        *,
        render: Callable[[AttachRequest], Awaitable[list[Tokens]]],
        can_render: Callable[[], bool],
        reuses_any: Callable[[], bool],
        message_at: Callable[[Source, list[Any], Tokens, int], Awaitable[int | None]],
        tree: PoolTree,
    ):
        self._render, self._can_render, self._reuses_any, self._tree = render, can_render, reuses_any, tree
        self._message_at = message_at
        self._of_session: _Shelf[SessionId] = _Shelf()
        self._of_family: _Shelf[tuple[str, int]] = _Shelf()
        self._of_pool: _Shelf[PoolId] = _Shelf()
        self._to_render: deque[Coroutine[Any, Any, None]] = deque()
        self._rendering: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        while self._to_render:
            self._to_render.popleft().close()
        if self._rendering is not None:
            self._rendering.cancel()
            await asyncio.wait([self._rendering])

    def learn_pool(self, pool: Pool, path: str, body: Mapping[str, Any]) -> None:
        """A pool was made of this."""
        self._of_pool.put(pool.pool_id, LastPrompt(path, body, len(orjson.dumps(body)), pool.prefix_len))

    def forget(self, session_id: SessionId) -> None:
        self._of_session.drop(session_id)

    def settled(self, record: RequestRecord, session: Session, said: Said, plan: AttachPlan | None) -> None:
        """The engine answered: name where the prompt left what it was expected to begin with, and remember it.

        An unpooled one that diverged is given that as its ``miss_reason``.
        """
        usage, told = record.usage, record.told
        if usage is None or told is None or usage.cache_n is None or usage.prompt_n is None:
            return
        tokens = plan.tokens if plan is not None else None
        n_tokens = usage.cache_n + usage.prompt_n
        now = LastPrompt(said.path, said.body, said.n_bytes, n_tokens, tokens, usage.predicted_n or 0)
        before = self._of_session.get(session.session_id)
        if before is not None and _got_less(usage.cache_n, before, now):
            self._compare(record, "session", before, now)
        elif before is not None and before.n_answered > CUE_TOKENS and self._reuses_any():
            self._compare_answer(record, usage.cache_n, before, now)
        if record.divergence is None and told.miss_reason == "diverged" and plan is not None:
            self._compare_with_pool(record, plan, now)
        if record.divergence is None and before is None:
            self._compare_with_family(record, said, usage.cache_n, now)
        self._of_session.put(session.session_id, now)
        diverged = record.divergence is not None and record.divergence.against != "answer"
        if diverged and told.pool_id is None and told.miss_reason in (None, "no_pool"):
            told.miss_reason = "diverged"

    # ---------------------------------------------------------------------------------------------------------------

    def _compare(self, record: RequestRecord, against: str, before: LastPrompt, now: LastPrompt) -> None:
        place = first_difference(before.body, now.body)
        if place is not None:
            record.divergence = Divergence(against, before.n_tokens, place)
            self._find_position(record.divergence, before, now)

    def _compare_answer(self, record: RequestRecord, cache_n: int, before: LastPrompt, now: LastPrompt) -> None:
        """All of the last prompt was reused: what was not is the answer, and the engine found where."""
        n_tokens = (before.n_tokens or 0) + before.n_answered
        if cache_n + CUE_TOKENS >= min(n_tokens, now.n_tokens or 0):
            return
        place = first_addition(before.body, now.body)
        if place is not None and place.role == "assistant":
            record.divergence = Divergence("answer", n_tokens, place, cache_n)

    def _compare_with_pool(self, record: RequestRecord, plan: AttachPlan, now: LastPrompt) -> None:
        pool = self._tree.find(plan.asked) if plan.asked is not None else None
        if pool is None:
            return
        known = self._of_pool.get(pool.pool_id)
        place = first_difference(known.body, now.body) if known is not None else None
        record.divergence = Divergence("pool", pool.prefix_len, place)
        if now.tokens is not None:
            record.divergence.position = self._tree.lcp(pool.pool_id, now.tokens)
        elif plan.exact and plan.pool_id is not None:
            record.divergence.position = plan.prefix_n_tokens
        if known is None and not pool.auto and now.path in _CHATS and self._may_render(now):
            self._ask(self._tell_message(record.divergence, pool.pool_id, now))

    def _compare_with_family(self, record: RequestRecord, said: Said, cache_n: int, now: LastPrompt) -> None:
        n_tokens = now.n_tokens or 0
        if n_tokens < MIN_FAMILY_TOKENS or 2 * cache_n >= n_tokens:
            return
        system = system_text(said.body)
        if not system:
            return
        # Known by either end: at most one of them has the line that changes.
        keys = [(f"{said.family or ''}\n{end}", hash(part)) for end, part in ((0, system[:_END]), (1, system[-_END:]))]
        for key in keys:
            before = self._of_family.get(key)
            place = volatile_place(before.body, said.body) if before is not None else None
            if before is not None and place is not None:
                record.divergence = Divergence("family", before.n_tokens, place)
                self._find_position(record.divergence, before, now)
                break
        for key in keys:
            self._of_family.put(key, now)

    # Which token ---------------------------------------------------------------------------------------------------

    def _find_position(self, divergence: Divergence, before: LastPrompt, now: LastPrompt) -> None:
        if before.tokens is not None and now.tokens is not None:
            divergence.position = lcp_tokens(before.tokens, now.tokens)
            return
        if self._may_render(before, now):
            self._ask(self._tell_position(divergence, before, now))

    def _may_render(self, *prompts: LastPrompt) -> bool:
        too_large = max(prompt.n_bytes for prompt in prompts) > MAX_RENDERED_BYTES
        return not too_large and self._can_render() and len(self._to_render) < MAX_RENDERS

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        self._to_render.append(question)
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._ask_all(), name="polykv-diverged")

    async def _ask_all(self) -> None:
        while self._to_render:
            try:
                await self._to_render.popleft()
            except (Unpooled, PolyKVError) as e:
                log.debug("where a prompt diverged is not told: %s", e)

    async def _tell_position(self, divergence: Divergence, before: LastPrompt, now: LastPrompt) -> None:
        one, other = await self._tokens_of(before), await self._tokens_of(now)
        if one is not None and other is not None:
            divergence.position = lcp_tokens(one, other)

    async def _tell_message(self, divergence: Divergence, pool_id: PoolId, now: LastPrompt) -> None:
        """Of a pool whose text is not known: which message the token is of."""
        tokens, messages = await self._tokens_of(now), now.body.get("messages")
        if tokens is None or not isinstance(messages, list) or pool_id not in self._tree:
            return
        if divergence.position is None:
            divergence.position = self._tree.lcp(pool_id, tokens)
        source = Source(
            messages=messages, tools=now.body.get("tools"), chat_template_kwargs=now.body.get("chat_template_kwargs")
        )
        n = await self._message_at(source, messages, tokens, divergence.position)
        if n is not None:
            role = messages[n].get("role") if isinstance(messages[n], dict) else None
            divergence.place = Place("messages", n, role if isinstance(role, str) else None)

    async def _tokens_of(self, prompt: LastPrompt) -> Tokens | None:
        """Raises Unpooled when the engine does not render it."""
        if prompt.tokens is None:
            rendered = await self._render(AttachRequest(path=prompt.path, body=dict(prompt.body)))
            prompt.tokens = rendered[0] if len(rendered) == 1 else None
        return prompt.tokens


def _got_less(cache_n: int, before: LastPrompt, now: LastPrompt) -> bool:
    """Less than the last prompt had, and than this one has."""
    return cache_n + CUE_TOKENS < min(before.n_tokens or 0, now.n_tokens or 0)
