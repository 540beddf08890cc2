"""``GET /polykv/requests``: receipts of the last requests, the newest first."""

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.control.receipts import MAX_RECORDS
from polykv_proxy.errors import RequestError
from polykv_proxy.routes.answers import answering, json_answer

DEFAULT_LAST = 20


def request_routes(control: Control) -> list[web.RouteDef]:
    # Whoever holds a data key may ask when there is no admin key; the words of others' prompts are not theirs to read.
    with_text = control.settings.admin_key is not None or not control.settings.data_keys

    async def show(request: web.Request) -> web.Response:
        last, request_id = _last(request), request.query.get("request_id")
        return json_answer(control.requests.told(last, with_text=with_text, request_id=request_id))

    return [web.get("/polykv/requests", answering(show))]


def _last(request: web.Request) -> int:
    given = request.query.get("last", str(DEFAULT_LAST))
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_RECORDS):
        raise RequestError(f"last must be a number from 1 to {MAX_RECORDS}", param="last")
    return int(given)
