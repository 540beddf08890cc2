"""The aiohttp application: the control plane's routes, and llama-server behind everything else.

A front stands before the router and looks at the request target as it came: what is not the proxy's own is relayed
whatever the router thinks of it, and what could only become ours by another spelling is a 404. It is a middleware, and
the runner has a shorter way in for what is llama-server's.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from polykv_proxy import routes
from polykv_proxy.config import Settings
from polykv_proxy.control import Control
from polykv_proxy.errors import InvariantError, MethodNotAllowed, PolyKVError, RequestError, RouteNotFound
from polykv_proxy.relay.connection import AppRunner, Handler, ShortWay
from polykv_proxy.relay.doors import Door, door_of, shows_prompts, target_of
from polykv_proxy.relay.pump import check_framing, refuse, request_id_of
from polykv_proxy.relay.relay import Relay
from polykv_proxy.relay.slow_clients import Patience
from polykv_proxy.routes.answers import REQUEST_ID
from polykv_proxy.routes.guard import Guard

log = logging.getLogger("polykv.app")

CONTROL = web.AppKey("control", Control)
RELAY = web.AppKey("relay", Relay)
SHORT_WAY: web.AppKey[ShortWay] = web.AppKey("short_way")

DRAIN_S = 60.0
"""So long may running turns go on after SIGTERM."""


def make_app(settings: Settings) -> web.Application:
    """Build the application; what talks to the engine starts with it and stops with it."""
    control = Control(settings)
    relay = Relay(control)
    guard = Guard(settings)

    async def serve_target(request: web.Request, target: str, door: Door, handler: Handler) -> web.StreamResponse:
        request_id = request_id_of(request)
        if door is Door.ENGINE and "Origin" in request.headers:
            relay.cors.note(request)
        try:
            check_framing(request)
            guard.check(request, control=door is not Door.ENGINE or shows_prompts(target))
        except PolyKVError as e:
            return refuse(request, e, relay.dialect_of(request, target), request_id)
        if door is Door.ENGINE:
            return await relay.handle(request, target, request_id)
        if door is Door.SHUT:
            return refuse(request, RouteNotFound("no such route"), None, request_id)
        request[REQUEST_ID] = request_id
        try:
            response = await handler(request)
        except web.HTTPNotFound:
            return refuse(request, RouteNotFound(f"no such route: {request.path}"), None, request_id)
        except web.HTTPMethodNotAllowed as e:
            allowed = ", ".join(sorted(e.allowed_methods))
            refusal = refuse(request, MethodNotAllowed(f"allowed here: {allowed}"), None, request_id)
            refusal.headers["Allow"] = allowed
            return refusal
        if not response.prepared:
            response.headers.setdefault("x-request-id", request_id)
        return response

    @web.middleware
    async def front(request: web.Request, handler: Handler) -> web.StreamResponse:
        target = target_of(request.raw_path)
        return await serve_target(request, target, door_of(target), handler)

    async def short_way(request: web.Request, routed: Handler) -> web.StreamResponse:
        target = target_of(request.raw_path)
        door = door_of(target)
        # Who expects anything else than to be told to go on gets what llama-server gives him: no notice.
        waits = request.headers.get("Expect", "").strip().lower() == "100-continue"
        if door is Door.ENGINE and not waits:
            return await serve_target(request, target, door, _never_reached)
        try:
            return await routed(request)
        except web.HTTPExpectationFailed:
            error = RequestError("the only Expect that is understood here is 100-continue")
            return refuse(request, error, None, request_id_of(request))

    app = web.Application(middlewares=[front], client_max_size=settings.max_body_bytes)
    app[CONTROL], app[RELAY], app[SHORT_WAY] = control, relay, short_way
    app.cleanup_ctx.append(_running)
    app.on_shutdown.append(_end_streams)
    routes.add_routes(app, control)
    app.router.add_route("*", "/{engine:(?!polykv(?:/|$)).*}", _never_reached)
    return app


async def _never_reached(request: web.Request) -> web.StreamResponse:
    """Only there so that the router need not make a 404 for every request that the middleware relays."""
    raise InvariantError(f"{request.path} came through the door")


async def _running(app: web.Application) -> AsyncIterator[None]:
    await app[CONTROL].start()
    try:
        yield
    finally:
        await app[RELAY].close()
        await app[CONTROL].stop()


async def _end_streams(app: web.Application) -> None:
    """Who reads rates would not go by itself."""
    app[CONTROL].feed.ended.set()


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[str, web.Application]]:
    """The proxy on every address of ``settings.hosts`` for as long as the block runs. Gives the URL of the first.

    All have one port; where any will do (0), it is the one that the first address got.

    Raises:  OSError when one of them cannot be used; then none is served
    """
    app = make_app(settings)
    patience = Patience(settings.client_head_s, settings.client_body_idle_s, settings.client_stall_s)
    runner = AppRunner(app, app[SHORT_WAY], patience)
    await runner.setup()
    try:
        port = settings.port
        for host in settings.hosts:
            await web.TCPSite(runner, host, port, reuse_address=True, backlog=1024).start()
            port = port or runner.addresses[0][1]
        first, *others = (_url_of(*address[:2]) for address in runner.addresses)
        if others:
            log.info("also listening on %s", ", ".join(others))
        yield first, app
    finally:
        await runner.cleanup()


def _url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then let running turns finish. A second signal ends it now."""
    loop = asyncio.get_running_loop()
    asked, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with serving(settings) as (url, app):
        log.info("listening on %s, engine at %s", url, settings.upstream_url)
        if ready is not None:
            ready(url)
        await asked.wait()
        relay = app[RELAY]
        relay.drain()
        log.info(
            "shutting down: waiting up to %d s for running requests (%d); a second signal ends them",
            DRAIN_S,
            relay.n_running,
        )
        waits = [asyncio.ensure_future(relay.idle.wait()), asyncio.ensure_future(at_once.wait())]
        await asyncio.wait(waits, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def calm_collector() -> None:
    """Look for garbage cycles less often: what was loaded stays for good, and a request leaves hardly any behind.

    The defaults look after every 700 new objects, a few requests; that alone was 4 % of a small one's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def open_many_files() -> None:
    """Raise the soft limit of open files to the hard one: every client is one, and two while the engine serves it.

    The usual soft limit of 1,024 is less than who may wait here; past it not even the engine could be asked.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS names no limit and has one; then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until told to stop (blocking). ``ready`` is called with the URL once the proxy listens.

    Raises:  SystemExit with one line when it must not start (another proxy manages this engine's pools)
    """
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    calm_collector()
    open_many_files()
    with runner:
        try:
            runner.run(serve(settings, ready=ready))
        except PolyKVError as e:
            raise SystemExit(f"polykvctl: {e.message}") from e
