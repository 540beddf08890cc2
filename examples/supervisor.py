"""A supervisor forks a pool for a task and fans out four workers, which begin where the fork ends.

    polykvctl up                       # in another terminal
    python -m examples.supervisor [--base-url http://127.0.0.1:8090] [--max-tokens 48]

The system message is a pool. The supervisor forks it with the text of the task, so that this is prefilled once, too.
Each worker is a session of the fork and prefills its own question only.
"""

import argparse
import asyncio
import operator
import time
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessageChunk
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Send

from polykv_proxy.client import AsyncPolyKVClient
from polykv_proxy.langgraph import ChatPolyKV, PolyKVContext, PolyKVState, polykv_update

SYSTEM = {
    "role": "system",
    "content": "You are one of several engineers who review code together. Read the whole text before you answer, name "
    "the line that you mean, and say what you are not sure of. Never invent an interface. Be brief. " * 3,
}
TASK = {
    "role": "user",
    "content": "This is the code:\n"
    + "".join(
        f"def handler_{n}(queue, lock, item):\n    with lock:\n        queue.append(item)\n    return len(queue)\n"
        for n in range(12)
    ),
}
ASKED = {
    "names": "Which of the names would you change, and to what? Begin with the one that misleads most.",
    "locks": "Where is a lock held for too long, or not at all? Begin with what can go wrong first.",
    "tests": "Which test is missing? Begin with the one that you would write first, and say why.",
    "docs": "What does a reader have to know that is not there? Begin with what surprised you.",
}


class State(PolyKVState):
    asked: dict[str, str]
    reviews: Annotated[list[dict[str, Any]], operator.add]


class Job(TypedDict):
    topic: str
    question: str
    pool_id: int
    began_s: float


async def supervise(state: State, runtime: Runtime[PolyKVContext]) -> dict[str, Any]:
    """A pool for the task, unless the graph was started with one."""
    if state["polykv"].get("pool_id") is not None:
        return {}
    polykv = runtime.context.async_client
    assert polykv is not None
    system = await polykv.create_pool(messages=[SYSTEM])
    task = await polykv.fork_pool(system.pool_id, messages=[SYSTEM, TASK])
    return {"polykv": polykv_update(pool_id=task.pool_id, ancestor_pool_id=system.pool_id)}


def fan_out(state: State) -> list[Send]:
    began_s = time.perf_counter()
    at = state["polykv"]["pool_id"]
    jobs = [Job(topic=topic, question=each, pool_id=at, began_s=began_s) for topic, each in state["asked"].items()]
    return [Send("work", job) for job in jobs]


def graph_of(model: ChatPolyKV) -> Any:
    async def work(state: Job) -> dict[str, Any]:
        pool_id, topic = state["pool_id"], state["topic"]
        session = f"{pool_id}:{topic}"  # not the thread: all workers have the same one
        asked = [SYSTEM, TASK, {"role": "user", "content": state["question"]}]
        whole, ttft_s = AIMessageChunk(content=""), 0.0
        async for piece in model.astream(asked, pool_id=pool_id, session_id=session):
            if piece.text and not whole.text:
                ttft_s = time.perf_counter() - state["began_s"]
            whole = whole + piece
        timings, receipt = whole.response_metadata["timings"], whole.response_metadata["polykv"]
        shown = {"ttft_ms": 1000 * ttft_s, "cached": timings["cache_n"], "prefilled": timings["prompt_n"]}
        shown |= {"tps": timings["predicted_per_second"], "hold_ms": receipt["hold_ms"]}
        return {"reviews": [{"topic": topic, "text": whole.text, **shown}]}

    graph = StateGraph(State, context_schema=PolyKVContext)
    graph.add_node("supervise", supervise)
    graph.add_node("work", work, input_schema=Job)
    graph.add_edge(START, "supervise")
    graph.add_conditional_edges("supervise", fan_out, ["work"])
    return graph.compile()


async def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", help="of the proxy; else POLYKV_BASE_URL")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args(argv)
    model = ChatPolyKV(base_url=options.base_url, temperature=0, max_tokens=options.max_tokens)
    async with AsyncPolyKVClient(options.base_url) as polykv:
        began_s = time.perf_counter()
        state: dict[str, Any] = await graph_of(model).ainvoke(
            {"asked": ASKED}, context=PolyKVContext(async_client=polykv)
        )
        wall_s = time.perf_counter() - began_s
        at = state["polykv"]
        task = await polykv.pool(at["pool_id"])
        print(f"pool {task.pool_id}: {task.prefix_len} tokens, {task.own_n_tokens} of them not in pool {task.parent}")
        print(f"{'worker':8}{'TTFT ms':>9}{'cached':>8}{'prefilled':>11}{'tokens/s':>10}{'held ms':>9}")
        for each in state["reviews"]:
            numbers = f"{each['ttft_ms']:9.0f}{each['cached']:8}{each['prefilled']:11}{each['tps']:10.1f}"
            numbers += f"{each['hold_ms']:9.0f}"
            print(f"{each['topic']:8}{numbers}  {' '.join(each['text'].split())[:40]}…")
        print(f"four reviews in {wall_s:.1f} s, pools included")
        await polykv.release(at["ancestor_pool_id"], recursive=True)
    return state


if __name__ == "__main__":
    asyncio.run(main())
