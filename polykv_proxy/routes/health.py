"""``/polykv/health``: can new work be served now, and what stands in the way."""

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.routes.answers import answering, json_answer


def health_routes(control: Control) -> list[web.RouteDef]:
    async def health(request: web.Request) -> web.Response:
        ready, body = control.health()
        headers = {} if ready else {"Retry-After": "1"}
        return json_answer(body, status=200 if ready else 503, headers=headers)

    return [web.get("/polykv/health", answering(health))]
