"""Whatever is done to the pools, every cell is on the books once, and nobody gets another's tokens.

Random operations through the whole proxy on a cache that is always short, in front of an engine that numbers its cells.
After each one the sum of the contract is checked, and every answer against the engine's rule for its next token. Pools
and sessions leave the cache and come back meanwhile, on budgets that are short as well, and loads and saves fail.
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
from tests.fake_engine import FakeEngine, drop
from tests.relay.conftest import Proxy, serving

T = TypeVar("T")

N_CELLS, N_SEQS, N_SLOTS = 500, 3, 2
RAM_BYTES, DISK_BYTES = 300 << 10, 500 << 10
LATER, AT_ONCE = 1000.0, 1e-9
"""Seconds after which time sends somebody away: never by itself, and when the test says so."""
REFUSALS = {
    "pin_budget",
    "pool_in_use",
    "seq_ids_exhausted",
    "kv_exhausted",
    "session_not_found",
    "session_not_resident",
    "prefix_mismatch",
    "upstream_unavailable",  # a fault that hit a session which was to be loaded for it
}

letters = st.sampled_from("abc")
texts = st.builds(lambda letter, n: letter * n, letters, st.integers(20, 60))
picks = st.integers(0, 10**6)
sessions = st.sampled_from(["s0", "s1", "s2"])
mostly_not = st.sampled_from([False, False, False, True])


class Books(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.last: dict[str, str] = {}
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.run(self._start())

    async def _start(self) -> None:
        self.engine = await self.stack.enter_async_context(
            FakeEngine(
                n_cells=N_CELLS,
                n_ctx_slot=300,
                max_pools=N_SEQS,
                n_slots=N_SLOTS,
                save_ram=RAM_BYTES,
                save_disk=DISK_BYTES,
            )
        )
        loaded = load_settings(
            upstream_url=self.engine.url,
            state=":memory:",
            port=0,
            session_gap_s=0,
            warm_after_s=LATER,
            warm_disk_bytes=DISK_BYTES,
        )
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
        return self.run(self._call(verb, path, body))

    async def _call(self, verb: str, path: str, body: Any) -> tuple[int, Any]:
        answer = await self.proxy.client.request(verb, path, json=body)
        await self._quiet()
        return answer.status_code, answer.json()

    async def _look(self) -> tuple[Any, int]:
        """The tree as it is shown, and the cells that are used at that moment."""
        for _ in range(10):
            await self._quiet()
            used = self.engine.cache.used()
            answer = await self.proxy.client.get("/polykv/pools")
            if self.engine.cache.used() == used:
                break  # no heartbeat came between
        assert answer.status_code == 200
        return answer.json(), used

    async def _quiet(self) -> None:
        """What is done behind everybody's back is done, too, and what got lost was looked for."""
        control = self.proxy.control
        for _ in range(10_000):
            behind = (control.idle_pools._task, control.restorer._bringing, *control.parking._working)
            if control.residency.at_rest and all(task is None or task.done() for task in behind):
                break
            await asyncio.sleep(0)
        for _ in range(3):
            await control.residency.settle()
        if control.watch.epoch is not None:
            await control.saved.look()

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
        # 400: the session is not longer than the pool; 507: it is parked, and there is no room to load it.
        assert status in (201, 400, 404, 409, 503, 507), answer

    @precondition(lambda self: self.ids)
    @rule(pick=picks, keep=st.integers(1, 150), more=texts, session=sessions, named=st.booleans())
    def attach(self, pick: int, keep: int, more: str, session: str, named: bool) -> None:
        pool_id = self.pick(pick)
        self.turn(self.text_of(pool_id)[:keep] + more, session, pool_id if named else None)

    @precondition(lambda self: self.ids and self.last)
    @rule(pick=picks, cut=picks, more=texts, named=st.booleans())
    def go_on(self, pick: int, cut: int, more: str, named: bool) -> None:
        """From somewhere in the last prompt, beside what the pool that is named now goes on with."""
        session = sorted(self.last)[cut % len(self.last)]
        prompt = self.last[session]
        self.turn(prompt[: len(prompt) - cut % 30] + more[:20], session, self.pick(pick) if named else None)

    @rule(text=texts, session=sessions)
    def unpooled(self, text: str, session: str) -> None:
        self.turn("z" + text, session, None)

    def turn(self, prompt: str, session: str, pool_id: int | None) -> None:
        body = {"prompt": prompt, "n_predict": 3, "session_id": session, "pool_id": pool_id}
        status, answer = self.call("POST", "/completion", body)
        if status == 200:
            self.last[session] = prompt
            context = list(prompt.encode())
            for letter in answer["content"]:
                token = self.engine._next_token(context, 0)
                assert letter == chr(token)  # as if nothing had been shared
                context.append(token)
        else:
            assert (status, answer["error"]["code"]) == (503, "kv_exhausted"), answer

    @precondition(lambda self: self.ids)
    @rule(pick=picks, verb=st.sampled_from(["pin", "unpin", "evict", "evict?to=cold", "flush"]))
    def keep(self, pick: int, verb: str) -> None:
        self.order(f"/polykv/pools/{self.pick(pick)}/{verb}")

    @precondition(lambda self: len(self.ids) > 3)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        before = self.engine.cache.used()
        answer = self.order(f"/polykv/pools/{self.pick(pick)}?recursive=true", verb="DELETE")
        n_freed = answer["freed_now"]["kv_cells"]
        assert n_freed in (None, before - self.engine.cache.used())  # None: the engine did not answer

    @rule(session=sessions)
    def drop_session(self, session: str) -> None:
        self.order(f"/polykv/sessions/{session}", verb="DELETE")

    @precondition(lambda self: self.ids)
    @rule(pick=picks)
    def restart(self, pick: int) -> None:
        if pick % 4 == 0:
            self.run(self.engine.restart())

    @rule(place=st.sampled_from(["save", "load", "free"]), phase=st.sampled_from(["request", "reply"]))
    def fail(self, place: str, phase: str) -> None:
        """Once, when it comes to that."""
        if len(self.engine.faults.armed) < 2:
            self.engine.on(place, phase, drop())

    @precondition(lambda self: self.ids)
    @rule()
    def damage_a_file(self) -> None:
        if self.engine.saved.files:
            self.engine.saved.files[0].damaged = True

    @rule()
    def leave(self) -> None:
        """Time goes by: a pool that nobody uses leaves, or one moves down."""
        self.run(self._leave())

    async def _leave(self) -> None:
        control = self.proxy.control
        await control.watch.refresh()
        await self._quiet()
        before = {pool.pool_id: pool.residency for pool in control.tree}
        used = control.room.in_use()
        control.idle_pools._after_s = AT_ONCE
        control.idle_pools.tend()
        await self._quiet()
        control.idle_pools._after_s = LATER
        for pool in control.tree:
            if pool.residency != before[pool.pool_id] and before[pool.pool_id] == "resident":
                assert (pool.residency, pool.pin, pool.pool_id in used) == ("warm", False, False)

    @rule()
    def park(self) -> None:
        """Sessions that wait leave as well."""
        self.run(self._park())

    async def _park(self) -> None:
        parking = self.proxy.control.parking
        parking._after_s = AT_ONCE
        parking.tend()
        await self._quiet()
        parking._after_s = LATER

    @invariant()
    def every_cell_has_one_owner(self) -> None:
        if not hasattr(self, "proxy"):
            return
        view, used = self.run(self._look())
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
    def warm_is_what_is_saved(self) -> None:
        if not hasattr(self, "proxy"):
            return
        control, saved = self.proxy.control, self.engine.saved
        self.run(self._quiet())
        there = {state.tag: (state.start, state.tokens) for state in (*saved.files, *saved.ram.values())}
        assert {state.tag for state in control.saved} == set(there), (control.saved.known, control.watch.epoch)
        contents = [tokens for tag, (_, tokens) in there.items() if tag.startswith("pool-")]
        for pool in control.tree:
            if pool.seq_id is None:
                tokens = control.tree.tokens(pool.pool_id).tolist()
                assert pool.residency == ("warm" if tokens in contents else "cold")
        assert saved._n_ram() <= RAM_BYTES
        assert saved._n_disk() <= DISK_BYTES

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
