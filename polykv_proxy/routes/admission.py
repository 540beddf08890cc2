"""``/polykv/pools/{ref}/admission``: the admission policy of a pool."""

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.routes.answers import answering, json_answer
from polykv_proxy.routes.body import AdmissionBody, read_body


def admission_routes(control: Control) -> list[web.RouteDef]:
    async def show(request: web.Request) -> web.Response:
        await control.permission.require_patched()
        return json_answer(control.policies.get(request.match_info["ref"]))

    async def give(request: web.Request) -> web.Response:
        body = await read_body(request, AdmissionBody, None)
        return json_answer(await control.set_policy(request.match_info["ref"], body.policy()))

    async def drop(request: web.Request) -> web.Response:
        return json_answer(await control.drop_policy(request.match_info["ref"]))

    path = "/polykv/pools/{ref}/admission"
    return [web.get(path, answering(show)), web.post(path, answering(give)), web.delete(path, answering(drop))]
