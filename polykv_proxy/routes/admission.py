"""``/polykv/pools/{ref}/admission`` and ``…/capacity``: the policy of a pool, and whether it has room for a session."""

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.errors import RequestError
from polykv_proxy.ids import SessionId
from polykv_proxy.routes.answers import answering, json_answer
from polykv_proxy.routes.body import AdmissionBody, query_count, read_body

MAX_TOKENS = 2**31 - 1
MAX_SESSION_ID = 256


def admission_routes(control: Control) -> list[web.RouteDef]:
    async def show(request: web.Request) -> web.Response:
        await control.permission.require_patched()
        return json_answer(control.policies.get(request.match_info["ref"]))

    async def give(request: web.Request) -> web.Response:
        body = await read_body(request, AdmissionBody, None)
        return json_answer(await control.set_policy(request.match_info["ref"], body.policy()))

    async def drop(request: web.Request) -> web.Response:
        return json_answer(await control.drop_policy(request.match_info["ref"]))

    async def ask(request: web.Request) -> web.Response:
        expected_tokens, session_id = query_count(request, "expected_tokens", MAX_TOKENS), _session_id(request)
        await control.watch.require_patched()
        await control.door.look()
        pool = control.tree.get(request.match_info["ref"])
        verdict = control.door.capacity(pool.pool_id, expected_tokens, session_id)
        session = control.sessions.get(session_id) if session_id is not None else None
        views = control.views
        context = views.context_of(session) if session is not None else views.context(pool.prefix_len)
        return json_answer({"pool_id": pool.pool_id, "name": pool.name} | verdict | context)

    path = "/polykv/pools/{ref}/admission"
    return [
        web.get(path, answering(show)),
        web.post(path, answering(give)),
        web.delete(path, answering(drop)),
        web.get("/polykv/pools/{ref}/capacity", answering(ask)),
    ]


def _session_id(request: web.Request) -> SessionId | None:
    """Raises RequestError."""
    given = request.query.get("session_id")
    if given is not None and not (0 < len(given) <= MAX_SESSION_ID and given.isprintable()):
        raise RequestError(f"session_id must have 1 to {MAX_SESSION_ID} printable characters", param="session_id")
    return SessionId(given) if given is not None else None
