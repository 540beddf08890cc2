"""A prompt against the pools: the one it names, its session's, or the deepest match, and how far they agree.

The engine renders, tokens are compared here, and what was compared before is not rendered again (``seen``).
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from polykv_proxy.control.orders import AttachPlan, AttachRequest
from polykv_proxy.control.seen import MARGIN_TOKENS, Conversation, Seen, SeenBook
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PolyKVError, PromptTooLarge
from polykv_proxy.ids import PoolId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.tree.pool import Match, Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient

log = logging.getLogger("polykv.attach")

MIN_AUTO_TOKENS = 16
"""Fewer tokens beyond the last whole pool do not count: all chats share a template's first tokens."""


MIN_GAIN_TOKENS = 64
"""Fewer tokens beyond the deepest pool are not worth an automatic pool, nor a wait for one."""


class Unpooled(Exception):
    """The decision is: no pool."""

    def __init__(self, reason: str, asked: PoolId | None = None, found: "Comparison | None" = None):
        super().__init__(reason)
        self.found = found
        self.plan = AttachPlan(miss_reason=reason, asked=asked)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt against the pools. ``n_tokens`` of the (shortest) prompt; None = not rendered.

    ``n_prompts``, ``n_total``: prompts that the engine works on at the same time, and their tokens. ``seen``: what was
    remembered instead of comparing. ``tokens``: of a single prompt that was rendered.
    """

    pool: Pool | None = None
    prefix_n_tokens: int = 0
    n_tokens: int | None = None
    exact: bool = True
    n_prompts: int = 1
    n_total: int | None = None
    seen: Seen | None = None
    tokens: Tokens | None = field(default=None, repr=False)


class Comparer:
    """Changes nothing but its own memory."""

    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        engine: EngineClient,
        watch: EngineWatch,
    ):
        self._tree, self._sessions, self._engine, self._watch = tree, sessions, engine, watch
        self.seen = SeenBook()
        self._version = 0

    @property
    def version(self) -> int:
        """Changes with the tree."""
        return self._version

    async def compare(
        self, request: AttachRequest, named: Pool | None, prompts: list[Tokens] | None = None
    ) -> Comparison:
        """Compare a request, rendered (``prompts``) or not. Raises Unpooled."""
        if not len(self._tree):
            return Comparison(tokens=_single(prompts))
        of_session = self.of_session(request)
        target = named or of_session
        target_id = target.pool_id if target is not None else None
        chat = Conversation.of(request.path, request.body)
        epoch = self._watch.epoch
        self.seen.open(epoch)
        if request.explicit_p is None and prompts is None:
            seen = self.seen.find(chat, target_id, self._version)
            if seen is not None:
                pool = self._tree.find(seen.pool_id) if seen.pool_id is not None else None
                n_whole = seen.whole_n_tokens
                return Comparison(pool, seen.n_tokens, n_whole, seen.exact, n_total=n_whole, seen=seen)
        version = self._version
        if prompts is None:
            prompts = await self.render(request)
        compared = self.compare_tokens(prompts, named, of_session, at_least=request.explicit_p)
        if len(prompts) == 1 and request.explicit_p is None and epoch == self._watch.epoch:
            self.seen.rendered(chat, prompts[0])
            self._remember(chat, target_id, compared, version)
        return compared

    def needs_rendering(self, request: AttachRequest) -> bool:
        """There are pools to compare a request with that names none, and nothing is known of its body."""
        if not len(self._tree):
            return False
        target = self.of_session(request)
        self.seen.open(self._watch.epoch)
        chat = Conversation.of(request.path, request.body)
        return self.seen.find(chat, target.pool_id if target is not None else None, self._version) is None

    def of_session(self, request: AttachRequest) -> Pool | None:
        """The pool that the session of a request is on."""
        session = self._sessions.get(request.session) if request.session is not None else None
        return self._tree.find(session.pool_id) if session is not None and session.pool_id is not None else None

    def compare_tokens(
        self, prompts: list[Tokens], named: Pool | None, of_session: Pool | None = None, *, at_least: int | None = None
    ) -> Comparison:
        """Compare rendered prompts with the pool asked for, else the session's, else find the deepest match.

        ``at_least``: so far the caller wants it; a match then need not be worth it.
        """
        lengths = [len(tokens) for tokens in prompts]
        n_tokens = min(lengths)
        n_prompts, n_total = self.at_once(lengths)
        counted = Comparison(None, 0, n_tokens, True, n_prompts, n_total, tokens=_single(prompts))
        pool, n_prefix = self._best(prompts, counted, named, of_session, at_least)
        return replace(counted, pool=pool, prefix_n_tokens=n_prefix)

    def at_once(self, lengths: list[int]) -> tuple[int, int]:
        """How many of these prompts the engine may work on at the same time, and how many tokens they have at most."""
        n_slots = self._watch.stats.n_slots if self._watch.stats is not None else 0
        largest = sorted(lengths, reverse=True)[: n_slots or None]
        return len(largest), sum(largest)

    def _best(
        self,
        prompts: list[Tokens],
        counted: Comparison,
        named: Pool | None,
        of_session: Pool | None,
        at_least: int | None,
    ) -> tuple[Pool | None, int]:
        if named is not None:
            if named.pool_id not in self._tree:
                raise Unpooled("no_pool", named.pool_id)  # released while the prompt was rendered
            n_prefix = self._lcp(named, prompts)
            if n_prefix == 0 and len(prompts) > 1:
                raise Unpooled("incompatible", named.pool_id, counted)
            return named, n_prefix
        best: tuple[Pool | None, int] = (None, 0)
        if of_session is not None and of_session.pool_id in self._tree:
            n_prefix = self._lcp(of_session, prompts)
            if n_prefix == min(of_session.prefix_len, counted.n_tokens or 0) and n_prefix >= (at_least or 0):
                return of_session, n_prefix
            if n_prefix >= (1 if at_least is not None else MIN_AUTO_TOKENS):
                best = (of_session, n_prefix)
            if not self.can_cut and at_least is None and self.sure_match(prompts[0]) is not None:
                best = (None, 0)
        pool = self._deepest(prompts[0], raw=at_least is not None)
        if pool is not None:
            n_prefix = self._lcp(pool, prompts)
            if n_prefix > best[1]:
                best = (pool, n_prefix)
        return best

    def _deepest(self, tokens: Tokens, *, raw: bool) -> Pool | None:
        """The deepest match that is worth it.

        A template's next few tokens (``<|im_start|>user``) are common to all children of a pool. A prompt that leaves
        a child right after them belongs to the pool above, which it contains entirely.
        """
        match = (self.sure_match(tokens) if not raw else None) or self._tree.match(tokens)
        if match is None:
            return None
        pool = self._tree.get(match.pool_id)
        if match.whole or raw:
            return pool
        for above in self._tree.ancestors(match.pool_id):
            if above.prefix_len <= match.prefix_n_tokens:
                return above if match.prefix_n_tokens - above.prefix_len < MIN_AUTO_TOKENS else pool
        return pool if match.prefix_n_tokens >= MIN_AUTO_TOKENS else None

    def sure_match(self, tokens: Tokens) -> Match | None:
        """The pool that a prompt is sure to have most of.

        A recurrent state has one end, so of its pools those count that the prompt contains entirely. One that it leaves
        midway may have kept a state on the way there; that is for the engine to find out.
        """
        return self._tree.match(tokens) if self.can_cut else self._tree.match_whole(tokens)

    @property
    def can_cut(self) -> bool:
        """Whether a pool can be shared up to any of its tokens."""
        return self._watch.stats is None or not self._watch.stats.recurrent

    def _lcp(self, pool: Pool, prompts: list[Tokens]) -> int:
        return min(self._tree.lcp(pool.pool_id, tokens) for tokens in prompts)

    async def render(self, request: AttachRequest) -> list[Tokens]:
        """Tokens of the body's prompts. What the engine will not render it will refuse by itself, in its own words.

        Raises:  Unpooled
        """
        try:
            rendered = await self._engine.render(request.path, request.body)
        except PromptTooLarge as e:
            log.info("not rendered: %s", e.message)
            raise Unpooled("diverged") from e  # no pool is so long: the prompt leaves each of them somewhere
        except PolyKVError as e:
            log.info("not rendered: %s", e.message)
            raise Unpooled("not_resident") from e
        if rendered.has_media or len(rendered.prompts) != rendered.n_prompts or not all(rendered.prompts):
            raise Unpooled("incompatible")
        return list(rendered.prompts)

    async def count(self, request: AttachRequest) -> tuple[int, int] | None:
        """How many prompts the engine works on at the same time, and their tokens; None: that cannot be said."""
        if request.has_media:
            try:
                n_tokens = await self._engine.count(request.path, request.body)
            except PolyKVError as e:
                log.info("not counted: %s", e.message)  # the engine will say it to the client in its own words
                return None
            return (1, n_tokens) if n_tokens is not None else None
        try:
            prompts = await self.render(request)
        except Unpooled:
            return None
        return self.at_once([len(tokens) for tokens in prompts])

    def _remember(self, chat: Conversation, target: PoolId | None, compared: Comparison, version: int) -> None:
        pool_id = compared.pool.pool_id if compared.pool is not None else None
        n_tokens = compared.n_tokens or 0
        if target is not None and pool_id != target:
            return  # the session's pool did not fit: that is about the whole tree, not about it
        seen = Seen(pool_id, compared.prefix_n_tokens, version, exact=True, whole_n_tokens=n_tokens)
        targets = {target}
        if compared.pool is not None and compared.prefix_n_tokens == compared.pool.prefix_len:
            targets.add(pool_id)  # at its next turn the session has this pool
        part = Seen(pool_id, compared.prefix_n_tokens, version)
        for known in targets:
            self.seen.remember(chat.whole, known, seen)
            if chat.chain and compared.prefix_n_tokens <= n_tokens - MARGIN_TOKENS:
                self.seen.remember(chat.chain[-1], known, part)

    def forget_deepest(self) -> None:
        """The tree changed: another pool may be the deepest match now."""
        self._version += 1

    def learn_pool(self, pool: Pool, path: str, body: dict[str, Any]) -> None:
        """A pool was made from these messages: every chat that starts with them starts with all its tokens."""
        chain = Conversation.of(path, body).chain
        if chain:
            self.seen.open(self._watch.epoch)
            seen = Seen(pool.pool_id, pool.prefix_len, self._version, for_all=True)
            self.seen.remember(chain[-1], pool.pool_id, seen)
            if not self._tree.is_continued(pool.pool_id):  # else a chat may match another pool further
                self.seen.remember(chain[-1], None, seen)


def _single(prompts: list[Tokens] | None) -> Tokens | None:
    return prompts[0] if prompts is not None and len(prompts) == 1 else None
