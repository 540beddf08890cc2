"""Which pool a request attaches to, and how far: decided before it goes out, settled when its reply is there.

    1. Engine without hooks or managed by another proxy, or a model that cannot share: unpooled.
    2. Which pool: the one it names (an unknown one: unpooled), else the session's while the prompt still starts with
       all of it, else the deepest match that is worth it.
    3. How far: the prompt's tokens against the pool's. The engine renders; what was seen before is not rendered again.
    4. Make it resident (one flight per pool). If that cannot be now: unpooled, never an error.

A pool that cannot be had costs time, not an answer: nothing in here fails a data request, except an explicit prefix
that does not match (400) and, when strictness was asked for, a pool that does not exist (404).
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from polykv_proxy.control.orders import AttachPlan, AttachRequest, Outcome
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.seen import MARGIN_TOKENS, Seen, SeenBook, chain_of, whole_key
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import ExplicitPrefixTooLong, PolyKVError, PoolNotFound
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient

log = logging.getLogger("polykv.attach")

MIN_AUTO_TOKENS = 16
"""Fewer tokens beyond the last whole pool do not count: all chats share a template's first tokens."""


class _Unpooled(Exception):
    """The decision is: no pool."""

    def __init__(self, reason: str, asked: PoolId | None = None):
        super().__init__(reason)
        self.plan = AttachPlan(miss_reason=reason, asked=asked)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt against the pools. ``n_tokens`` of the prompt; None when it was not rendered."""

    pool: Pool | None
    prefix_n_tokens: int
    n_tokens: int | None
    exact: bool


class Attacher:
    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        engine: EngineClient,
        watch: EngineWatch,
        residency: Residency,
        snapshot_slot: Callable[[SlotId], Awaitable[Pool | None]],
        may_change: Callable[[], bool],
        clock: Callable[[], float],
    ):
        self._tree, self._sessions, self._engine = tree, sessions, engine
        self._watch, self._residency, self._snapshot_slot, self._clock = watch, residency, snapshot_slot, clock
        self._may_change = may_change
        self.seen = SeenBook()
        self._version = 0

    # Before --------------------------------------------------------------------------------------------------------

    async def decide(self, request: AttachRequest) -> AttachPlan:
        """Decide, and wait until the pool is resident.

        Raises:  ExplicitPrefixTooLong (400), PoolNotFound (404, only strict)
        """
        try:
            # 1.
            if self._watch.hooks is not True or self._watch.stats is None or not self._may_change():
                raise _Unpooled("no_pool")
            if self._watch.stats.share != "ok":
                raise _Unpooled("swa_or_recurrent")
            # 2. and 3.
            found = await self._compare(request, await self._named(request))
            pool, n_prefix = found.pool, found.prefix_n_tokens
            if request.explicit_p is not None:
                n_prefix = self._check_explicit(request.explicit_p, n_prefix)
            if pool is None or n_prefix == 0:
                raise _Unpooled("diverged" if len(self._tree) else "no_pool", pool.pool_id if pool else None)
            # 4.
            try:
                held = await self._residency.ensure(pool)
            except PoolNotFound as e:
                raise _Unpooled("no_pool", pool.pool_id) from e
            except PolyKVError as e:
                log.warning("pool %s cannot be resident now: %s", pool.label, e.message)
                raise _Unpooled("not_resident", pool.pool_id) from e
        except _Unpooled as e:
            return e.plan
        wanted = pool.prefix_len if found.n_tokens is None else min(pool.prefix_len, found.n_tokens)
        diverged = found.exact and request.explicit_p is None and n_prefix < wanted
        return AttachPlan(
            pool_id=pool.pool_id,
            prefix_n_tokens=n_prefix,
            exact=found.exact,
            miss_reason="diverged" if diverged else None,
            seq_id=held.seq_id,
            gen=held.gen,
            epoch=held.epoch,
            asked=pool.pool_id,
        )

    async def _named(self, request: AttachRequest) -> Pool | None:
        """The pool that the request names in one way or the other."""
        if request.pool_ref is not None:
            pool = self._tree.find(request.pool_ref)
            if pool is None and request.strict:
                raise PoolNotFound(f"no pool {str(request.pool_ref)[:64]!r}", param="pool_id")
        elif request.legacy_slot is not None:
            pool = await self._legacy(request.legacy_slot)
        else:
            return None
        if pool is None:
            raise _Unpooled("no_pool")
        return pool

    async def _legacy(self, number: int) -> Pool | None:
        """The original design's word: a pool's sequence, or below the slot count that slot's context, as it is now."""
        n_slots = self._watch.stats.n_slots if self._watch.stats is not None else 0
        if number >= n_slots:
            return next((pool for pool in self._tree if pool.seq_id == SeqId(number)), None)
        try:
            return await self._snapshot_slot(SlotId(number))
        except PolyKVError as e:
            log.info("slot %d cannot be shared: %s", number, e.message)
            raise _Unpooled("not_resident") from e

    def _check_explicit(self, explicit_p: int, n_prefix: int) -> int:
        if explicit_p > n_prefix:
            raise ExplicitPrefixTooLong(
                f"shared_prefix_n_tokens is {explicit_p}, but only {n_prefix} tokens match",
                divergence_pos=n_prefix,
                param="shared_prefix_n_tokens",
            )
        return explicit_p

    async def _compare(self, request: AttachRequest, named: Pool | None) -> Comparison:
        if not len(self._tree):
            return Comparison(None, 0, None, True)
        session = self._sessions.get(request.session) if request.session is not None else None
        of_session = self._tree.find(session.pool_id) if session is not None and session.pool_id is not None else None
        target = named or of_session
        target_id = target.pool_id if target is not None else None
        chain = chain_of(request.path, request.body)
        whole = ~chain[-1] if chain else whole_key(request.path, request.body)
        if request.explicit_p is None:
            seen = self.seen.find([*chain, whole], target_id, self._version)
            if seen is not None:
                pool = self._tree.find(seen.pool_id) if seen.pool_id is not None else None
                return Comparison(pool, seen.n_tokens, seen.whole_n_tokens, seen.exact)
        version = self._version
        prompts = await self._render(request)
        compared = self.compare_tokens(prompts, named, of_session)
        if len(prompts) == 1:
            self._remember(chain, whole, target_id, compared, version)
        return compared

    def compare_tokens(self, prompts: list[Tokens], named: Pool | None, of_session: Pool | None = None) -> Comparison:
        """Compare rendered prompts with the pool asked for, else the session's, else find the deepest match."""
        n_tokens = min(len(tokens) for tokens in prompts)
        if named is not None:
            if named.pool_id not in self._tree:
                raise _Unpooled("no_pool", named.pool_id)  # released while the prompt was rendered
            n_prefix = self._lcp(named, prompts)
            if n_prefix == 0 and len(prompts) > 1:
                raise _Unpooled("incompatible", named.pool_id)
            return Comparison(named, n_prefix, n_tokens, True)
        best: tuple[Pool | None, int] = (None, 0)
        if of_session is not None and of_session.pool_id in self._tree:
            n_prefix = self._lcp(of_session, prompts)
            if n_prefix == min(of_session.prefix_len, n_tokens):
                return Comparison(of_session, n_prefix, n_tokens, True)
            if n_prefix >= MIN_AUTO_TOKENS:
                best = (of_session, n_prefix)
        pool = self._deepest(prompts[0])
        if pool is not None:
            n_prefix = self._lcp(pool, prompts)
            if n_prefix > best[1]:
                best = (pool, n_prefix)
        return Comparison(best[0], best[1], n_tokens, True)

    def _deepest(self, tokens: Tokens) -> Pool | None:
        """The deepest match that is worth it.

        A template's next few tokens (``<|im_start|>user``) are common to all children of a pool. A prompt that leaves
        a child right after them belongs to the pool above, which it contains entirely.
        """
        match = self._tree.match(tokens)
        if match is None:
            return None
        pool = self._tree.get(match.pool_id)
        if match.whole:
            return pool
        for above in self._tree.ancestors(match.pool_id):
            if above.prefix_len <= match.prefix_n_tokens:
                return above if match.prefix_n_tokens - above.prefix_len < MIN_AUTO_TOKENS else pool
        return pool if match.prefix_n_tokens >= MIN_AUTO_TOKENS else None

    def _lcp(self, pool: Pool, prompts: list[Tokens]) -> int:
        return min(self._tree.lcp(pool.pool_id, tokens) for tokens in prompts)

    async def _render(self, request: AttachRequest) -> list[Tokens]:
        """Tokens of the body's prompts. What the engine will not render it will refuse by itself, in its own words."""
        try:
            rendered = await self._engine.render(request.path, request.body)
        except PolyKVError as e:
            log.info("not rendered: %s", e.message)
            raise _Unpooled("not_resident") from e
        if rendered.has_media or len(rendered.prompts) != rendered.n_prompts or not all(rendered.prompts):
            raise _Unpooled("incompatible")
        return list(rendered.prompts)

    def _remember(
        self, chain: list[int], whole: int, target: PoolId | None, compared: Comparison, version: int
    ) -> None:
        pool_id = compared.pool.pool_id if compared.pool is not None else None
        n_tokens = compared.n_tokens or 0
        if target is not None and pool_id != target:
            return  # the session's pool did not fit: that is about the whole tree, not about it
        seen = Seen(pool_id, compared.prefix_n_tokens, version, exact=True, whole_n_tokens=n_tokens)
        self.seen.remember(whole, target, seen)
        if chain and compared.prefix_n_tokens <= n_tokens - MARGIN_TOKENS:
            self.seen.remember(chain[-1], target, Seen(pool_id, compared.prefix_n_tokens, version))

    def forget_deepest(self) -> None:
        """The tree changed: another pool may be the deepest match now."""
        self._version += 1

    def learn_pool(self, pool: Pool, path: str, body: dict[str, Any]) -> None:
        """A pool was made from these messages: every chat that starts with them starts with all its tokens."""
        chain = chain_of(path, body)
        if chain:
            seen = Seen(pool.pool_id, pool.prefix_len, self._version)
            self.seen.remember(chain[-1], pool.pool_id, seen)
            if not self._continued(pool):
                self.seen.remember(chain[-1], None, seen)

    def _continued(self, pool: Pool) -> bool:
        """Whether another pool starts with all of this one's tokens: a chat may match that one further."""
        n, tree = pool.prefix_len, self._tree
        return any(p.prefix_len > n and tree.hash_at(p.pool_id, n) == pool.tokens_hash for p in tree)

    async def project(self, path: str, body: dict[str, Any], named: Pool | None) -> dict[str, Any]:
        """Say what ``decide`` would find for a prompt, without changing or preparing anything.

        Raises:  RequestError (400), UpstreamError and its heirs
        """
        rendered = await self._engine.render(path, body)
        n_tokens = len(rendered.tokens)
        if rendered.has_media or rendered.n_prompts != 1:
            return _projection(None, 0, n_tokens, "incompatible")
        stats = self._watch.stats
        if stats is not None and stats.share != "ok":
            return _projection(None, 0, n_tokens, "swa_or_recurrent")
        found = self.compare_tokens([rendered.tokens], named)
        if found.pool is None or not found.prefix_n_tokens:
            return _projection(None, 0, n_tokens, "diverged" if len(self._tree) else "no_pool")
        pool, n_prefix = found.pool, found.prefix_n_tokens
        diverged = n_prefix < min(pool.prefix_len, n_tokens)
        reason = "diverged" if diverged else None if self._residency.held(pool) is not None else "cold"
        return _projection(pool, n_prefix, n_tokens, reason)

    # After ---------------------------------------------------------------------------------------------------------

    def settle(self, plan: AttachPlan, outcome: Outcome) -> str | None:
        """Count the request, and say why it got less than was planned: the miss reason of its receipt."""
        if plan.pool_id is None or outcome.status != 200:
            return plan.miss_reason
        pool = self._tree.find(plan.pool_id)
        if pool is not None:
            pool.n_queries += 1
            pool.last_access_s = self._clock()
        if outcome.cache_n is None and outcome.pool_n is None:
            return plan.miss_reason
        got = max(outcome.cache_n or 0, outcome.pool_n or 0)
        expected = plan.prefix_n_tokens
        if outcome.cache_n is not None and outcome.prompt_n is not None:
            # The engine always decodes at least the last token of a prompt.
            expected = min(expected, outcome.cache_n + outcome.prompt_n - 1)
        if got >= expected:
            if pool is not None:
                pool.n_hits += 1
            return plan.miss_reason
        return self._why_less(plan, pool, got)

    def _why_less(self, plan: AttachPlan, pool: Pool | None, got: int) -> str:
        self._residency.unsure = True  # the heartbeat compares with what the engine holds
        if plan.epoch != self._watch.epoch:
            return "upstream_restarted"
        held = self._residency.held(pool) if pool is not None else None
        if held is None or (held.seq_id, held.gen) != (plan.seq_id, plan.gen):
            return "evicted"
        stats = self._watch.stats
        if stats is not None and (stats.recurrent or (stats.swa is not None and stats.swa.n_swa > 0)):
            return "swa_or_recurrent"
        if got > 0 and not plan.exact:
            return "diverged"
        return "not_resident"


def _projection(pool: Pool | None, n_prefix: int, n_tokens: int, reason: str | None) -> dict[str, Any]:
    """``divergence``: where the prompt leaves the pool; None when it holds all of it or ends inside."""
    diverged = pool is not None and n_prefix < min(pool.prefix_len, n_tokens)
    return {
        "pool_id": pool.pool_id if pool is not None else None,
        "prefix_n_tokens": n_prefix,
        "uncached_n_tokens": n_tokens - n_prefix,
        "miss_reason": reason,
        "divergence": {"pos": n_prefix, "pool_prefix_len": pool.prefix_len} if pool is not None and diverged else None,
    }
