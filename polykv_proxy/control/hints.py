"""Pools that a client asks for by marks in its prompt, without waiting for a second session to begin so.

The beginning of a running request up to a mark becomes an automatic pool, made of the request's own slot as soon as
that holds it (``fan_out``). It ends at the exact token where the prompt and other continuations of the marked part go
apart, as rendered by the engine.

Marks are advice, and costs are bounded: a beginning is looked at when it is new, or was seen before and is no pool;
marks in messages count in a session's first request only, since later ones move on with every turn and the session's
own slot holds what they mean. A line that changes with every request makes every beginning a new one: so in later
requests of a session new ones are only noted, and of pools made so that nobody came to use, the last ``MAX_UNUSED``
stay.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from polykv_proxy.control.automatic import AutomaticPools
from polykv_proxy.control.compare import MIN_GAIN_TOKENS
from polykv_proxy.control.fan_out import FanOut
from polykv_proxy.control.sources import PROBES
from polykv_proxy.errors import PolyKVError, RequestError
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.prefix import Tokens, lcp_tokens, make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.turns import Turn
from polykv_proxy.upstream import EngineClient

log = logging.getLogger("polykv.hints")

MAX_KNOWN = 1024
NOTHING = PoolId(-1)
MAX_UNUSED = 8
MAX_FAILED = 3
MAX_FOLLOWED = 8
"""Requests whose marks are looked at at the same time; those of others are not."""

_NON_STR = orjson.OPT_NON_STR_KEYS
_CONTINUATIONS = PROBES[:3]
_RENDERED = ("tools", "system", "instructions", "chat_template_kwargs", "reasoning_effort", "tool_choice")


@dataclass(frozen=True, slots=True)
class Beginning:
    """A body up to a mark: ``front`` is all but the messages, ``said`` those in front of the mark, as its ``field``.

    ``of_front``: the mark is in tools or a system prompt.
    """

    front: Mapping[str, Any]
    field: str
    said: Sequence[Any]
    of_front: bool

    def continued(self, probe: Sequence[Any]) -> dict[str, Any]:
        return {**self.front, self.field: [*self.said, *probe]}

    def key(self, path: str) -> int:
        """The same for all that begin so, however they are decoded."""
        said = {name: self.front[name] for name in _RENDERED if name in self.front}
        return xxhash.xxh3_64_intdigest(orjson.dumps([path, said, list(self.said)], option=_NON_STR))


class Hints:
    """``may_change``: the engine is ours."""

    def __init__(
        self,
        *,
        tree: PoolTree,
        engine: EngineClient,
        pools: AutomaticPools,
        fan_out: FanOut,
        may_change: Callable[[], bool],
    ):
        self._tree, self._engine, self._pools, self._fan_out = tree, engine, pools, fan_out
        self._may_change = may_change
        self._known: OrderedDict[int, PoolId | None] = OrderedDict()
        self._failed: dict[int, int] = {}
        self._made: deque[PoolId] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def on(self) -> bool:
        return self._fan_out.min_tokens > 0 and self._may_change()

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(
        self, turn: Turn, path: str, body: Mapping[str, Any], beginnings: Sequence[Beginning], tokens: Tokens | None
    ) -> None:
        """Make pools of what a request that is with the engine marks. ``tokens``: its prompt, if it was rendered."""
        is_first = turn.session.n_turns == 1
        wanted = [one for one in beginnings if is_first or one.of_front]
        if not self.on or not wanted or len(self._tasks) >= MAX_FOLLOWED:
            return
        task = asyncio.create_task(self._follow(turn, path, body, wanted, tokens), name="polykv-hints")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(
        self, turn: Turn, path: str, body: Mapping[str, Any], wanted: Sequence[Beginning], tokens: Tokens | None
    ) -> None:
        is_first = turn.session.n_turns == 1
        for beginning in wanted:
            key = beginning.key(path)
            is_known = key in self._known
            pool_id = self._known.get(key)
            self._note(key, pool_id)
            there = pool_id == NOTHING or (pool_id is not None and pool_id in self._tree)
            if there or not (is_known or is_first):
                continue
            if not self._fan_out.follows(turn):
                return
            try:
                if tokens is None:
                    tokens = await self._render(path, dict(body))
                if tokens is None:
                    return
                n_tokens = await self._end_of(beginning, path, tokens)
                other = self._is_there(tokens, n_tokens)
                if other is not None:
                    self._note(key, other)
                else:
                    await self._make(key, turn, tokens, n_tokens)
            except PolyKVError as e:
                log.info("no pool where a mark is: %s", e.message)

    def _is_there(self, tokens: Tokens, n_tokens: int) -> PoolId | None:
        """The pool that has about as much; ``NOTHING``: it is too short for one."""
        if n_tokens < self._fan_out.min_tokens or n_tokens >= len(tokens):
            return NOTHING
        match = self._fan_out.sure_match(tokens[:n_tokens])
        return match.pool_id if match is not None and n_tokens - match.prefix_n_tokens < MIN_GAIN_TOKENS else None

    async def _make(self, key: int, turn: Turn, tokens: Tokens, n_tokens: int) -> None:
        if not await self._fan_out.share(turn, tokens, n_tokens):
            # Its slot went to somebody else, or there was no room: the next request that begins so tries again.
            n_failed = self._failed[key] = self._failed.pop(key, 0) + 1
            if n_failed >= MAX_FAILED:
                self._note(key, NOTHING)
            if len(self._failed) > MAX_KNOWN:
                del self._failed[next(iter(self._failed))]
            return
        self._failed.pop(key, None)
        match = self._tree.match(tokens[:n_tokens])
        pool = self._tree.find(match.pool_id) if match is not None else None
        if pool is None or not pool.auto or pool.prefix_len != n_tokens:
            return
        self._note(key, pool.pool_id)
        log.info("pool %s (auto) ends at a mark of session %s", pool.label, turn.session.session_id)
        unused = [one for one in self._made if (known := self._tree.find(one)) is not None and not known.n_hits]
        self._made = deque([*unused, pool.pool_id])
        while len(self._made) > MAX_UNUSED:
            await self._pools.let_go(self._made.popleft())

    async def _end_of(self, beginning: Beginning, path: str, tokens: Tokens) -> int:
        """So many tokens of the prompt are those of every prompt that begins so. Raises UpstreamError and its heirs."""
        n_common = len(tokens)
        n_rendered = 0
        for probe in _CONTINUATIONS:
            try:
                other = await self._render(path, beginning.continued(probe))
            except RequestError:
                continue  # this template refuses such an order of roles
            if other is not None:
                n_rendered += 1
                n_common = min(n_common, lcp_tokens(tokens, other))
        return n_common if n_rendered >= 2 else 0

    async def _render(self, path: str, body: dict[str, Any]) -> Tokens | None:
        rendered = await self._engine.render(path, body)
        return None if rendered.has_media or rendered.n_prompts != 1 else make_tokens(rendered.tokens)

    def _note(self, key: int, pool_id: PoolId | None) -> None:
        self._known[key] = pool_id
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
