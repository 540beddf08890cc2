"""``/polykv/engine/*`` of the fake engine, as the contract §5 has it.

Materializing takes turns on one service slot and goes on when its client leaves; a sequence is reserved at launch and
is emptied again after any failure. What is saved of pools and slots lives in ``saved``.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fake_engine.cache import OutOfCells, PoolSeq, Sequence, lcp
from tests.fake_engine.saved import HookError
from tests.fake_engine.saving import Saving
from tests.fake_engine.toy import N_VOCAB, Refused

if TYPE_CHECKING:
    from tests.fake_engine.server import FakeEngine


BATCH = 64
OPS = ("materialize", "snapshot", "save", "load", "clear", "cells")


class Hooks:
    def __init__(self, engine: "FakeEngine"):
        self.engine = engine
        self.n_materialized = 0
        self.n_processed = 0
        self.n_service = 0
        self._owner: tuple[str, float] | None = None
        self._service = asyncio.Lock()
        self._saving = Saving(self)
        self._jobs: set[asyncio.Task[dict[str, Any]]] = set()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/polykv/engine/pools", self._guarded(self._list, "list"))
        app.router.add_post("/polykv/engine/pools", self._guarded(self._operate, None))
        app.router.add_delete("/polykv/engine/pools/{seq}", self._guarded(self._free, "free"))
        app.router.add_delete("/polykv/engine/saved/{tag}", self._guarded(self._saving.forget, "forget"))
        app.router.add_post("/polykv/engine/render", self._guarded(self._render, "render"))
        app.router.add_get("/polykv/engine/stats", self._guarded(self._stats, "stats"))
        app.router.add_put("/polykv/engine/owner", self._guarded(self._own, "owner"))

    async def stop(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _guarded(self, handler: Any, place: str | None) -> Any:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                where = place or str((await _body(request)).get("op"))
                early = await self.engine.faults.at(where, "request", request)
                if early is not None:
                    return early
                answer = await handler(request)
                late = await self.engine.faults.at(where, "reply", request)
            except HookError as e:
                return web.json_response({"error": e.as_json()}, status=e.status)
            return late if late is not None else web.json_response(answer)

        return guarded

    # reads ---------------------------------------------------------------------------------------------------------

    def cells(self) -> dict[str, Any]:
        cache = self.engine.cache
        used = cache.used()
        return {"used": used, "total": cache.n_cells, "free": cache.n_cells - used, "hi": cache.hi(), "n_stream": 1}

    async def _list(self, request: web.Request) -> dict[str, Any]:
        e = self.engine
        if e.sleeping:
            return {"sleeping": True}
        pools = [p.as_json() | {"lora_current": True} for p in e.pools]
        return {"epoch": e.epoch, "cells": self.cells(), "pools": pools, "saved": e.saved.list()}

    async def _stats(self, request: web.Request) -> dict[str, Any]:
        e = self.engine
        if e.sleeping:
            return {"sleeping": True}
        slots = [
            {
                "id": s.id,
                "state": s.state,
                "id_task": s.id_task,
                "n_ctx": e.n_ctx_slot,
                "n_tokens": len(s.tokens) + s.n_in_batch,
                "n_prompt": s.n_prompt,
                "n_cached": s.n_cached,
                "n_pool_shared": min(s.n_of_pool, s.n_pool_shared) if self.engine.is_attached(s) else 0,
                "pool_seq": s.pool_seq if self.engine.is_attached(s) else -1,
                "n_decoded": s.n_decoded if s.state != "idle" else 0,
                "n_decoded_cum": s.n_decoded_cum,
                "tps_ewma": s.tps_ewma,
            }
            for s in e.slots
        ]
        return {
            "epoch": e.epoch,
            "ts": asyncio.get_running_loop().time(),
            "model": {
                "fingerprint": e.fingerprint,
                "path": "toy.gguf",
                "size": 1,
                "n_vocab": N_VOCAB,
                "n_ctx_train": e.n_ctx_train,
            },
            "kv_unified": True,
            "swa": {"n_swa": 0, "full": True},
            "recurrent": e.recurrent,
            "share": e.share,
            "kv_bytes_per_token": 1024,
            "n_slots": e.n_slots,
            "n_ctx_slot": e.n_ctx_slot,
            "max_pools": e.max_pools,
            "n_deferred": e.n_deferred,
            "cells": self.cells(),
            "saved": e.saved.usage(),
            "n_decoded_cum": sum(s.n_decoded_cum for s in e.slots),
            "n_prompt_cum": e.n_prompt_cum,
            "service": {"state": "prompt" if self.n_service else "idle", "seq": -1, "n_tokens": self.n_service},
            "slots": slots,
            "flags": {} if e.n_batch is None else {"n_batch": e.n_batch},
            "finished": list(e.finished),
        }

    async def _render(self, request: web.Request) -> dict[str, Any]:
        self.engine.wake()
        asked = await _body(request)
        try:
            lists, media = self.engine.template.render(str(asked.get("path")), asked.get("body") or {})
        except (Refused, KeyError, TypeError, AttributeError) as e:
            raise HookError(400, str(e)) from e
        answer = {"tokens": lists[0], "has_media": media, "n_prompts": len(lists)}
        return answer | {"prompts": lists} if len(lists) > 1 else answer

    # mutations -----------------------------------------------------------------------------------------------------

    async def _own(self, request: web.Request) -> dict[str, Any]:
        asked = await _body(request)
        self._check(asked["id"])
        self._owner = (asked["id"], time.monotonic() + asked["ttl_s"])
        return {"id": asked["id"], "ttl_s": asked["ttl_s"]}

    @property
    def owner(self) -> str | None:
        return self._owner[0] if self._owner is not None and self._owner[1] > time.monotonic() else None

    def check_owner(self, request: web.Request) -> None:
        self._check(request.headers.get("x-polykv-owner"))

    def _check(self, who: str | None) -> None:
        if self._owner is not None and self.owner is not None and who != self.owner:
            left_ms = int((self._owner[1] - time.monotonic()) * 1e3)
            raise HookError(409, f"pools are managed by '{self.owner}'", owner=self.owner, ttl_ms=left_ms)

    def pool(self, seq: int) -> PoolSeq:
        for pool in self.engine.pools:
            if pool.seq == seq:
                return pool
        raise HookError(400, f"sequence {seq} is out of range")

    def target(self, seq: int) -> PoolSeq:
        if seq >= 0:
            pool = self.pool(seq)
            if pool.state != "free":
                raise HookError(409, f"pool sequence {seq} is in use")
            return pool
        free = [p for p in self.engine.pools if p.state == "free"]
        if not free:
            raise HookError(503, "no free pool sequence")
        return free[0]

    async def _free(self, request: web.Request) -> dict[str, Any]:
        self.check_owner(request)
        pool = self.pool(int(request.match_info["seq"]))
        if pool.state != "ready":
            raise HookError(409 if pool.state == "busy" else 410, f"sequence {pool.seq} is {pool.state}")
        freed = {"seq": pool.seq, "gen": pool.gen, "tag": pool.tag, "n_tokens": len(pool.tokens)}
        n_free = self.engine.cache.free()
        self._clear(pool)
        return freed | {"n_cells_freed": self.engine.cache.free() - n_free, "cells": self.cells()}

    def _clear(self, pool: PoolSeq) -> None:
        pool.cut(0)
        pool.state, pool.tag, pool.parent_seq, pool.branch_pos, pool.n_attach = "free", "", -1, 0, 0

    async def _operate(self, request: web.Request) -> dict[str, Any]:
        self.check_owner(request)
        asked = await _body(request)
        op = asked.get("op")
        if op not in OPS:
            raise HookError(400, '"op" must be "materialize", "snapshot", "save", "load", "clear" or "cells"')
        if op in ("save", "load"):
            return await self._saving.move(request, op, asked)
        self.awake()
        if op == "snapshot":
            return self._snapshot(asked)
        if op == "clear":
            return self._clear_slot(asked)
        if op == "cells":
            return self._where()
        job = asyncio.ensure_future(self._materialize(asked))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.shield(job)
        finally:
            if self.engine.stops_when_left:
                job.cancel()

    def awake(self) -> None:
        self.engine.wake()
        if self.engine.share != "ok":
            raise HookError(501, self.engine.share)

    def _where(self) -> dict[str, Any]:
        def runs(sequence: Sequence) -> list[list[int]]:
            found: list[list[int]] = []
            for position, cell in enumerate(sequence.cells):
                if not found or found[-1][2] + position - found[-1][0] != cell:
                    found.append([position, position, cell])
                found[-1][1] += 1
            return found

        e = self.engine
        ready = [{"seq": p.seq, "gen": p.gen, "runs": runs(p)} for p in e.pools if p.state == "ready"]
        slots = [{"id": s.id, "id_task": s.id_task if s.state != "idle" else -1, "runs": runs(s)} for s in e.slots]
        return {"epoch": e.epoch, "pools": ready, "slots": slots}

    def _clear_slot(self, asked: dict[str, Any]) -> dict[str, Any]:
        id_slot = int(asked.get("id_slot", -1))
        if not 0 <= id_slot < self.engine.n_slots:
            raise HookError(400, f'"id_slot" must be between 0 and {self.engine.n_slots - 1}')
        slot, n_free = self.engine.slots[id_slot], self.engine.cache.free()
        if slot.state != "idle":
            raise HookError(409, f"slot {id_slot} is busy")
        n = len(slot.tokens)
        slot.cut(0)
        slot.n_pool_shared, slot.pool_seq = 0, -1
        freed = self.engine.cache.free() - n_free
        return {"id_slot": id_slot, "n_tokens": n, "n_cells_freed": freed, "cells": self.cells()}

    def _snapshot(self, asked: dict[str, Any]) -> dict[str, Any]:
        id_slot, n = int(asked.get("id_slot", -1)), int(asked.get("n_tokens", -1))
        if not 0 <= id_slot < self.engine.n_slots:
            raise HookError(400, f"slot {id_slot} is out of range")
        slot = self.engine.slots[id_slot]
        if n > len(slot.tokens) or not slot.tokens:
            raise HookError(409, f"slot {id_slot} has {len(slot.tokens)} tokens")
        if self.engine.recurrent and 0 <= n < len(slot.tokens):
            raise HookError(501, f"the state of this model cannot be cut at {n} tokens")
        pool = self.target(int(asked.get("seq", -1)))
        pool.share_from(slot, len(slot.tokens) if n < 0 else n)
        self.ready(pool, asked, -1, 0)
        slot.n_pool_shared = max(slot.n_pool_shared, len(pool.tokens))
        slot.pool_seq, slot.pool_gen, slot.n_of_pool = pool.seq, pool.gen, len(pool.tokens)
        answer = self.answer(pool, len(pool.tokens), 0)
        return answer | {"tokens": pool.tokens} if asked.get("want_tokens") else answer

    async def _materialize(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens, parent_seq = asked.get("tokens"), int(asked.get("parent_seq", -1))
        if not isinstance(tokens, list) or not tokens:
            raise HookError(400, "'tokens' must be a list of token ids")
        if any(not isinstance(t, int) or not 0 <= t < N_VOCAB for t in tokens):
            raise HookError(400, "token out of vocabulary")
        if len(tokens) >= self.engine.n_ctx_slot:
            said = f"the prefix ({len(tokens)} tokens) exceeds the context of a slot ({self.engine.n_ctx_slot} tokens)"
            raise HookError(400, said, n_tokens=len(tokens), n_ctx=self.engine.n_ctx_slot)
        async with self._service:
            shared, source = 0, Sequence()
            if parent_seq >= 0:
                parent = self.pool(parent_seq)
                if parent.state != "ready":
                    raise HookError(410, f"no pool in sequence {parent_seq}")
                shared = int(asked.get("branch_pos", -1))
                common = lcp(parent.tokens, tokens)
                shared = common if shared < 0 else shared
                if shared > common:
                    raise HookError(409, f"tokens differ from the parent at {common}", divergence_pos=common)
                source, shared = parent, self.engine.n_usable(parent, min(shared, len(tokens) - 1))
            pool = self.target(int(asked.get("seq", -1)))
            need, free = len(tokens) - shared, self.engine.cache.available()
            if need > free:
                raise HookError(507, f"need {need} cells, {free} free", need=need, free=free)
            pool.state = "busy"
            try:
                pool.share_from(source, shared)
                for i in range(shared, len(tokens), BATCH):
                    batch = tokens[i : i + BATCH]
                    await asyncio.sleep(self.engine.prefill_s * len(batch))
                    self.engine.cache.take(pool, batch)
                    self.n_service = len(pool.tokens)
                pool.keep_before(len(tokens))
            except OutOfCells as e:
                self._clear(pool)
                raise HookError(507, str(e), need=e.need, free=e.free) from e
            except BaseException:
                self._clear(pool)
                raise
            finally:
                self.n_service = 0
            self.ready(pool, asked, parent_seq, shared)
            if isinstance(source, PoolSeq):
                source.n_attach += 1
            self.n_materialized += 1
            self.n_processed += need
            return self.answer(pool, shared, need)

    def ready(self, pool: PoolSeq, asked: dict[str, Any], parent_seq: int, branch_pos: int) -> None:
        pool.state, pool.tag = "ready", str(asked.get("tag", ""))
        pool.gen += 1
        pool.parent_seq, pool.branch_pos, pool.n_attach = parent_seq, branch_pos, 0

    def answer(self, pool: PoolSeq, n_cached: int, n_processed: int) -> dict[str, Any]:
        return pool.as_json() | {"n_cached": n_cached, "n_processed": n_processed, "t_ms": 0.1}


async def _body(request: web.Request) -> dict[str, Any]:
    if not await request.read():
        return {}
    try:
        body = await request.json()
    except ValueError as e:
        raise HookError(400, f"parse error: {e}") from e
    if not isinstance(body, dict):
        raise HookError(400, "an object is needed")
    return body
