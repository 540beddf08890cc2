"""The fake engine itself: HTTP, its life (kill, restart, loading), slots and decoding. Hooks live in ``hooks``."""

import asyncio
import itertools
import secrets
import time
from collections import deque
from typing import Any

import xxhash
from aiohttp import web

from tests.fake_engine.cache import Cache, OutOfCells, PoolSeq, Sequence, Slot, lcp
from tests.fake_engine.dialects import Turn, dialect, dump
from tests.fake_engine.faults import Action, Faults, Received
from tests.fake_engine.hooks import Hooks
from tests.fake_engine.saved import SavedStates
from tests.fake_engine.toy import ATTACHABLE, Refused, Template
from tests.serving import Runner

FULL = "the KV cache is full: no cells left for this prompt"


def error(status: int, message: str, kind: str, **extra: Any) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "type": kind, **extra}}, status=status)


class FakeEngine:
    """``async with FakeEngine() as engine: engine.url``.

    ``token_s``       time per decoded token; ``prefill_s`` per prompt token
    ``stops_when_left``  a pool whose client leaves is prefilled no further, as by an engine that sees it; else the
                         answer is what got lost
    ``byte_by_byte``  every piece of a stream leaves one byte at a time
    ``n_batch``       tokens of a prompt in one batch; None: all of them, and the stats do not say so
    ``n_gen``         tokens to decode when the body sets no limit
    ``loading``       everything is 503, as while a model loads
    ``slots_shown``   False: started with --no-slots, and ``/slots`` is a 501
    ``empties_idle``  slots at rest are emptied when a request begins (llama-server's --cache-idle-slots, unified)
    ``router``        as in router mode: no slots of its own
    ``recurrent``     a sequence is one state: it goes on from its end, or from where its state was kept
    ``saved``         what is kept outside the cache; no budget for it unless a test gives one
    """

    def __init__(
        self,
        *,
        hooks: bool = True,
        n_slots: int = 4,
        max_pools: int = 16,
        n_cells: int = 16384,
        n_ctx_slot: int | None = None,
        n_ctx_train: int = 1 << 20,
        share: str = "ok",
        api_key: str | None = None,
        fingerprint: str = "toy-model",
        save_ram: int = 0,
        save_disk: int = 0,
        recurrent: bool = False,
    ):
        self.with_hooks, self.n_slots, self.max_pools, self.n_cells = hooks, n_slots, max_pools, n_cells
        self.n_ctx_slot, self.n_ctx_train = n_ctx_slot or n_cells, n_ctx_train
        self.share, self.api_key, self.fingerprint, self.recurrent = share, api_key, fingerprint, recurrent
        self.saved = SavedStates(self, save_ram, save_disk)
        self.template = Template()
        self.faults = Faults()
        self.received: list[Received] = []
        self.token_s = self.prefill_s = 0.0
        self.stops_when_left = False
        self.n_gen = 8
        self.n_batch: int | None = None
        self.byte_by_byte = False
        self.loading = False
        self.slots_shown, self.empties_idle, self.router = True, False, False
        self.marker: str | None = None
        self.port = 0
        self.n_starts = 0
        self._runner: Runner | None = None
        self._ending: asyncio.Task[None] | None = None

    # life ----------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "FakeEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Fresh state, new epoch, the same port as before if it ran before."""
        await self._ended()
        self.n_starts += 1
        self.started_s = int(time.time())
        self.sleeping = False
        self._new_context()
        self.saved.restarted()
        self._tasks = itertools.count(1)
        self._slot_free = asyncio.Condition()
        self._batch = asyncio.Lock()
        self.n_deferred = 0
        self.hooks = Hooks(self)
        app = self._application()
        self._runner = Runner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        self.port = await self._runner.listen(self.port)

    def _new_context(self) -> None:
        self.epoch = f"{secrets.token_hex(6)}.{self.n_starts}"
        self.cache = Cache(self.n_cells)
        self.slots = [Slot(id=i) for i in range(self.n_slots)]
        self.service = Sequence()
        # The service slot sits right above the slots, the pools above it.
        self.pools = [PoolSeq(seq=self.n_slots + 1 + i) for i in range(self.max_pools if self.with_hooks else 0)]
        self.cache.sequences, self.cache.slots = [*self.slots, self.service, *self.pools], self.slots
        self.finished: deque[dict[str, int]] = deque(maxlen=64)
        self.n_prompt_cum = 0

    def sleep(self) -> None:
        """As --sleep-idle-seconds: the context is gone; the next work wakes it up."""
        self.sleeping = True
        self._new_context()

    def wake(self) -> None:
        self.sleeping = False

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._outer], client_max_size=1 << 28)
        if self.with_hooks:
            self.hooks.add_routes(app)
        for path in ATTACHABLE:
            app.router.add_post(path, self._completion)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            app.router.add_post(path + ("/count_tokens" if path == "/v1/messages" else "/input_tokens"), self._count)
        app.router.add_get("/health", _ok({"status": "ok"}))
        app.router.add_get("/v1/models", _ok({"object": "list", "data": [{"id": "toy", "object": "model"}]}))
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._slots_view)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/apply-template", self._apply_template)
        return app

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def kill(self) -> None:
        """As kill -9: every connection is reset, nothing listens. Returns when it is over, whoever killed it."""
        self._die()
        await self._ended()

    def _die(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            self._ending = asyncio.create_task(self._end(runner, self.hooks))

    async def _ended(self) -> None:
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _end(self, runner: Runner, hooks: Hooks) -> None:
        await runner.deafen()
        for handler in list(runner.server.connections if runner.server else []):
            if handler.transport is not None:
                handler.transport.abort()
        await hooks.stop()
        await runner.cleanup()

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    def die(self) -> Action:
        """A fault action: the engine is killed at that point."""

        async def action(request: web.Request) -> None:
            self._die()
            await asyncio.sleep(3600)

        return action

    def on(self, place: str, phase: str, action: Action, *, times: int | None = 1) -> None:
        self.faults.on(place, phase, action, times=times)

    # questions of tests --------------------------------------------------------------------------------------------

    def requests(self, path: str) -> list[Received]:
        return [r for r in self.received if r.path == path]

    def ready_pools(self) -> list[PoolSeq]:
        return [p for p in self.pools if p.state == "ready"]

    # HTTP ----------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _outer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        received = Received(request.method, request.path, request.query_string, list(request.raw_headers), b"")
        self.received.append(received)
        try:
            received.body = await request.read()
            answer = await self._answer(request, handler)
        except (asyncio.CancelledError, ConnectionError):
            received.end(left=True)
            raise
        received.end(left=False)
        return answer

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.loading:
            return error(503, "Loading model", "unavailable_error")
        public = request.path in ("/health", "/v1/health", "/models", "/v1/models")
        if self.api_key and not public and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return error(401, "Invalid API Key", "authentication_error")
        early = await self.faults.at(request.path, "request", request)
        if early is not None:
            return early
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPNotFound:
            return error(404, "File Not Found", "not_found_error")
        except Refused as e:
            return error(400, str(e), "invalid_request_error")
        return answer

    async def _props(self, request: web.Request) -> web.Response:
        if self.router:
            return web.json_response({"role": "router", "model_path": "none"})
        return web.json_response(
            {
                "default_generation_settings": {"n_ctx": self.n_ctx_slot},
                "total_slots": self.n_slots,
                "model_path": "toy.gguf",
                "endpoint_slots": self.slots_shown,
                "is_sleeping": self.sleeping,
                "media_marker": self.marker or f"<__media_{self.epoch}__>",
            }
        )

    async def _slots_view(self, request: web.Request) -> web.Response:
        if self.router:
            return error(400, "model name is missing from the request", "invalid_request_error")
        if not self.slots_shown:
            return error(501, "This server does not support slots endpoint. Start it with `--slots`", "not_supported")
        self.wake()
        return web.json_response([self._slot_view(s) for s in self.slots])

    def _slot_view(self, slot: Slot) -> dict[str, Any]:
        view = {"id": slot.id, "n_ctx": self.n_ctx_slot, "is_processing": slot.state != "idle"}
        if slot.id_task < 0:
            return view  # it had nothing to do yet
        following = [{"has_next_token": slot.state == "generating", "n_decoded": slot.n_decoded}]
        return view | {"id_task": slot.id_task, "n_prompt_tokens": len(slot.tokens), "next_token": following}

    async def _metrics(self, request: web.Request) -> web.Response:
        n = sum(s.n_decoded_cum for s in self.slots)
        started = {"Process-Start-Time-Unix": str(self.started_s)}
        return web.Response(text=f"llamacpp:tokens_predicted_total {n}\n", headers=started)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.template.tokenizer.encode((await request.json())["content"])})

    async def _count(self, request: web.Request) -> web.Response:
        lists, _ = self.template.render(request.path.rpartition("/")[0], await request.json())
        return web.json_response({"input_tokens": len(lists[0])})

    async def _apply_template(self, request: web.Request) -> web.Response:
        lists, _ = self.template.render("/v1/chat/completions", await request.json())
        return web.json_response({"prompt": self.template.tokenizer.decode(lists[0])})

    # completions ---------------------------------------------------------------------------------------------------

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError as e:
            return error(400, f"parse error: {e}", "invalid_request_error")
        lists, media = self.template.render(request.path, body)
        for tokens in lists:
            if len(tokens) >= self.n_ctx_slot:
                return error(
                    400,
                    f"request ({len(tokens)} tokens) exceeds the available context size ({self.n_ctx_slot} tokens)",
                    "exceed_context_size_error",
                    n_prompt_tokens=len(tokens),
                    n_ctx=self.n_ctx_slot,
                )
        pool_slot = int(body.get("shared_pool_slot", -1))
        if self.with_hooks and pool_slot >= 0 and pool_slot not in {p.seq for p in self.pools}:
            return error(400, f"shared_pool_slot {pool_slot} is out of range", "polykv_error")
        jobs = [(i * body.get("n", 1) + j, tokens) for i, tokens in enumerate(lists) for j in range(body.get("n", 1))]
        self.wake()
        out = dialect(request.path, body)
        stream: web.StreamResponse | None = None
        turns: list[Turn] = []
        n_piece = 0
        for index, tokens in jobs:
            slot = await self._take_slot(int(body.get("id_slot", -1)), tokens)
            try:
                turn = self._begin(slot, tokens, body, index, media)
                answer = await self.faults.at(request.path, "prefill", request)
                if answer is not None:
                    return answer
                await asyncio.sleep(self.prefill_s * (turn.n_prompt - turn.n_cached))
                answer = await self._prefill(slot, tokens[turn.n_cached :], request)
                if answer is not None:
                    return answer
                slot.state = "generating"
                for text in self._decode(slot, turn, body):
                    await asyncio.sleep(self.token_s)
                    if not body.get("stream"):
                        continue
                    if stream is None:
                        stream = await self._open_stream(request)
                    for piece in out.piece(turn, text):
                        await self._write(stream, request, piece, n_piece)
                        n_piece += 1
                turns.append(turn)
                self._finish(slot, turn)
                if body.get("stream") and stream is not None:
                    for piece in out.last(turn):
                        await self._write(stream, request, piece, n_piece)
                        n_piece += 1
            except OutOfCells:
                slot.cut(0)
                failed = {"code": 503, "message": FULL, "type": "unavailable_error"}
                if stream is None and not body.get("stream"):
                    return web.json_response({"error": failed}, status=503)
                stream = stream or await self._open_stream(request)
                await stream.write(out.failed(failed))
                await stream.write_eof()
                return stream
            finally:
                await self._release(slot)
        answer = await self.faults.at(request.path, "reply", request)
        if answer is not None:
            return answer
        if stream is None:
            return web.Response(body=dump(out.whole(turns)), content_type="application/json", charset="utf-8")
        if out.done:
            await self._write(stream, request, out.done, n_piece)
        await stream.write_eof()
        return stream

    async def _open_stream(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        return stream

    async def _write(self, stream: web.StreamResponse, request: web.Request, piece: bytes, n: int) -> None:
        await self.faults.at(request.path, f"chunk:{n}", request)
        if not self.byte_by_byte:
            await stream.write(piece)
            return
        for i in range(len(piece)):
            await stream.write(piece[i : i + 1])

    async def _take_slot(self, id_slot: int, tokens: list[int]) -> Slot:
        async with self._slot_free:
            self.n_deferred += 1
            try:
                while True:
                    wanted = [self.slots[id_slot % self.n_slots]] if id_slot >= 0 else self.slots
                    idle = [s for s in wanted if s.state == "idle"]
                    if idle:
                        break
                    await self._slot_free.wait()
            finally:
                self.n_deferred -= 1
            slot = max(idle, key=lambda s: (lcp(s.tokens, tokens) > 0.5 * len(tokens), -s.t_last))
            slot.state, slot.id_task = "started", next(self._tasks)
            for other in self.slots if self.empties_idle else ():
                if other.state == "idle":
                    other.cut(0)
            return slot

    async def _prefill(self, slot: Slot, tokens: list[int], request: web.Request) -> web.Response | None:
        n_batch = self.n_batch or max(1, len(tokens))
        for at in range(0, len(tokens), n_batch):
            async with self._batch:
                batch = tokens[at : at + n_batch]
                slot.n_in_batch = len(batch)
                answer = await self.faults.at(request.path, "batch", request)
                if answer is not None:
                    return answer
                slot.n_in_batch = 0
                self.cache.take(slot, batch)
                slot.keep_before(slot.n_prompt)
        return None

    async def _release(self, slot: Slot) -> None:
        slot.n_in_batch = 0
        slot.state, slot.t_last = "idle", time.monotonic()
        async with self._slot_free:
            self._slot_free.notify_all()

    def _begin(self, slot: Slot, tokens: list[int], body: dict[str, Any], index: int, media: bool) -> Turn:
        n_past = 0
        if body.get("cache_prompt", True) and not media:
            self._attach(slot, tokens, body, self.n_usable(slot, lcp(slot.tokens, tokens)))
            n_past = self.n_usable(slot, min(lcp(slot.tokens, tokens), len(tokens) - 1))
        slot.n_pool_shared = min(slot.n_pool_shared, n_past)
        slot.cut(n_past)
        if not slot.n_pool_shared:
            slot.pool_seq = -1
        slot.state, slot.n_prompt, slot.n_cached, slot.n_decoded = "prompt", len(tokens), n_past, 0
        return Turn(slot.id, len(tokens), n_past, slot.n_pool_shared, index, reply_id=f"toy-{slot.id_task}")

    def n_usable(self, sequence: Sequence, n: int) -> int:
        """So many of its first ``n`` tokens can be gone on from."""
        if not self.recurrent or n == len(sequence.tokens):
            return n
        return max((at for at in sequence.kept if at <= n), default=0)

    def _attach(self, slot: Slot, tokens: list[int], body: dict[str, Any], n_own: int) -> None:
        seq, limit = int(body.get("shared_pool_slot", -1)), int(body.get("shared_prefix_n_tokens", -1))
        pool = next((p for p in self.pools if p.seq == seq and p.state == "ready"), None)
        if pool is None or self.share != "ok" or body.get("lora"):
            return
        if body.get("shared_pool_gen", pool.gen) != pool.gen:
            return
        if body.get("shared_pool_epoch", self.epoch) != self.epoch:
            return
        p = lcp(pool.tokens, tokens)
        p = self.n_usable(pool, p if limit < 0 else min(p, limit))
        if p <= 0 or (n_own >= p and slot.n_pool_shared >= p and self.is_attached(slot)):
            return
        if n_own > p and self.recurrent:
            return
        if n_own > p:  # it gives up its own copy of the beginning
            slot.cells[:p] = pool.cells[:p]
            slot.n_pool_shared = max(p, slot.n_pool_shared)
        else:
            slot.share_from(pool, p)
            slot.n_pool_shared = p
        slot.pool_seq, slot.pool_gen, slot.n_of_pool = seq, pool.gen, p
        pool.n_attach += 1

    def is_attached(self, slot: Slot) -> bool:
        """What was shared with a pool that is gone is not called shared any more."""
        pools = [p for p in self.pools if p.seq == slot.pool_seq and p.state == "ready"]
        return bool(pools) and pools[0].gen == slot.pool_gen and slot.n_pool_shared > 0

    def _decode(self, slot: Slot, turn: Turn, body: dict[str, Any]) -> Any:
        limit = next((body[k] for k in ("max_tokens", "n_predict", "max_output_tokens") if k in body), self.n_gen)
        room = self.n_ctx_slot - len(slot.tokens)
        turn.t_first = time.monotonic()
        for _ in range(min(limit if limit >= 0 else self.n_gen, room)):
            token = self._next_token(slot.tokens, turn.index)
            try:
                self.cache.take(slot, [token])
            except OutOfCells:
                turn.truncated, turn.stopped = True, "limit"
                return  # the patched engine ends this one request as truncated
            slot.n_decoded += 1
            slot.n_decoded_cum += 1
            text = chr(token)
            turn.pieces.append(text)
            yield text

    def _next_token(self, context: list[int], index: int) -> int:
        return 97 + xxhash.xxh64_intdigest(repr(context).encode(), seed=index) % 26

    def _finish(self, slot: Slot, turn: Turn) -> None:
        self.n_prompt_cum += turn.n_prompt - turn.n_cached
        self.finished.append(
            {
                "id_task": slot.id_task,
                "id_slot": slot.id,
                "n_prompt": turn.n_prompt,
                "n_cached": turn.n_cached,
                "n_pool": turn.pool_n,
                "n_decoded": len(turn.pieces),
            }
        )


def _ok(body: dict[str, Any]) -> Any:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body)

    return handler
