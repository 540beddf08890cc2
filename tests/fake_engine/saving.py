"""The hooks ``save``, ``load`` and ``forget`` of the fake engine, between its cache and what ``saved`` keeps."""

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fake_engine.cache import PoolSeq, Slot, tokens_hash
from tests.fake_engine.saved import HookError, State

if TYPE_CHECKING:
    from tests.fake_engine.hooks import Hooks

DEFAULTS = {"seq": -1, "id_slot": -1, "from": 0, "n_tokens": -1, "to": "ram", "parent_seq": -1, "branch_pos": -1}


class Saving:
    def __init__(self, hooks: "Hooks"):
        self.hooks, self.engine = hooks, hooks.engine

    async def move(self, request: web.Request, op: str, given: dict[str, Any]) -> dict[str, Any]:
        """In the engine's order: arguments, reading a file, waking up, and only then the cache."""
        asked = self._checked(op, given)
        slot = self.engine.slots[asked["id_slot"]] if asked["id_slot"] >= 0 else None
        if op == "save":
            self.hooks.awake()
            source = self.hooks.pool(asked["seq"]) if asked["seq"] >= 0 else slot
            return await self._save(request, source, asked)
        saved = self.engine.saved
        state = saved.ram.get(asked["tag"]) or saved.read(asked["tag"])
        self.hooks.awake()
        branch_pos = saved.check_load(state, asked)
        if slot is None:
            return self._load_pool(state, asked, branch_pos)
        return self._load_slot(state, asked, branch_pos, slot)

    def _checked(self, op: str, given: dict[str, Any]) -> dict[str, Any]:
        """The fields with their defaults."""
        asked: dict[str, Any] = DEFAULTS | {key: value for key, value in given.items() if value is not None}
        sequences = {-1, *(p.seq for p in self.engine.pools)}
        for key in ("seq", "parent_seq"):
            if asked[key] not in sequences:
                raise HookError(400, f'"{key}" must be -1 or a pool sequence')
        if asked["id_slot"] >= self.engine.n_slots:
            raise HookError(400, f'"id_slot" must be between 0 and {self.engine.n_slots - 1}')
        if not asked.get("tag") or "/" in asked["tag"]:
            raise HookError(400, '"tag" must name what is saved, without a slash')
        n_ends = (asked["seq"] >= 0) + (asked["id_slot"] >= 0)
        writes_memory = n_ends == 0 and asked["to"] == "disk"
        if op == "save" and n_ends != 1 and not writes_memory:
            raise HookError(400, 'exactly one of "seq" and "id_slot" must be given')
        if op == "load" and n_ends == 2:
            raise HookError(400, 'only one of "seq" and "id_slot" may be given')
        if asked["n_tokens"] == 0:
            raise HookError(400, '"n_tokens" must be positive, or -1 for all')
        if op == "save" and writes_memory and (asked["from"] != 0 or asked["n_tokens"] != -1):
            said = 'what is in memory is written whole: "from" and "n_tokens" need a "seq" or "id_slot"'
            raise HookError(400, said)
        if asked["to"] not in ("ram", "disk", "both"):
            raise HookError(400, '"to" must be "ram", "disk" or "both"')
        return asked

    async def _save(self, request: web.Request, source: PoolSeq | Slot | None, asked: dict[str, Any]) -> dict[str, Any]:
        saved = self.engine.saved
        state, answer = saved.save(source, asked)
        answer["cells"] = self.hooks.cells()
        if asked["to"] == "ram":
            return answer
        n_changes = saved.n_changes(state.tag)
        await self.engine.faults.at("save", "write", request)
        try:
            if saved.n_changes(state.tag) != n_changes:
                raise HookError(410, f"'{state.tag}' was forgotten or saved again while it was written")
            saved.write(state)
        except HookError as e:
            if not answer["in"]:
                raise
            return answer | {"disk_error": e.as_json()}
        if source is None:
            return answer | {"in": ["ram", "disk"], "t_write_ms": 0.1}
        return answer | {"in": [*answer["in"], "disk"], "t_write_ms": 0.1}

    def _load_pool(self, state: State, asked: dict[str, Any], branch_pos: int) -> dict[str, Any]:
        pool = self.hooks.target(asked["seq"])
        parent = self.engine.saved.parent_of(state, asked["parent_seq"], branch_pos)
        self.engine.saved.load(state, parent, pool, branch_pos)
        self.hooks.ready(pool, {"tag": state.tag}, parent.seq if parent is not None else -1, branch_pos)
        return self.hooks.answer(pool, len(pool.tokens), 0) | {"t_copy_ms": 0.1, "cells": self.hooks.cells()}

    def _load_slot(self, state: State, asked: dict[str, Any], branch_pos: int, slot: Slot) -> dict[str, Any]:
        """What the slot held goes only when the state is in the cache: both need room for a moment."""
        if slot.state != "idle":
            raise HookError(409, f"slot {slot.id} is busy")
        parent = self.engine.saved.parent_of(state, asked["parent_seq"], branch_pos)
        self.engine.saved.load(state, parent, slot, branch_pos)
        slot.n_pool_shared = slot.n_of_pool = branch_pos
        slot.t_last = time.monotonic()
        slot.pool_seq, slot.pool_gen = (parent.seq, parent.gen) if parent is not None else (-1, -1)
        return {
            "id_slot": slot.id,
            "tag": state.tag,
            "n_tokens": len(slot.tokens),
            "tokens_hash": tokens_hash(slot.tokens),
            "parent_seq": slot.pool_seq,
            "branch_pos": branch_pos,
            "n_pool_shared": branch_pos,
            "n_cached": len(slot.tokens),
            "n_processed": 0,
            "t_copy_ms": 0.1,
            "t_ms": 0.1,
            "cells": self.hooks.cells(),
        }

    async def forget(self, request: web.Request) -> dict[str, Any]:
        """Not over the queue: nothing wakes up for it."""
        self.hooks.check_owner(request)
        tag = request.match_info["tag"]
        self.engine.saved.forget(tag, request.query.get("in"))
        return {"tag": tag, "saved": self.engine.saved.usage()}
