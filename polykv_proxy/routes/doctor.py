"""``/polykv/doctor``: what is wrong, dangerous or useless in how all this is set up."""

import dataclasses

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.doctor import examine, status_of
from polykv_proxy.routes.answers import answering, json_answer


def doctor_routes(control: Control) -> list[web.RouteDef]:
    async def doctor(request: web.Request) -> web.Response:
        facts = await control.facts()
        findings = examine(facts)
        body = {
            "status": status_of(findings),
            "findings": [finding.as_json() for finding in findings],
            "facts": dataclasses.asdict(facts),
        }
        return json_answer(body)

    return [web.get("/polykv/doctor", answering(doctor))]
