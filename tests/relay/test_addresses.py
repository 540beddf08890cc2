"""Several addresses: each of them is the whole proxy, with the same doors."""

import asyncio
import json
import os
import socket
import sys

import httpx
import pytest

from polykv_proxy.app import serving
from polykv_proxy.config import load_settings
from tests.fake_engine import FakeEngine
from tests.relay.conftest import ProxyMaker
from tests.relay.dialect_cases import body_of

CHAT = "/v1/chat/completions"
V4, V6 = "127.0.0.1", "::1"


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((V6, 0))
    except OSError:
        return False
    return True


def address_others_use() -> str | None:
    """This machine's address on its network; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


OUTSIDE = address_others_use()
needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 loopback here")
needs_network = pytest.mark.skipif(OUTSIDE is None, reason="this machine has no address but its loopback")


def at(url: str, host: str) -> httpx.URL:
    """The same proxy at another of its addresses."""
    return httpx.URL(url).copy_with(host=host)


@needs_ipv6
async def test_every_address_serves_data_and_control_plane_and_the_first_is_named(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with make_proxy(engine.url, host=f"{V6}, {V4}") as proxy:
        assert proxy.url.startswith("http://[::1]:")
        for host in (V4, V6):
            assert (await proxy.client.get(at(proxy.url, host).join("/polykv/health"))).status_code == 200
            streamed = await proxy.client.post(at(proxy.url, host).join(CHAT), json=body_of(CHAT, stream=True))
            assert streamed.content.endswith(b"data: [DONE]\n\n")
    assert len(engine.requests(CHAT)) == 2


@needs_network
async def test_the_loopback_rule_goes_by_the_peer_whatever_the_address(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    assert OUTSIDE is not None
    async with make_proxy(engine.url, host=f"{V4},{OUTSIDE}") as proxy:
        outside = at(proxy.url, OUTSIDE)
        as_if = {"Host": V4}
        for path in ("/polykv/health", "/polykv/pools", "/slots"):
            assert (await proxy.client.get(path)).status_code == 200
            assert (await proxy.client.get(outside.join(path))).status_code == 403
            assert (await proxy.client.get(outside.join(path), headers=as_if)).status_code == 403
        assert (await proxy.client.get(outside.join("/v1/models"))).status_code == 200


@needs_network
async def test_keys_are_asked_for_on_every_address(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    assert OUTSIDE is not None
    async with make_proxy(engine.url, host=f"{OUTSIDE},{V4}", api_key="data", admin_key="boss") as proxy:
        for base in (at(proxy.url, V4), at(proxy.url, OUTSIDE)):
            for path, key, status in [
                ("/v1/models", "", 401),
                ("/v1/models", "data", 200),
                ("/polykv/pools", "", 401),
                ("/polykv/pools", "data", 403),
                ("/polykv/pools", "boss", 200),
            ]:
                answer = await proxy.client.get(base.join(path), headers={"X-Api-Key": key} if key else {})
                assert (path, key, answer.status_code) == (path, key, status)


@needs_ipv6
@pytest.mark.parametrize("host", [V4, V6])
async def test_a_foreign_host_or_origin_is_refused_on_every_address(
    engine: FakeEngine, make_proxy: ProxyMaker, host: str
) -> None:
    async with make_proxy(engine.url, host=f"{V4},{V6}") as proxy:
        pools = at(proxy.url, host).join("/polykv/pools")
        for foreign in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert (await proxy.client.get(pools, headers=foreign)).status_code == 403
        # Names of this machine, be it those of another address.
        for ours in ("[::1]:1", "127.0.0.1", "localhost"):
            assert (await proxy.client.get(pools, headers={"Host": ours})).status_code == 200


@needs_ipv6
async def test_an_address_that_cannot_be_used_means_that_none_is(engine: FakeEngine) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind((V6, 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = load_settings(upstream_url=engine.url, state=":memory:", host=f"{V4},{V6}", port=port)
        with pytest.raises(OSError, match="address already in use"):
            async with serving(settings):
                pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(V4, port)


@needs_ipv6
async def test_the_process_prints_the_first_and_serves_the_others_on_the_same_free_port(engine: FakeEngine) -> None:
    command = ["-m", "polykv_proxy.cli", "serve", "--json", "--upstream", engine.url, "--state", ":memory:"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *[*command, "--port", "0", "--host", f"{V4},{V6}"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("POLYKV_")} | {"POLYKV_HOST": "192.0.2.1"},
    )
    try:
        assert process.stdout is not None
        said = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert said["proxy"].startswith(f"http://{V4}:")
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            for host in (V4, V6):
                assert (await client.get(at(said["proxy"], host).join("/polykv/health"))).status_code == 200
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
