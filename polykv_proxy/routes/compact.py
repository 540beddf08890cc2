"""``POST /polykv/pools/{id}/compact``: put a shorter pool in the place of one that grew too long."""

from typing import Annotated

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from polykv_proxy.control import Compact, Control
from polykv_proxy.ids import SessionId
from polykv_proxy.routes.answers import answering, json_answer
from polykv_proxy.routes.body import PoolName, SourceFields, read_body
from polykv_proxy.routes.shapes import Count, Freed, Kept, PoolMade

Ref = StrictInt | Annotated[StrictStr, Field(min_length=1, max_length=256)]


class CompactBody(SourceFields):
    """``POST /polykv/pools/{id}/compact``: ``messages``, ``tokens`` or ``prompt`` are the new pool's FULL prefix."""

    ancestor: Ref
    sessions: list[Annotated[StrictStr, Field(min_length=1, max_length=256)]] | None = None
    release_old: StrictBool | None = None
    name: PoolName | None = None


class Moved(BaseModel):
    """A session whose next turn attaches to the new pool."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    session_id: str
    from_pool_id: int | None
    n_running: Count
    """Turns that go on with what their slots hold."""


class Compacted(PoolMade):
    """The new pool, who moved to it, and what was released."""

    pinned: bool
    moved: list[Moved]
    released: list[int]
    """Leaves first; empty with ``release_old: false``."""
    freed_now: Freed | None
    freed_later: Kept | None


def compact_routes(control: Control) -> list[web.RouteDef]:
    async def compact(request: web.Request) -> web.Response:
        body = await read_body(request, CompactBody, control.ctx_total, control.n_ctx_train)
        order = Compact(
            ancestor=body.ancestor,
            source=body.source(),
            sessions=None if body.sessions is None else tuple(map(SessionId, body.sessions)),
            release_old=body.release_old is not False,
            name=body.name,
        )
        answer = await control.compact_pool(request.match_info["ref"], order)
        return json_answer(answer, status=201, headers={"Location": f"/polykv/pools/{answer['pool_id']}"})

    return [web.post("/polykv/pools/{ref}/compact", answering(compact))]
