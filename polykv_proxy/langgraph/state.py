"""What graphs keep of pools: the keys of a state, their reducers, and what is given to nodes beside the state.

Everything in the state is plain data, as checkpoints want it; clients and pacers are in ``PolyKVContext``.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from langgraph.runtime import get_runtime
from typing_extensions import TypedDict  # the one that LangGraph's own states are made of

from polykv_proxy.client import AdmissionPacer, AsyncAdmissionPacer, AsyncPolyKVClient, Capacity, PolyKVClient

T = TypeVar("T")


def take_last(left: T, right: T) -> T:
    """The one that was written last; several nodes may write in one step."""
    return right


def merge_polykv(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> dict[str, Any]:
    """Put two updates of ``polykv`` together; which one came first does not matter where both say when they were made.

    ``capacity``, and each of ``sessions`` by itself: the one with the later ``ts``. ``compactions``: the larger count.
    ``pools``, ``retired``: all of both, and no pool that is retired. Any other key: what was written later by ``at``,
    which ``polykv_update`` fills in; without that the right one.
    """
    out: dict[str, Any] = {}
    at: dict[str, Any] = {}
    for update in (left or {}, right or {}):
        for key, value in update.items():
            if key == "capacity":
                out[key] = _later(out.get(key), value)
            elif key == "sessions":
                had = out.get(key) or {}
                out[key] = {**had, **{name: _later(had.get(name), each) for name, each in (value or {}).items()}}
            elif key == "pools":
                out[key] = {**(out.get(key) or {}), **(value or {})}
            elif key == "compactions":
                out[key] = max(out.get(key) or 0, value or 0)
            elif key == "retired":
                out[key] = sorted({*(out.get(key) or ()), *(value or ())})
            elif key != "at":
                ts = (update.get("at") or {}).get(key)
                if ts is None or key not in at or ts >= at[key]:
                    out[key] = value
                    at.pop(key, None)
                    if ts is not None:
                        at[key] = ts
    if "pools" in out:
        gone = {str(each) for each in out.get("retired") or ()}
        out["pools"] = {name: each for name, each in out["pools"].items() if name not in gone}
    return {**out, "at": at} if at else out


def polykv_update(**fields: Any) -> dict[str, Any]:
    """An update of ``polykv`` that says when it was made: ``{"polykv": polykv_update(pool_id=7)}``."""
    now = time.time()
    plain = {name for name in fields if name not in ("capacity", "sessions", "pools", "compactions", "retired")}
    return {**fields, "at": dict.fromkeys(sorted(plain), now)} if plain else fields


class PolyKVState(TypedDict, total=False):
    """``polykv``: {pool_id, ancestor_pool_id, session_id, sessions: {id: {tps, ctx_headroom_tokens, pool_id, ts}},
    capacity: {…, ts}, pools: {id: {name, parent, prefix_len}}, compactions, retired: [pool ids]}; all of them may be
    missing. ``pools``: those that an agent made by its tools, ids as text.
    """

    polykv: Annotated[dict[str, Any], merge_polykv]
    capacity_ok: Annotated[bool, take_last]
    headroom_sessions: Annotated[int | None, take_last]
    mean_active_tps: Annotated[float | None, take_last]


@dataclass
class PolyKVContext:
    """``StateGraph(State, context_schema=PolyKVContext)``, ``graph.invoke(…, context=PolyKVContext(client=…))``

    ``client`` for graphs that are invoked, ``async_client`` for those that are awaited.
    """

    client: PolyKVClient | None = None
    async_client: AsyncPolyKVClient | None = None
    _pacers: dict[str, AdmissionPacer] = field(default_factory=dict, repr=False)
    _async_pacers: dict[str, AsyncAdmissionPacer] = field(default_factory=dict, repr=False)

    def pacer(self, pool_id: int | str) -> AdmissionPacer:
        """The pacer of this pool: ``with context.pacer(7).acquire(session_id=…): …``"""
        if self.client is None:
            raise ValueError("PolyKVContext has no client: give it one, or await the graph with async_client")
        return self._pacers.setdefault(str(pool_id), AdmissionPacer(self.client, pool_id))

    def async_pacer(self, pool_id: int | str) -> AsyncAdmissionPacer:
        """The same to be awaited."""
        if self.async_client is None:
            raise ValueError("PolyKVContext has no async_client: give it one, or invoke the graph with client")
        return self._async_pacers.setdefault(str(pool_id), AsyncAdmissionPacer(self.async_client, pool_id))


def capacity_update(found: Capacity | None, *, ok: bool) -> dict[str, Any]:
    """The update of a state after a look at ``capacity``; None: somebody was refused, and nobody looked."""
    shown = found.model_dump(exclude_none=True) if found is not None else {}
    return {
        "capacity_ok": ok,
        "headroom_sessions": found.headroom_sessions if found is not None else None,
        "mean_active_tps": found.mean_active_tps if found is not None else None,
        "polykv": {"capacity": {**shown, "ts": time.time()}},
    }


def pool_of(state: Mapping[str, Any]) -> int | str | None:
    """The pool that a state is about."""
    pool_id: int | str | None = (state.get("polykv") or {}).get("pool_id")
    return pool_id


def running_context() -> PolyKVContext:
    """The context of the graph that runs; an empty one when it has another."""
    context: Any = get_runtime().context
    return context if isinstance(context, PolyKVContext) else PolyKVContext()


def _later(mine: Any, other: Any) -> Any:
    """Without times the other."""
    if isinstance(mine, Mapping) and isinstance(other, Mapping) and "ts" in mine and "ts" in other:
        return mine if mine["ts"] > other["ts"] else other
    return other if other is not None else mine
