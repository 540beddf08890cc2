"""A conversation that compacts itself: when its context fills, it goes on from a summary, in a pool of its own.

    polykvctl up                       # in another terminal
    python -m examples.long_conversation [--base-url http://127.0.0.1:8090] [--pressure 0.1] [--turns 8]

The summary is asked for in the session itself, so that only the question is prefilled. The shorter conversation becomes
a new pool, forked off the one of the system message (`refork="always"`), and the turn that was waiting attaches to it.
A pressure of 0.1 compacts when a tenth of the context is used, so that there is something to see soon; 0.8 is usual.
"""

import argparse
from typing import Any

from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langgraph.checkpoint.memory import InMemorySaver

from polykv_proxy.client import PolyKVClient
from polykv_proxy.langgraph import ChatPolyKV, PolyKVCompactionMiddleware, PolyKVPoolMiddleware

SYSTEM = "You keep the log of a long walk. Answer with what you remember of it, in two short sentences."
SUMMARISE = "Write down in a few sentences what happened so far, with all names and places."
PLACES = ("harbour", "old mill", "forest", "bridge", "village", "river", "tower", "hill", "lake", "station")
THREAD = "walker"


class Watch(BaseCallbackHandler):
    """What each request of the model prefilled, and how much of its prompt was there already."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.summaries: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, *, tags: list[str] | None = None, **kwargs: Any) -> None:
        message = response.generations[0][0].message  # type: ignore[union-attr]
        seen = {**message.response_metadata["timings"], "polykv": message.response_metadata["polykv"]}
        (self.summaries if "nostream" in (tags or []) else self.turns).append(seen)


def told(turn: int) -> str:
    """What the walker says, about 100 tokens."""
    here, there = PLACES[turn % len(PLACES)], PLACES[(turn + 1) % len(PLACES)]
    seen = "".join(f" On the way there was a house with {n} windows, and nobody was at home." for n in range(2, 7))
    return f"Hour {turn}. We left the {here} and went on to the {there}.{seen} What was the last place that we saw?"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", help="of the proxy; else POLYKV_BASE_URL")
    parser.add_argument("--pressure", type=float, default=0.1, help="compact from this part of the context on")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args(argv)
    model = ChatPolyKV(base_url=options.base_url, temperature=0, max_tokens=options.max_tokens)
    watch, state = Watch(), {}
    with PolyKVClient(options.base_url) as polykv:
        trunk = polykv.create_pool(messages=[{"role": "system", "content": SYSTEM}])
        compaction = PolyKVCompactionMiddleware(
            polykv,
            pressure=options.pressure,
            keep=1,  # what the walker just said; all before it gives way to the summary
            summary_prompt=SUMMARISE,
            summary_max_tokens=options.max_tokens,
            refork="always",
        )
        walker: Any = create_agent(
            model,
            [],
            system_prompt=SYSTEM,
            middleware=[PolyKVPoolMiddleware(), compaction],
            checkpointer=InMemorySaver(),
        )
        at = {"polykv": {"pool_id": trunk.pool_id, "ancestor_pool_id": trunk.pool_id}}
        print(f"{'turn':4}{'cached':>8}{'prefilled':>11}{'in ms':>7}{'tokens/s':>10}{'context':>14}  pool")
        for turn in range(options.turns):
            given = {"messages": [("user", told(turn))], **(at if turn == 0 else {})}
            n_summaries = len(watch.summaries)
            state = walker.invoke(given, {"configurable": {"thread_id": THREAD}, "callbacks": [watch]})
            for summary in watch.summaries[n_summaries:]:
                pool = polykv.pool(state["polykv"]["pool_id"])
                summary |= {"pool_id": pool.pool_id, "pool_n": pool.prefix_len}
                asked = f"{summary['cache_n']} tokens were there, {summary['prompt_n']} were prefilled"
                print(
                    f"     asked for a summary: {asked}; it goes on in pool {pool.pool_id} of {pool.prefix_len} tokens"
                )
            seen = watch.turns[-1]
            used = f"{seen['polykv']['ctx_used']}/{seen['polykv']['ctx_total']}"
            speed = f"{seen['prompt_ms']:7.0f}{seen['predicted_per_second']:10.1f}"
            print(f"{turn:4}{seen['cache_n']:8}{seen['prompt_n']:11}{speed}{used:>14}  {seen['polykv']['pool_id']}")
        polykv.drop_session(THREAD)
        polykv.release(trunk.pool_id, recursive=True)
    return {"state": state, "turns": watch.turns, "summaries": watch.summaries}


if __name__ == "__main__":
    main()
