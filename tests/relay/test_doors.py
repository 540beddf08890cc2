"""No spelling of a path reaches the engine's hooks or a control route by the back door."""

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.relay.doors import Door, door_of, engine_path, shows_prompts, target_of


@pytest.mark.parametrize(
    "target",
    [
        "/polykv/engine/stats",
        "/polykv/engine",
        "/polykv/engine/",
        "/polykv//engine/stats",
        "//polykv/engine/stats",
        "/polykv/./engine/stats",
        "/v1/../polykv/engine/stats",
        "/polykv/pools/../engine/stats",
        "/polykv%2fengine/stats",
        "/polykv%2Fengine%2Fstats",
        "/%70olykv/engine/stats",
        "/polykv/%65ngine/stats",
        "/polykv/%2565ngine/stats",
        "/polykv/%2e%2e/polykv/engine/stats",
        "/POLYKV/ENGINE/stats",
        "/polykv;a=b/engine/stats",
        "/polykv/engine;x/stats",
        "/polykv\\engine\\stats",
        "/polykv/engine/stats?x=1",
        "/polykv/pools/%2e%2e/engine/stats",
        "/polykv/pools/x%2f..%2f..%2fengine",
        "/polykv/engine%00/stats",
        "/polykv/engine%20/stats",
        "//polykv/pools",
        "/polykv/../polykv/pools",
        "/Polykv/pools",
        "/polykv/pools;x",
        "/polykv%2fpools",
        "/polykv/pools/a%2Fb",
        "/polykv/pools/a%2Fpin",
        "/polykv/pools/a%25b",
        "/polykv/sessions/..%2Fx",
        "/polykv/sessions/..%2Fengine%2Fstats",
        "/polykv/sessions/x%2F..%2F..%2Fpools",
        "/polykv/sessions/x%2F..%2Fy",
        "/polykv/sessions/x%2F.%2Fy",
        "/polykv/sessions/x%2F%2e%2e%2Fy",
        "/polykv/sessions/x%2F%252e%252e%2Fy",
        "/polykv/sessions/x%2F..%3By%2Fz",
        "/polykv/sessions/x%5C..%5Cy",
        "/polykv/sessions/x%2F..%00",
        "/polykv/sessions/x%00",
        "/polykv/sessions/%2F",
        "/polykv/sessions/x%2Fy/z",
        "/polykv/sessions%2Fx",
        "/polykv%2Fsessions/x%2Fy",
        "/%u0070olykv/engine/stats",
        "/polykv/%u0065ngine/stats",
        "/polykv%u002fengine/stats",
        "/%U0070olykv/engine",
        "/%25u0070olykv/engine/stats",
        "/po%ud800lykv/engine/stats",
        "/v1/%u002e%u002e/polykv/pools",
        "/polykv/engine/pools/5%252f..%252f..%252f..%252f..",
        "/polykv/engine/saved/..%252f..%252f..%252fx",
        "/polykv/engine/pools/%252e%252e%252f%252e%252e%252f%252e%252e",
        "/polykv/../v1/models",
        "/polykv/pools/a%u0041",
        "/polykv//sessions/x%2Fy",
        "/polykv/Sessions/x%2Fy",
    ],
)
def test_shut(target: str) -> None:
    assert door_of(target) is Door.SHUT


@pytest.mark.parametrize(
    "target",
    [
        "/polykv/pools",
        "/polykv/pools/3/fork",
        "/polykv/pools/My-Pool",
        "/polykv/pools/a%20b/pin",
        "/polykv/sessions/Agent%3A1",
        "/polykv/sessions/team%2Fagent",
        "/polykv/sessions/%2Fhome%2Fme",
        "/polykv/sessions/a%2Fb%2f%2Fc?x=1",
        "/polykv/sessions/100%25",
        "/polykv/sessions/a%252Fb",
        "/polykv/sessions/a%3Bb%5Cc",
        "/polykv/sessions/x%2F..y%2Fengine",
        "/polykv/health?x=/../engine",
        "/polykv/no-such-route",
    ],
)
def test_ours(target: str) -> None:
    assert door_of(target) is Door.OURS


@pytest.mark.parametrize(
    "target", ["/", "/v1/models", "/v1//x", "/a/../b", "/polykvx", "/x/polykv/engine", "/slots/0?a=b", "*"]
)
def test_the_rest_is_the_engines(target: str) -> None:
    assert door_of(target) is Door.ENGINE


@given(
    st.lists(
        st.sampled_from(["/", "//", "/./", "%2f", "\\", "/x/../", ";p", "%252F", "%u002f"]), min_size=2, max_size=2
    ),
    st.data(),
)
def test_no_spelling_opens_the_engine(joints: list[str], data: st.DataObject) -> None:
    words = [
        "".join(
            data.draw(
                st.sampled_from([c, c.upper(), f"%{ord(c):02x}", f"%25{ord(c):02X}", f"%u{ord(c):04x}", f"{c}%uDC00"])
            )
            for c in word
        )
        for word in ("polykv", "engine")
    ]
    joint = joints[1] if "/" in joints[1] or "%" in joints[1] or "\\" in joints[1] else joints[1] + "/"
    first = joints[0] if joints[0].startswith(("/", "%", "\\")) else "/"
    target = target_of(first + words[0] + joint + words[1] + "/stats")
    assert door_of(target) is Door.SHUT


@given(st.lists(st.sampled_from(["a", ".", "..", "%2F", "%2f", "%252F", "%5C", "%2e", "%252E", "%3B", "%00", "%20"])))
def test_an_escaped_id_leads_nowhere_else(parts: list[str]) -> None:
    """Whoever decodes it, once or more, and tidies it up, is still at a session."""
    target = "/polykv/sessions/" + "".join(parts)
    if door_of(target) is not Door.OURS:
        return
    for _ in range(4):
        tidied = posixpath.normpath(target.replace("\\", "/"))
        assert (tidied + "/").startswith("/polykv/sessions/")
        target = unquote(target)


def test_an_absolute_target_loses_its_authority_only() -> None:
    assert target_of("http://evil/polykv/engine/stats?a") == "/polykv/engine/stats?a"
    assert target_of("HTTP://x:1") == "/"
    assert target_of("/v1/%41?b=%20") == "/v1/%41?b=%20"
    assert target_of("*") == "*"


@given(
    st.lists(st.sampled_from(["..", "%2e%2e", "%252e%252e", "/", "%2f", "%252f", "%25252F", "%u002f", "x", "%00", ";"]))
)
def test_whatever_follows_them_the_hooks_are_shut(parts: list[str]) -> None:
    """llama-server looks for its route when the path is decoded once, and reads a parameter when it is twice."""
    assert door_of("/polykv/engine/pools/5" + "".join(parts)) is Door.SHUT
    assert shows_prompts("/slots" + "".join(parts))


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/chat/complet%69ons?a=%2f", "/v1/chat/completions"),
        ("/v1/chat/%u0063ompletions", "/v1/chat/completions"),
        ("/v1%2fchat%2Fcompletions#x?y", "/v1/chat/completions"),
        ("/v1/chat/%ud800completions", "/v1/chat/completions"),
        ("/%2563ompletion", "/%63ompletion"),
        ("/%zz%u00%4", "/%zz%u00%4"),
        ("/%u20AC/%e2%82%ac", "/\u20ac/\u20ac"),
        ("/%ff", "/\udcff"),
        ("/v1/%U006dodels", "/v1/%U006dodels"),
        ("/v1/models", "/v1/models"),
        ("*", "*"),
    ],
)
def test_the_path_that_the_engine_looks_up(target: str, path: str) -> None:
    assert engine_path(target) == path


@pytest.mark.parametrize("target", ["/slots", "/%73lots?x", "/%u0073lots", "//slots", "/Slots/0", "/x/../slots"])
def test_prompts_are_shown_there_however_it_is_spelled(target: str) -> None:
    assert shows_prompts(target)
    assert not shows_prompts("/v1/slots")
