"""The control plane, ``/polykv/*``: parse, ask control, answer. No state and no decision in here.

pools     create, fork, show, release
admission the policy of a pool, and whether it has room for one more session
compact   a shorter pool in the place of one
match     what a request would get
tps       tokens per second, once or as a stream
sessions  who is attached where
requests  receipts of the last requests
doctor    what is wrong with the set-up
health    readiness
openapi   all of this as OpenAPI 3.1, from the bodies' models and those of the answers (``shapes``)
body      strict bodies, errors that name the field
answers   JSON, and errors in the shape of the contract
guard     keys, the loopback rule, foreign Host and Origin
"""

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.routes.admission import admission_routes
from polykv_proxy.routes.compact import compact_routes
from polykv_proxy.routes.doctor import doctor_routes
from polykv_proxy.routes.health import health_routes
from polykv_proxy.routes.match import match_routes
from polykv_proxy.routes.openapi import openapi_routes
from polykv_proxy.routes.pools import pool_routes
from polykv_proxy.routes.requests import request_routes
from polykv_proxy.routes.sessions import session_routes
from polykv_proxy.routes.tps import tps_routes


def add_routes(app: web.Application, control: Control) -> None:
    """Put the control plane's routes on an application."""
    app.router.add_routes(
        [
            *pool_routes(control),
            *compact_routes(control),
            *admission_routes(control),
            *match_routes(control),
            *session_routes(control),
            *request_routes(control),
            *tps_routes(control),
            *health_routes(control),
            *openapi_routes(),
        ]
    )
    app.router.add_routes(doctor_routes(control))
