"""``EngineClient``: the one way to llama-server. What clients send goes through it as it is (``relay``); here is what
the proxy itself asks of the engine and its hooks.

Reads that change nothing (stats, list, render, props, health) are tried up to three times, all else once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from polykv_proxy.errors import (
    PromptTooLarge,
    SavedGone,
    UpstreamError,
    UpstreamLoading,
    UpstreamUnavailable,
)
from polykv_proxy.upstream.errors import map_client_error, map_hook_answer
from polykv_proxy.upstream.plain import PlainSlot, read_slots
from polykv_proxy.upstream.relay import EngineRelay
from polykv_proxy.upstream.wire import (
    CellMap,
    Cleared,
    Freed,
    LoadedSlot,
    Materialized,
    PoolList,
    Rendered,
    Saved,
    Stats,
    Tokens,
)

HOOKS = "/polykv/engine"
READ_S = 5.0
RENDER_S = 30.0
MUTATE_S = 120.0
STATE_S = 600.0
"""A state may be gigabytes, and its file is written and read with the lowest priority."""

LOAD_S = 60.0
"""A disk that takes longer than this for one state is no help: a prefill is on its way sooner."""

COUNTS = {
    "/chat/completions": "/v1/chat/completions/input_tokens",
    "/v1/chat/completions": "/v1/chat/completions/input_tokens",
    "/v1/messages": "/v1/messages/count_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
}
"""llama-server's own routes that count the tokens of a body, media too. It has none for completions."""

RENDERS_AT_ONCE = 2
"""A template can take minutes, and the engine goes on with it when nobody listens: its other threads stay free."""
RENDER_BYTES_PER_TOKEN, RENDER_BYTES = 256, 64 << 10
"""A body larger than this times the context, plus that, cannot fit, and is not rendered."""

Answer = TypeVar("Answer", bound=BaseModel)


class EngineClient(EngineRelay):
    def __init__(self, base_url: str, api_key: str | None = None):
        super().__init__(base_url, api_key)
        self.owner: str | None = None
        self.n_ctx: int | None = None
        """The context of one slot, as soon as the stats said it."""
        self.n_ctx_train: int | None = None
        """That of the model, likewise."""
        self._renders = asyncio.Semaphore(RENDERS_AT_ONCE)

    # Reads that change nothing -------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        return await self._read(lambda: self._hook("GET", "/stats", None, "stats", READ_S), Stats)

    async def list_pools(self) -> PoolList:
        return await self._read(lambda: self._hook("GET", "/pools", None, "list", READ_S), PoolList)

    async def render(self, path: str, body: dict[str, Any]) -> Rendered:
        """Tokenize a body exactly as the route ``path`` would. Waits for its turn; leaving closes the connection.

        Raises:  RequestError (400) when the route would refuse it, PromptTooLarge (400) without asking
        """
        asked = orjson.dumps({"path": path, "body": body}, option=orjson.OPT_NON_STR_KEYS)
        if self.n_ctx is not None and len(asked) > RENDER_BYTES_PER_TOKEN * self.n_ctx + RENDER_BYTES:
            raise PromptTooLarge(n_bytes=len(asked), n_ctx=self.n_ctx, n_ctx_train=self.n_ctx_train)
        async with self._renders:
            answer = await _retry(lambda: self._hook("POST", "/render", asked, "render", RENDER_S))
        try:
            return Rendered.read(answer)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise UpstreamError(f"render: the engine's answer cannot be read ({e})") from e

    async def count(self, path: str, body: dict[str, Any]) -> int | None:
        """Tokens of a chat's body with all its media; None when there is no such count for the route ``path``.

        Waits for its turn as ``render`` does: the engine decodes pictures for it, and fetches those that are addresses.

        Raises:  PolyKVError when the engine cannot count it; the route will refuse it in its own words
        """
        if path not in COUNTS:
            return None
        asked = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        async with self._renders:
            answer = await _retry(lambda: self._json("POST", COUNTS[path], asked, "count", RENDER_S))
        n_tokens = answer.get("input_tokens")
        if not isinstance(n_tokens, int) or n_tokens < 0:
            raise UpstreamError("count: the engine's answer has no input_tokens")
        return n_tokens

    async def props(self) -> dict[str, Any]:
        """llama-server's own ``/props``."""
        return await _retry(lambda: self._json("GET", "/props", None, "props", READ_S))

    async def slots(self) -> list[PlainSlot] | None:
        """llama-server's own ``/slots``; None when it does not show them. Wakes one that sleeps.

        Raises:  UpstreamUnavailable, UpstreamLoading (503), UpstreamTimeout (504)
        """
        try:
            async with asyncio.timeout(READ_S):
                async with await self.open("GET", "/slots") as response:
                    raw = await response.read()
        except TimeoutError as e:
            raise map_client_error(e, "slots") from e
        if response.status == 503:
            raise UpstreamLoading("slots: the engine is not ready")
        try:
            return read_slots(orjson.loads(raw)) if response.status == 200 else None
        except orjson.JSONDecodeError:
            return None

    async def health(self) -> None:
        """Return when the engine serves.

        Raises:  UpstreamLoading (503), UpstreamUnavailable (503)
        """
        await self._json("GET", "/health", None, "health", READ_S)

    # Changes: once, never again ------------------------------------------------------------------------------------

    async def materialize(
        self, tokens: Tokens, *, tag: str, parent_seq: int = -1, branch_pos: int = 0, seq: int = -1
    ) -> Materialized:
        """Prefill ``[branch_pos, L)`` behind the parent's cells into a pool sequence. Takes as long as it takes.

        When the connection breaks the engine may still go on: list and look for the tag.

        Raises:  SequenceGone, PrefixMismatch, SeqIdsExhausted, KvExhausted, SharingUnsupported, RequestError
        """
        op = {
            "op": "materialize",
            "tokens": tokens.tolist(),
            "tag": tag,
            "parent_seq": parent_seq,
            "branch_pos": branch_pos,
            "seq": seq,
        }
        return _parse(Materialized, await self._hook("POST", "/pools", orjson.dumps(op), "materialize", None), op["op"])

    async def snapshot(
        self, id_slot: int, *, tag: str, n_tokens: int = -1, seq: int = -1, want_tokens: bool = False
    ) -> Materialized:
        """Share the first ``n_tokens`` cells of a slot (-1 = all), also while it decodes.

        Raises:  SessionNotResident when the slot has fewer, SeqIdsExhausted
        """
        op: dict[str, Any] = {"op": "snapshot", "id_slot": id_slot, "n_tokens": n_tokens, "tag": tag, "seq": seq}
        if want_tokens:
            op["want_tokens"] = True
        return _parse(
            Materialized, await self._hook("POST", "/pools", orjson.dumps(op), "snapshot", MUTATE_S), op["op"]
        )

    async def free(self, seq: int) -> Freed:
        """Give a pool sequence back; its cells live on while another sequence holds them.

        Raises:  SequenceGone
        """
        return _parse(Freed, await self._hook("DELETE", f"/pools/{seq}", None, "free", MUTATE_S), "free")

    async def save(
        self,
        *,
        seq: int = -1,
        id_slot: int = -1,
        start: int = 0,
        n_tokens: int = -1,
        tag: str,
        to: Literal["ram", "disk", "both"] = "ram",
    ) -> Saved:
        """Copy ``[start, n_tokens)`` (-1 = all) of a pool sequence or a slot out of the cache; the source stays.

        Either ``seq`` or ``id_slot``, which may be decoding. The same tag is overwritten. ``both``: when the disk fails
        the copy in memory stays, and the answer says so in ``disk_error``.

        When the connection breaks the state may be saved all the same: list and look for the tag.

        Raises:  SavedBudget, SavingRefused, SavingUnsupported, SequenceGone
        """
        op: dict[str, Any] = {"op": "save", "from": start, "n_tokens": n_tokens, "tag": tag, "to": to}
        op |= {"seq": seq} if seq >= 0 else {"id_slot": id_slot}
        return _parse(Saved, await self._hook("POST", "/pools", orjson.dumps(op), "save", STATE_S), op["op"])

    async def write_saved(self, tag: str) -> Saved:
        """Have what is in memory under this tag written to the disk, too; what it was copied from may have changed.

        When the connection breaks it may be written all the same: list and look for the tag.

        Raises:  SavedGone when nothing (any more) is in memory under it, SavedBudget, SavingUnsupported
        """
        op = orjson.dumps({"op": "save", "tag": tag, "to": "disk"})
        return _parse(Saved, await self._hook("POST", "/pools", op, "write", STATE_S), "write")

    async def load_pool(self, tag: str, *, parent_seq: int = -1, start: int = -1, seq: int = -1) -> Materialized:
        """Bring a saved state into a free pool sequence, behind ``[0, start)`` of the parent's. No prefill.

        ``parent_seq``: any ready pool with these tokens; needed when the state does not start at 0. ``start``: where it
        is believed to start, -1 = wherever; within the saved range: so many tokens are shared with the parent, if the
        model can. Nothing makes room for it.

        When the connection breaks the engine may have loaded it: list and look for the tag.

        Raises:  SavedGone; SequenceGone when the parent is not there, PrefixMismatch when it is another one;
                 KvExhausted, SeqIdsExhausted, SavingRefused, SavingUnsupported, RequestError
        """
        op = {"op": "load", "tag": tag, "seq": seq, "parent_seq": parent_seq, "branch_pos": start}
        return _parse(Materialized, await self._hook("POST", "/pools", orjson.dumps(op), "load", LOAD_S), op["op"])

    async def load_slot(self, tag: str, *, id_slot: int, parent_seq: int = -1, start: int = -1) -> LoadedSlot:
        """Bring a saved state into an idle slot instead, in place of what that held. Otherwise as ``load_pool``.

        Raises:  as ``load_pool``; SavingRefused when the slot is busy
        """
        op = {"op": "load", "tag": tag, "id_slot": id_slot, "parent_seq": parent_seq, "branch_pos": start}
        return _parse(LoadedSlot, await self._hook("POST", "/pools", orjson.dumps(op), "load", LOAD_S), op["op"])

    async def clear_slot(self, id_slot: int) -> Cleared:
        """Drop what an idle slot holds; what it shares with a pool stays with the pool.

        Raises:  SavingRefused when the slot is busy, SavingUnsupported
        """
        op = {"op": "clear", "id_slot": id_slot}
        return _parse(Cleared, await self._hook("POST", "/pools", orjson.dumps(op), "clear", MUTATE_S), op["op"])

    async def forget_saved(self, tag: str, place: Literal["ram", "disk"] | None = None) -> None:
        """Forget what is saved under this tag, in one place or in both. No error when there is nothing.

        An engine that does not know ``write_saved`` forgets it in both.

        Raises:  SavingUnsupported
        """
        where = f"?in={place}" if place is not None else ""
        try:
            await self._hook("DELETE", f"/saved/{quote(tag, safe='')}{where}", None, "forget", MUTATE_S)
        except SavedGone:
            return

    async def cells(self) -> CellMap:
        """Ask which cells each pool and slot holds. Waits for the end of a batch."""
        return _parse(CellMap, await self._hook("POST", "/pools", b'{"op":"cells"}', "cells", MUTATE_S), "cells")

    async def lease(self, owner: str, ttl_s: float) -> None:
        """Become, or stay, the one proxy that may change pools; ``ttl_s`` 0 gives it up.

        Raises:  EngineOwned
        """
        await self._hook("PUT", "/owner", orjson.dumps({"id": owner, "ttl_s": ttl_s}), "owner", READ_S)

    # Below ---------------------------------------------------------------------------------------------------------

    async def _read(self, call: Callable[[], Awaitable[dict[str, Any]]], model: type[Answer]) -> Answer:
        return _parse(model, await _retry(call), model.__name__)

    async def _hook(
        self, method: str, path: str, body: bytes | None, op: str, timeout_s: float | None
    ) -> dict[str, Any]:
        return await self._json(method, HOOKS + path, body, op, timeout_s)

    async def _json(
        self, method: str, path: str, body: bytes | None, op: str, timeout_s: float | None
    ) -> dict[str, Any]:
        headers = [(b"Content-Type", b"application/json")] if body is not None else []
        if self.owner is not None and path.startswith(HOOKS):
            headers.append((b"x-polykv-owner", self.owner.encode()))
        try:
            async with asyncio.timeout(timeout_s):
                async with await self.open(method, path, headers, body) as response:
                    raw = await response.read()
        except TimeoutError as e:
            raise map_client_error(e, op) from e
        try:
            answer = orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError as e:
            if response.status == 200:
                raise UpstreamError(f"{op}: the engine's answer is not JSON ({e})") from e
            answer = None
        if response.status != 200:
            has_key = self._api_key is not None
            raise map_hook_answer(response.status, answer, op, has_key=has_key, n_ctx_train=self.n_ctx_train)
        if not isinstance(answer, dict):
            raise UpstreamError(f"{op}: the engine's answer is not an object")
        return answer


def _parse(model: type[Answer], answer: dict[str, Any], op: object) -> Answer:
    try:
        return model.model_validate(answer)
    except ValidationError as e:
        where = ", ".join(".".join(map(str, item["loc"])) for item in e.errors(include_url=False)[:3])
        raise UpstreamError(f"{op}: the engine's answer cannot be read ({where})") from e


Given = TypeVar("Given")


async def _retry(call: Callable[[], Awaitable[Given]]) -> Given:
    """Try a read up to three times while the engine is away."""
    async for attempt in AsyncRetrying(
        stop=stop_after_attempt(3),
        wait=wait_exponential(multiplier=0.05, max=0.2),
        retry=retry_if_exception_type(UpstreamUnavailable),
        reraise=True,
    ):
        with attempt:
            return await call()
    raise AssertionError("tenacity gives a result or raises")
