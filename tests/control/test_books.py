"""Whatever is done to the pools, every cell is on the books once, and nobody gets another's tokens.

Random operations through the whole proxy on a cache that is always short, in front of an engine that numbers its cells.
After each one the sum of the contract is checked, and every answer against the engine's rule for its next token.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polykv_proxy.config import load_settings
from polykv_proxy.tree.eviction import held_cells
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, serving

T = TypeVar("T")

N_CELLS, N_SEQS, N_SLOTS = 500, 3, 2
REFUSALS = {
    "pin_budget",
    "pool_in_use",
    "seq_ids_exhausted",
    "kv_exhausted",
    "session_not_found",
    "session_not_resident",
    "prefix_mismatch",
}

letters = st.sampled_from("abc")
texts = st.builds(lambda letter, n: letter * n, letters, st.integers(20, 60))
picks = st.integers(0, 10**6)
sessions = st.sampled_from(["s0", "s1", "s2"])
mostly_not = st.sampled_from([False, False, False, True])


class Books(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.run(self._start())

    async def _start(self) -> None:
        self.engine = await self.stack.enter_async_context(
            FakeEngine(n_cells=N_CELLS, n_ctx_slot=300, max_pools=N_SEQS, n_slots=N_SLOTS)
        )
        loaded = load_settings(upstream_url=self.engine.url, state=":memory:", port=0, session_gap_s=0)
        url, app = await self.stack.enter_async_context(serving(loaded))
        client = await self.stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False))
        self.proxy = Proxy(url, app, client)
        self.proxy.control.room.max_wait_s = 0.1

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.stack.aclose())
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def call(self, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
        answer = self.run(self.proxy.client.request(verb, path, json=body))
        return answer.status_code, answer.json()

    def order(self, path: str, body: Any = None, verb: str = "POST") -> Any:
        status, answer = self.call(verb, path, body)
        assert status in (200, 201, 404, 409, 503, 507), (path, body, answer)
        assert status < 300 or answer["error"]["code"] in REFUSALS, answer
        return answer

    @property
    def ids(self) -> list[int]:
        return [int(pool.pool_id) for pool in self.proxy.control.tree]

    def pick(self, pick: int) -> int:
        return self.ids[pick % len(self.ids)]

    def text_of(self, pool_id: int) -> str:
        return "".join(map(chr, self.proxy.control.tree.tokens(pool_id)))

    @rule(text=texts, pin=mostly_not)
    def create(self, text: str, pin: bool) -> None:
        self.order("/polykv/pools", {"prompt": text, "pin": pin})

    @precondition(lambda self: self.ids)
    @rule(pick=picks, own=texts, at=st.integers(1, 120), pin=mostly_not)
    def fork(self, pick: int, own: str, at: int, pin: bool) -> None:
        parent = self.proxy.control.tree.get(self.pick(pick))
        at = min(at, parent.prefix_len)
        if parent.prefix_len + len(own) < 250:
            body = {"own_tokens": list(own.encode()), "branch_pos": at, "pin": pin}
            self.order(f"/polykv/pools/{parent.pool_id}/fork", body)

    @rule(session=sessions)
    def create_from_session(self, session: str) -> None:
        self.order("/polykv/pools", {"from_session": session})

    @precondition(lambda self: self.ids)
    @rule(session=sessions, pick=picks)
    def fork_from_session(self, session: str, pick: int) -> None:
        status, answer = self.call("POST", f"/polykv/pools/{self.pick(pick)}/fork", {"from_session": session})
        assert status in (201, 400, 404, 409, 503), answer  # 400: the session is not longer than the pool

    @precondition(lambda self: self.ids)
    @rule(pick=picks, keep=st.integers(1, 150), more=texts, session=sessions, named=st.booleans())
    def attach(self, pick: int, keep: int, more: str, session: str, named: bool) -> None:
        pool_id = self.pick(pick)
        self.turn(self.text_of(pool_id)[:keep] + more, session, pool_id if named else None)

    @rule(text=texts, session=sessions)
    def unpooled(self, text: str, session: str) -> None:
        self.turn("z" + text, session, None)

    def turn(self, prompt: str, session: str, pool_id: int | None) -> None:
        body = {"prompt": prompt, "n_predict": 3, "session_id": session, "pool_id": pool_id}
        status, answer = self.call("POST", "/completion", body)
        if status == 200:
            context = list(prompt.encode())
            for letter in answer["content"]:
                token = self.engine._next_token(context, 0)
                assert letter == chr(token)  # as if nothing had been shared
                context.append(token)
        else:
            assert (status, answer["error"]["code"]) == (503, "kv_exhausted"), answer

    @precondition(lambda self: self.ids)
    @rule(pick=picks, verb=st.sampled_from(["pin", "unpin", "evict", "flush"]))
    def keep(self, pick: int, verb: str) -> None:
        self.order(f"/polykv/pools/{self.pick(pick)}/{verb}")

    @precondition(lambda self: len(self.ids) > 3)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        before = self.engine.cache.used()
        answer = self.order(f"/polykv/pools/{self.pick(pick)}?recursive=true", verb="DELETE")
        assert answer["freed_now"]["kv_cells"] == before - self.engine.cache.used()

    @rule(session=sessions)
    def drop_session(self, session: str) -> None:
        self.order(f"/polykv/sessions/{session}", verb="DELETE")

    @precondition(lambda self: self.ids)
    @rule(pick=picks)
    def restart(self, pick: int) -> None:
        if pick % 4 == 0:
            self.run(self.engine.restart())

    @invariant()
    def every_cell_has_one_owner(self) -> None:
        if not hasattr(self, "proxy"):
            return
        status, view = self.call("GET", "/polykv/pools")
        assert status == 200
        used = self.engine.cache.used()
        own = sum(pool["own_kv_cells"] for pool in view["pools"])
        suffixes = sum(session["suffix_n_tokens"] for pool in view["pools"] for session in pool["sessions"])
        released = sum(pool["own_kv_cells"] for pool in view["released"])
        assert own + suffixes + released + view["unpooled"]["kv_cells"] == view["kv_cells_used"] == used
        listed = sum(session["suffix_n_tokens"] for session in view["unpooled"]["sessions"])
        assert listed <= view["unpooled"]["kv_cells"]
        roots = [pool for pool in view["pools"] if pool["parent"] == -1]
        assert sum(pool["subtree_kv_cells"] for pool in roots) == own + suffixes

    @invariant()
    def every_sequence_is_one_pools(self) -> None:
        if not hasattr(self, "proxy"):
            return
        tree = self.proxy.control.tree
        held = {pool.seq_id: tree.tokens(pool.pool_id).tolist() for pool in tree.residents()}
        assert len(held) == len(tree.residents())
        assert held == {seq.seq: seq.tokens for seq in self.engine.ready_pools()}

    @invariant()
    def pins_are_kept_and_paid_for(self) -> None:
        if not hasattr(self, "proxy"):
            return
        tree = self.proxy.control.tree
        pinned = [pool for pool in tree if pool.pin]
        assert held_cells(tree, pinned) <= N_CELLS // 2


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
