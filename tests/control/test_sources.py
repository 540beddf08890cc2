"""Pools made of messages: exactly what every chat that starts with them starts with, whatever the template does."""

from typing import Any

from tests.fake_engine.toy import Template

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are an agent with many tools."}


class InstructionsLast(Template):
    """The system message stands before the last question, as by Mistral's templates."""

    def _chat(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> tuple[str, bool]:
        system = [message for message in messages if message["role"] == "system"]
        others = [message for message in messages if message["role"] != "system"]
        last = max((i for i, message in enumerate(others) if message["role"] == "user"), default=len(others))
        return super()._chat([*others[:last], *system, *others[last:]], body)


async def test_instructions_that_move_to_the_last_question_are_not_at_the_beginning(plane):
    plane.engine.template = InstructionsLast()
    pool = await plane.create(messages=[SYSTEM])
    held = plane.engine.ready_pools()[0].tokens
    assert pool["prefix_len"] == len("?")  # every message begins with one token for that
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for messages in ([SYSTEM, *turns[:1]], [SYSTEM, *turns, *turns[:1]]):
        tokens = plane.engine.template.render(CHAT, {"messages": messages})[0][0]
        assert tokens[: len(held)] == held
