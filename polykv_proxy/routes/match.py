"""``POST /polykv/match``: what would a request get?"""

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.routes.answers import answering, json_answer
from polykv_proxy.routes.body import MatchBody, read_body


def match_routes(control: Control) -> list[web.RouteDef]:
    async def match(request: web.Request) -> web.Response:
        body = await read_body(request, MatchBody, control.ctx_total, control.n_ctx_train)
        return json_answer(await control.dry_run.match(body.source(), body.pool_id))

    return [web.post("/polykv/match", answering(match))]
