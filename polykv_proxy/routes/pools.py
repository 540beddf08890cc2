"""``/polykv/pools``: create, fork, show, keep or let go, release."""

from collections.abc import Callable

from aiohttp import web

from polykv_proxy.control import Control, CreatePool, ForkPool
from polykv_proxy.errors import RequestError, UpstreamLoading, UpstreamTimeout, UpstreamUnavailable
from polykv_proxy.routes.answers import Handler, answering, json_answer, json_bytes_answer
from polykv_proxy.routes.body import CreateBody, ForkBody, query_flag, read_body


def pool_routes(control: Control) -> list[web.RouteDef]:
    async def create(request: web.Request) -> web.Response:
        body = await read_body(request, CreateBody, control.ctx_total, control.n_ctx_train)
        order = CreatePool(source=body.source(), name=body.name, pin=bool(body.pin), ttl_s=body.ttl_s)
        answer = await control.create_pool(order)
        return json_answer(answer, status=201, headers={"Location": f"/polykv/pools/{answer['pool_id']}"})

    async def fork(request: web.Request) -> web.Response:
        body = await read_body(request, ForkBody, control.ctx_total, control.n_ctx_train)
        order = ForkPool(
            source=body.source(),
            branch_pos=body.branch_pos,
            exact=bool(body.exact),
            name=body.name,
            pin=bool(body.pin),
            ttl_s=body.ttl_s,
        )
        answer = await control.fork_pool(request.match_info["ref"], order)
        return json_answer(answer, status=201, headers={"Location": f"/polykv/pools/{answer['pool_id']}"})

    async def show_all(request: web.Request) -> web.Response:
        await _refresh(control)
        return json_bytes_answer(await control.views.pools_json())

    async def show_one(request: web.Request) -> web.Response:
        await _refresh(control)
        return json_bytes_answer(await control.views.pools_json(request.match_info["ref"]))

    async def release(request: web.Request) -> web.Response:
        recursive = query_flag(request, "recursive")
        return json_answer(await control.release_pool(request.match_info["ref"], recursive=recursive))

    async def pin(request: web.Request) -> web.Response:
        return json_answer(await control.pin_pool(request.match_info["ref"]))

    async def unpin(request: web.Request) -> web.Response:
        return json_answer(await control.unpin_pool(request.match_info["ref"]))

    async def evict(request: web.Request) -> web.Response:
        to = request.query.get("to")
        if to not in (None, "warm", "cold"):
            raise RequestError("to must be warm or cold", param="to")
        return json_answer(await control.evict_pool(request.match_info["ref"], to))

    async def flush(request: web.Request) -> web.Response:
        return json_answer(await control.flush_pool(request.match_info["ref"]))

    def on(method: Callable[..., web.RouteDef], path: str, handler: Handler) -> web.RouteDef:
        return method(path, answering(handler))

    return [
        on(web.post, "/polykv/pools", create),
        on(web.get, "/polykv/pools", show_all),
        on(web.post, "/polykv/pools/{ref}/fork", fork),
        on(web.get, "/polykv/pools/{ref}", show_one),
        on(web.delete, "/polykv/pools/{ref}", release),
        on(web.post, "/polykv/pools/{ref}/pin", pin),
        on(web.post, "/polykv/pools/{ref}/unpin", unpin),
        on(web.post, "/polykv/pools/{ref}/evict", evict),
        on(web.post, "/polykv/pools/{ref}/flush", flush),
    ]


async def _refresh(control: Control) -> None:
    """Fresh numbers if they can be had. What is known of the tree is shown also while the engine is away.

    Raises:  EngineUnpatched (501); UpstreamUnavailable, UpstreamLoading when it was never seen and there is no pool
    """
    try:
        await control.watch.require_patched()
    except (UpstreamUnavailable, UpstreamLoading, UpstreamTimeout):
        if control.watch.stats is None and not len(control.tree):
            raise
