"""A courier with a floor: eight jobs, as many at once as leaves each session enough tokens per second.

    polykvctl up                       # in another terminal
    python -m examples.courier_floor [--base-url http://127.0.0.1:8090] [--floor TOKENS_PER_SECOND] [--jobs 8]

The floor is an admission policy of the pool. The courier starts one job after the other, waits until what the last one
costs was measured (`settle`), and holds the next while one more would push the rate below the floor (`saturated`).
Without `--floor` it is 0.4 of what one session gets alone.
"""

import argparse
import time
from typing import Any

from langchain_core.messages import AIMessageChunk
from langgraph.graph import START, StateGraph

from polykv_proxy.client import Job, PaceEvent, PolyKVClient
from polykv_proxy.langgraph import ChatPolyKV, CourierNode, PolyKVContext, PolyKVState

SYSTEM = {
    "role": "system",
    "content": "You are one of many who each write one page of the same handbook. Be plain, be exact, and stay with "
    "your own page. Begin with what a reader wants to do, and end with what can go wrong. " * 3,
}
TOPICS = ("locks", "names", "tests", "clocks", "logs", "types", "errors", "queues", "files", "sockets")


class State(PolyKVState):
    topics: list[str]
    pages: list[dict[str, Any]]


def asked(topic: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": f"Write the page about {topic}."}]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", help="of the proxy; else POLYKV_BASE_URL")
    parser.add_argument("--floor", type=float, help="tokens per second that each session shall have at least")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args(argv)
    model = ChatPolyKV(base_url=options.base_url, temperature=0, max_tokens=options.max_tokens)
    began_s = time.monotonic()
    events: list[PaceEvent] = []

    def happened(event: PaceEvent) -> None:
        events.append(event)
        print(f"{event.at_s - began_s:6.1f} s  {event.kind:10}{event.session_id or '':18}{event.reason or ''}")

    with PolyKVClient(options.base_url) as polykv:

        def write(job: Job[str]) -> dict[str, Any]:
            started_s, ttft_s, whole = time.perf_counter(), 0.0, AIMessageChunk(content="")
            for piece in model.stream(asked(job.item), pool_id=job.pool_id, session_id=job.session_id):
                if piece.text and not whole.text:
                    ttft_s = time.perf_counter() - started_s
                    job.accepted()  # its session is known: the next may be looked at
                whole = whole + piece
            polykv.drop_session(job.session_id)  # done: its place is free at once
            timings = whole.response_metadata["timings"]
            shown = {"cached": timings["cache_n"], "tps": timings["predicted_per_second"]}
            return {"text": whole.text, "ttft_ms": 1000 * ttft_s, **shown}

        pool = polykv.create_pool(messages=[SYSTEM])
        alone = model.invoke(asked("all of them"), pool_id=pool.pool_id, session_id="alone")
        alone_tps = alone.response_metadata["timings"]["predicted_per_second"]
        polykv.drop_session("alone")
        floor = options.floor or 0.4 * alone_tps
        policy = {"target_tps_per_session": floor, "mode": "enforced", "settle_tokens": 16, "settle_max_ms": 3000}
        polykv.set_admission(pool.pool_id, policy)
        print(f"alone {alone_tps:.1f} tokens/s, floor {floor:.1f}")

        graph = StateGraph(State, context_schema=PolyKVContext)
        courier = CourierNode(
            write,
            items="topics",
            results="pages",
            session_key=lambda topic, index: topic,
            poll_interval=0.2,
            on_event=happened,
        )
        graph.add_node("write", courier)
        graph.add_edge(START, "write")
        topics = [TOPICS[n % len(TOPICS)] + str(n // len(TOPICS) or "") for n in range(options.jobs)]
        given = {"topics": topics, "polykv": {"pool_id": pool.pool_id}}
        began_s = time.monotonic()
        deliver: Any = graph.compile()
        state: dict[str, Any] = deliver.invoke(
            given, {"configurable": {"thread_id": "handbook"}}, context=PolyKVContext(client=polykv)
        )
        polykv.release(pool.pool_id)

    print(f"{'page':10}{'TTFT ms':>8}{'cached':>8}{'tokens/s':>10}")
    for page in state["pages"]:
        made = page["result"]
        print(f"{page['item']:10}{made['ttft_ms']:8.0f}{made['cached']:8}{made['tps']:10.1f}")
    n = {kind: sum(event.kind == kind for event in events) for kind in ("spawn", "settle", "saturated")}
    print(f"{n['spawn']} spawned in {time.monotonic() - began_s:.1f} s; held {n['settle']} times to measure,", end=" ")
    print(f"{n['saturated']} times for the floor")
    return {"pages": state["pages"], "events": events, "floor": floor, "pool": pool}


if __name__ == "__main__":
    main()
