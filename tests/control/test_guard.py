"""Who may come in: every combination of keys, peers, Host and Origin that matters."""

import inspect

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from polykv_proxy.config import load_settings
from polykv_proxy.routes import guard as guard_module
from polykv_proxy.routes.guard import Forbidden, Guard, KeyWrong


class Peer:
    """A transport that comes from somewhere."""

    def __init__(self, peername: object):
        self._peername = peername

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._peername if name == "peername" else default


HERE = ("127.0.0.1", 5)


def request(path="/polykv/pools", *, method="GET", peer: object = HERE, **headers):
    sent = CIMultiDict({"Host": "127.0.0.1:8090"})
    for name, value in headers.items():
        key = name.replace("_", "-")
        if value is None:
            sent.popall(key, None)
        else:
            sent[key] = value
    return make_mocked_request(method, path, headers=sent, transport=Peer(peer))


def verdict(guard: Guard, req, *, control: bool) -> int:
    try:
        guard.check(req, control=control)
    except (KeyWrong, Forbidden) as e:
        return e.status
    return 200


OPEN = Guard(load_settings())
DATA = Guard(load_settings(api_key="data-1,data-2"))
ADMIN = Guard(load_settings(admin_key="boss"))
BOTH = Guard(load_settings(api_key="data-1,data-2", admin_key="boss"))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("guard", "headers", "on_control", "on_data"),
    [
        (OPEN, {}, 200, 200),
        (OPEN, bearer("any"), 200, 200),
        (DATA, {}, 401, 401),
        (DATA, bearer("wrong"), 401, 401),
        (DATA, bearer("data-2"), 200, 200),
        (DATA, {"x-api-key": "data-1"}, 200, 200),
        (DATA, {"Authorization": "Basic data-1"}, 401, 401),
        (DATA, {"Authorization": "bearer  data-1"}, 200, 200),
        (DATA, {"Authorization": "Bearer"}, 401, 401),
        (DATA, bearer("data"), 401, 401),
        (DATA, bearer(""), 401, 401),
        (ADMIN, {}, 401, 200),
        (ADMIN, bearer("boss"), 200, 200),
        (ADMIN, bearer("Boss"), 401, 200),
        (BOTH, {}, 401, 401),
        (BOTH, bearer("data-1"), 403, 200),
        (BOTH, bearer("boss"), 200, 200),
        (BOTH, bearer("böss"), 401, 401),
    ],
)
def test_keys(guard, headers, on_control, on_data):
    assert verdict(guard, request(**headers), control=True) == on_control
    assert verdict(guard, request("/v1/chat/completions", **headers), control=False) == on_data


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        (("127.0.0.1", 1), 200),
        (("127.8.9.1", 1), 200),
        (("::1", 1, 0, 0), 200),
        (("::ffff:127.0.0.1", 1, 0, 0), 200),
        (("::ffff:10.0.0.1", 1, 0, 0), 403),
        (("10.0.0.1", 1), 403),
        (("172.17.0.1", 1), 403),
        (("fe80::1%eth0", 1, 0, 2), 403),
        (("", 0), 403),
        ("", 200),  # a UNIX socket
        (None, 403),
    ],
)
def test_without_a_key_only_this_machine_reaches_the_control_plane(peer, status):
    assert verdict(OPEN, request(peer=peer), control=True) == status
    assert verdict(OPEN, request("/v1/models", peer=peer), control=False) == 200
    assert verdict(BOTH, request(peer=peer, **bearer("boss")), control=True) == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Forwarded-Host", "Via"])
def test_a_forwarded_request_is_not_from_this_machine(header):
    assert verdict(OPEN, request(**{header: "127.0.0.1"}), control=True) == 403
    assert verdict(ADMIN, request(**{header: "10.0.0.1"}, **bearer("boss")), control=True) == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8090", 200),
        ("127.0.0.1:8090", 200),
        ("[::1]:8090", 200),
        (None, 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8090", 403),
        ("evil@127.0.0.1", 403),
        ("127.0.0.1:99999", 403),
        ("[::1", 403),
        ("127.0.0.1/x", 403),
        ("", 403),
        ("192.168.1.5:8090", 403),
    ],
)
def test_foreign_hosts_are_refused_without_a_key(host, status):
    assert verdict(OPEN, request(Host=host), control=True) == status
    assert verdict(OPEN, request("/v1/models", Host=host), control=False) == 200
    assert verdict(ADMIN, request(Host=host, **bearer("boss")), control=True) == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("http://[::1]:5", 200),
        ("null", 403),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost@evil.example", 403),
        ("file://", 403),
        ("", 403),
    ],
)
def test_foreign_origins_are_refused_without_a_key(origin, status):
    assert verdict(OPEN, request(Origin=origin), control=True) == status
    assert verdict(ADMIN, request(Origin=origin, **bearer("boss")), control=True) == 200


def test_two_hosts_and_foreign_pages_are_refused():
    req = request()
    headers = CIMultiDict(req.headers)
    headers.add("Host", "localhost")
    twice = make_mocked_request("GET", "/polykv/pools", headers=headers, transport=Peer(HERE))
    assert verdict(OPEN, twice, control=True) == 403
    assert verdict(OPEN, request(Sec_Fetch_Site="cross-site"), control=True) == 403
    assert verdict(OPEN, request(Sec_Fetch_Site="same-origin"), control=True) == 200


def test_health_and_preflight_are_public_on_the_data_plane_only():
    assert verdict(BOTH, request("/health"), control=False) == 200
    assert verdict(BOTH, request("/v1/health", method="HEAD"), control=False) == 200
    assert verdict(BOTH, request("/health", method="POST"), control=False) == 401
    assert verdict(BOTH, request("/v1/chat/completions", method="OPTIONS"), control=False) == 200
    assert verdict(BOTH, request("/polykv/health"), control=True) == 401
    assert verdict(BOTH, request("/slots", method="OPTIONS"), control=True) == 401


def test_every_key_is_compared_in_constant_time_and_kept_only_as_a_hash(monkeypatch):
    compared = []
    real = guard_module.hmac.compare_digest
    monkeypatch.setattr(guard_module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    verdict(BOTH, request("/v1/models", **bearer("data-1")), control=False)
    assert len(compared) == 3  # the first already fits; the others are compared all the same
    assert not any(b"data-1" in part or b"boss" in part for pair in compared for part in pair)
    assert "data-1" not in repr(vars(BOTH))
    assert "==" not in inspect.getsource(Guard._holds)


@pytest.mark.parametrize(
    ("authority", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8090", 200),
        ("[::1]:8090", 200),
        ("evil.com", 403),
        ("evil.com@127.0.0.1", 403),
        ("127.0.0.1@evil.com", 403),
        ("127.0.0.1.evil.com", 403),
        ("", 403),
    ],
)
def test_the_authority_of_an_absolute_target_must_be_this_machine_whatever_host_says(authority, status):
    target = f"http://{authority}/polykv/pools"
    assert verdict(OPEN, request(target), control=True) == status
    assert verdict(ADMIN, request(target, **bearer("boss")), control=True) == 200
