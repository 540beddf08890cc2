"""``/polykv/sessions``: who is attached where."""

import contextlib

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.errors import UpstreamError
from polykv_proxy.ids import SessionId
from polykv_proxy.routes.answers import answering, json_answer


def session_routes(control: Control) -> list[web.RouteDef]:
    async def show_all(request: web.Request) -> web.Response:
        await _refresh()
        return json_answer(control.views.sessions())

    async def show_one(request: web.Request) -> web.Response:
        await _refresh()
        return json_answer(control.views.session(_session_id(request)))

    async def detach(request: web.Request) -> web.Response:
        return json_answer(control.drop_session(_session_id(request)))

    async def _refresh() -> None:
        # The books are the proxy's own; without the engine they only lack the newest rates.
        with contextlib.suppress(UpstreamError):
            await control.refresh()

    return [
        web.get("/polykv/sessions", answering(show_all)),
        web.get("/polykv/sessions/{sid}", answering(show_one)),
        web.delete("/polykv/sessions/{sid}", answering(detach)),
    ]


def _session_id(request: web.Request) -> SessionId:
    return SessionId(request.match_info["sid"])
