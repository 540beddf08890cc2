"""An agent that manages its own pools with the toolkit: it makes a tree, asks in its leaves, and takes it down again.

    polykvctl up                       # in another terminal
    python -m examples.pool_tree_agent [--base-url http://127.0.0.1:8090] [--planner script|model]

Which tools are called, the script below says (`--planner script`); all else is as in any agent: LangGraph runs the
tools, the proxy does what they ask, and the model gives the answers of the leaves and the last word. With a model that
calls tools on its own, and a server that has its template for them, `--planner model` leaves the plan to it.
(The chat model of the tests does not: its template shows it no tools.)
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool

from polykv_proxy.client import PolyKVClient
from polykv_proxy.langgraph import ChatPolyKV, PolyKVPoolMiddleware, PolyKVToolkit

SYSTEM = "You review code in a team. Be brief, name the line you mean, and say what you are not sure of. " * 4
TEXTS = {
    "queue": "This is queue.py:\n" + "def put(queue, item):\n    queue.append(item)\n    return len(queue)\n" * 6,
    "clock": "This is clock.py:\n" + "def now(offset):\n    import time\n    return time.time() + offset\n" * 6,
}
TASK = (
    "Review queue.py and clock.py: make a pool of your system message, fork it with each text, ask whether there is "
    "room, ask two questions in each fork, release what you made, and say in one sentence what was done."
)


def chat(name: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TEXTS[name]}]


SCRIPT: list[list[tuple[str, dict[str, Any]]]] = [
    [("create_pool", {"system": SYSTEM, "name": "team"})],
    [("fork_pool", {"pool_id": "team", "messages": chat(name), "name": name}) for name in TEXTS],
    [("pool_status", {}), ("capacity", {"pool_id": "queue"})],
    [
        ("ask", {"text": name, "question": f"What would you {what} first?"})
        for name in TEXTS
        for what in ("test", "rename")
    ],
    [("session_tps", {})],
    [("release_pool", {"pool_id": name}) for name in TEXTS],
    [("release_pool", {"pool_id": "team"})],
]


class Planner(AgentMiddleware[Any, Any, Any]):
    """Calls what the script says, one step a turn; then the model is asked about the answers, and nothing else."""

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        step = sum(isinstance(each, AIMessage) for each in request.messages)
        if step >= len(SCRIPT):
            answers = [m.text for m in request.messages if isinstance(m, ToolMessage) and m.name == "ask"]
            question = HumanMessage("Say in one sentence what these reviews found:\n" + "\n".join(answers))
            return handler(request.override(messages=[question], tools=[]))
        calls = [{"name": name, "args": args, "id": f"{step}.{n}"} for n, (name, args) in enumerate(SCRIPT[step])]
        return AIMessage("", tool_calls=calls)


def asking(model: ChatPolyKV, rows: list[dict[str, Any]]) -> BaseTool:
    @tool
    def ask(text: str, question: str) -> str:
        """Ask a question about one of the texts, in the pool of its name."""
        began_s, ttft_s, whole = time.perf_counter(), 0.0, AIMessageChunk(content="")
        asked = [*chat(text), {"role": "user", "content": question}]
        for piece in model.stream(asked, pool_id=text, session_id=f"{text}: {question}"):
            if piece.text and not whole.text:
                ttft_s = time.perf_counter() - began_s
            whole = whole + piece
        timings = whole.response_metadata["timings"]
        shown = {"ttft_ms": 1000 * ttft_s, "cached": timings["cache_n"], "tps": timings["predicted_per_second"]}
        rows.append({"text": text, "question": question, "prefilled": timings["prompt_n"], **shown})
        return whole.text

    return ask


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", help="of the proxy; else POLYKV_BASE_URL")
    parser.add_argument("--planner", choices=["script", "model"], default="script")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(argv)
    model = ChatPolyKV(base_url=options.base_url, temperature=0, max_tokens=options.max_tokens)
    rows: list[dict[str, Any]] = []
    with PolyKVClient(options.base_url) as polykv:
        kit = PolyKVToolkit(client=polykv, releases=True)
        middleware: list[Any] = [PolyKVPoolMiddleware(), *([Planner()] if options.planner == "script" else [])]
        agent = create_agent(
            model, [*kit.get_tools(), asking(model, rows)], system_prompt=SYSTEM, middleware=middleware
        )
        state: dict[str, Any] = agent.invoke({"messages": [HumanMessage(TASK)]})
    for message in state["messages"]:
        for call in message.tool_calls if isinstance(message, AIMessage) else []:
            done = next(m for m in state["messages"] if isinstance(m, ToolMessage) and m.tool_call_id == call["id"])
            where = call["args"].get("name") or call["args"].get("pool_id") or call["args"].get("text") or ""
            print(f"{call['name']:13}{where:8}{done.status}: {done.text[:76]}…")
    print(f"\n{'asked in':10}{'TTFT ms':>8}{'cached':>8}{'prefilled':>11}{'tokens/s':>10}")
    for row in rows:
        print(f"{row['text']:10}{row['ttft_ms']:8.0f}{row['cached']:8}{row['prefilled']:11}{row['tps']:10.1f}")
    at = state.get("polykv", {})
    print(f"pools left: {list(at.get('pools', {}))}, released: {at.get('retired', [])}")
    print(f"the last word: {' '.join(state['messages'][-1].text.split())[:90]}…")
    return {"state": state, "asked": rows}


if __name__ == "__main__":
    main()
