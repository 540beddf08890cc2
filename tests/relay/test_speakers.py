"""Who is speaking, by the headers that agents really send; the same in all dialects."""

from typing import Any

import pytest
from multidict import CIMultiDict

from polykv_proxy.relay.dialects import ATTACHABLE, read_call
from polykv_proxy.relay.speakers import Speaker, speaker_in
from tests.relay.conftest import Proxy
from tests.relay.dialect_cases import PATHS, body_of


def who(path: str = "/v1/messages", body: dict[str, Any] | None = None, **headers: str) -> Speaker:
    named = CIMultiDict(headers)
    return speaker_in(read_call(path, b"{}", body or {}, named, rewrite_tool_choice=True), named)


CLAUDE = {"x-app": "cli", "user-agent": "claude-cli/2.1.40 (external, cli)", "anthropic-version": "2023-06-01"}
CODEX = {"originator": "codex_cli_rs", "user-agent": "codex_cli_rs/0.60.1"}
OPENCODE = {"user-agent": "opencode/1.2.0"}
SESSIONS = {
    "Claude Code": ({**CLAUDE, "X-Claude-Code-Session-Id": "c1"}, "c1", None),
    "its agent": ({**CLAUDE, "X-Claude-Code-Session-Id": "c1", "X-Claude-Code-Agent-Id": "a1"}, "c1/a1", "c1"),
    "an agent's agent": (
        {
            **CLAUDE,
            "X-Claude-Code-Session-Id": "c1",
            "X-Claude-Code-Agent-Id": "a2",
            "X-Claude-Code-Parent-Agent-Id": "a1",
        },
        "c1/a2",
        "c1/a1",
    ),
    "Codex": ({**CODEX, "session-id": "t1", "thread-id": "t1", "x-codex-window-id": "t1:0"}, "t1", None),
    "its agent, Codex": (
        {
            **CODEX,
            "session-id": "t1",
            "thread-id": "t2",
            "x-codex-parent-thread-id": "t1",
            "x-openai-subagent": "collab_spawn",
        },
        "t2",
        "t1",
    ),
    "an older Codex": ({**CODEX, "conversation_id": "t1", "session_id": "t1"}, "t1", None),
    "OpenCode": ({**OPENCODE, "x-session-affinity": "ses_1", "X-Session-Id": "ses_1"}, "ses_1", None),
    "its agent, OpenCode": (
        {**OPENCODE, "x-session-affinity": "ses_2", "X-Session-Id": "ses_2", "x-parent-session-id": "ses_1"},
        "ses_2",
        "ses_1",
    ),
    "OpenCode, affinity only": (
        {**OPENCODE, "x-session-affinity": "ses_2", "x-parent-session-id": "ses_1"},
        "ses_2",
        "ses_1",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("of", SESSIONS)
async def test_agents_are_known_in_every_dialect_and_shown_with_their_parents(proxy: Proxy, path: str, of: str) -> None:
    headers, session_id, parent = SESSIONS[of]
    answer = await proxy.client.post(path, json=body_of(path), headers=headers)
    assert answer.status_code == 200
    (shown,) = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    assert (shown["session_id"], shown["parent_session_id"], shown["named"]) == (session_id, parent, True)
    (receipt,) = (await proxy.client.get("/polykv/requests")).json()["requests"]
    assert (receipt["session_id"], receipt["parent_session_id"]) == (session_id, parent)


async def test_a_parent_that_is_told_later_is_shown_then(proxy: Proxy) -> None:
    path = "/v1/chat/completions"
    for headers in ({"x-session-affinity": "s"}, {"x-session-affinity": "s", "x-parent-session-id": "p"}):
        await proxy.client.post(path, json=body_of(path), headers=headers)
    assert (await proxy.client.get("/polykv/sessions/s")).json()["parent_session_id"] == "p"


def test_what_counts_when_several_name_it() -> None:
    assert who(**{"x-session-affinity": "x", "session-id": "y"}).session == "x"
    assert who(**{"session-id": "y", "x-conversation-id": "z"}).session == "y"
    assert who(**{"x-conversation-id": "z"}) == Speaker("z", None, "z")
    assert who(**{"thread-id": "t"}) == Speaker()
    assert who() == Speaker()


def test_a_family_is_the_tree_that_a_session_belongs_to() -> None:
    claude = {"x-claude-code-session-id": "c"}
    assert (
        {who(**claude, **{"x-claude-code-agent-id": a}).family for a in ("1", "2")} == {who(**claude).family} == {"c"}
    )
    assert who(**{"session-id": "t1", "thread-id": "t2"}).family == who(**{"session-id": "t1"}).family == "t1"
    opencode = who(**{"x-session-affinity": "s2", "x-parent-session-id": "s1"})
    assert opencode.family == who(**{"x-session-affinity": "s1"}).family == "s1"


def test_a_prompt_cache_key_is_a_family_and_never_a_session() -> None:
    for path in ATTACHABLE:
        speaker = who(path, {"prompt_cache_key": "team"})
        assert (speaker.session, speaker.parent) == (None, None)
        assert speaker.family == who(path, {"prompt_cache_key": "team"}, **{"session-id": "t"}).family
    assert who(body={"prompt_cache_key": 3}) == who(body={"prompt_cache_key": ""}) == Speaker()


@pytest.mark.parametrize("bad", ["x" * 257, "a\tb"])
def test_what_cannot_be_a_name_is_none(bad: str) -> None:
    assert who(**{"x-session-affinity": bad}).session is None
    assert who(**{"x-session-affinity": "s", "x-parent-session-id": bad}).parent is None
    assert who(**{"x-session-affinity": "s", "x-parent-session-id": "s"}).parent is None


async def test_the_fields_of_the_contract_beat_all_of_it(proxy: Proxy) -> None:
    path = "/v1/chat/completions"
    headers = {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}
    await proxy.client.post(path, json=body_of(path, session_id="mine"), headers=headers)
    (shown,) = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    assert (shown["session_id"], shown["parent_session_id"]) == ("mine", "c")
