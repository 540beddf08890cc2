"""``polykvctl demo``: the main job on a real engine and model, beside the same work without pools.

1. A coding agent's instructions become a root pool.
2. It is forked twice: one child extends it by a task, one branches off where another toolset begins.
3. Four sub-agents at once on each of the three.
4. The first four once more on a plain llama-server (the same binary, pools off, behind the same proxy): every one of
   them prefills everything. Only one group, because that is what takes long. Then once more with the prompts in its
   slots: how many answers are other words without any sharing.

Ends with 0 only if every agent really started behind its pool's whole prefix.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polykv_proxy.cli.output import AsJson, count, echo_json, ending_well, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from polykv_proxy.cli.client import ControlClient
    from polykv_proxy.cli.demo.agents import GroupRun
    from polykv_proxy.cli.demo.content import Group
    from polykv_proxy.cli.demo.stack import Stack


def demo(
    *,
    model: Annotated[Path | None, typer.Option("--model", help="GGUF file; default: the tests' chat model.")] = None,
    engine: Annotated[
        Path | None,
        typer.Option("--engine", envvar="POLYKV_ENGINE", help="llama-server to run; default: build ours if needed."),
    ] = None,
    n_predict: Annotated[int, typer.Option("--n-predict", min=1, max=512, help="Tokens per answer.")] = 32,
    compare: Annotated[bool, typer.Option(help="Run one group without pools too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Real agents on a real model share one prefilled prefix; the same work without pools beside it."""
    from polykv_proxy.cli.progress import BuildProgress
    from polykv_proxy.engine.build import ensure_engine
    from polykv_proxy.engine.model import CHAT_MODEL, ensure_model

    for asking in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(asking, _interrupt)  # one way out, which stops the engine
    with BuildProgress() as progress:
        binary = engine or ensure_engine(progress)
        chosen = model.expanduser() if model is not None else ensure_model(CHAT_MODEL, progress.say)
    with ending_well():
        facts = _Demo(binary, chosen, n_predict, make_console(stderr=as_json)).run(compare=compare)
    if as_json:
        echo_json(facts)


def _interrupt(*_: object) -> None:
    """Also where SIGINT itself is ignored, as shells have it for what runs in the background."""
    raise KeyboardInterrupt


class _Demo:
    """One run. Everything for people goes to ``console``."""

    def __init__(self, binary: Path, model: Path, n_predict: int, console: "Console"):
        from polykv_proxy.cli.demo.stack import Sizes

        self.binary, self.model, self.n_predict, self.console = binary, model, n_predict, console
        self.sizes = Sizes()

    def run(self, *, compare: bool) -> dict[str, Any]:
        from polykv_proxy.cli.client import ControlClient
        from polykv_proxy.cli.demo.content import BASE, TASK_GROUP, WEB_GROUP
        from polykv_proxy.cli.demo.report import agents_table
        from polykv_proxy.cli.demo.stack import Stack
        from polykv_proxy.cli.pool_tree import draw_tree, summary

        say, started_s = self.console.print, time.perf_counter()
        say(f"{self.model.name}, {self.sizes.n_parallel} slots, {count(self.sizes.n_ctx)} cells, {os.cpu_count()} CPUs")
        with Stack(self.binary, self.model, self.sizes) as stack:
            self._start(stack, "starting engine and proxy")
            with ControlClient(stack.url) as control:
                self._heading("1  One agent's instructions become a pool")
                pools = [self._make(control, BASE, parent=None)]
                self._heading("2  Two forks: one extends it, one branches off where another toolset begins")
                pools += [self._make(control, group, parent=pools[0]) for group in (TASK_GROUP, WEB_GROUP)]
                self._heading("3  Four sub-agents at once on each")
                runs = [self._fan_out(stack.url, BASE, pooled=True)]
                used_cells = control.get("/polykv/pools")["kv_cells_used"]
                runs += [self._fan_out(stack.url, group, pooled=True) for group in (TASK_GROUP, WEB_GROUP)]
                say(agents_table(runs))
                view = control.get("/polykv/pools")
                self._heading("The tree now (every shared cell counted once, where it is owned)")
                say(draw_tree(view))
                say("")
                say(summary(view))
        _check_attached(pools, runs)
        alone = self._without_pools(runs[0], pools[0], used_cells) if compare else None
        took_s = time.perf_counter() - started_s
        say(f"\nThe whole demo took {took_s:.0f} s.")
        return {
            "seconds": took_s,
            "pools": pools,
            "groups": [asdict(run) for run in runs],
            "without_pools": alone and asdict(alone),
            "tree": view,
        }

    def _start(self, stack: "Stack", what: str) -> None:
        with self._waiting(what) as tick:
            stack.start(tick)

    def _make(self, control: "ControlClient", group: "Group", *, parent: dict[str, Any] | None) -> dict[str, Any]:
        path = "/polykv/pools" if parent is None else f"/polykv/pools/{parent['name']}/fork"
        with self._waiting(f"prefilling {group.pool}"):
            started_s = time.perf_counter()
            pool: dict[str, Any] = control.post(path, {"name": group.pool, "messages": list(group.prefix)})
            took_ms = 1000 * (time.perf_counter() - started_s)
        whence = ""
        if parent is not None:
            edge = "extends" if pool["branch_pos"] == parent["prefix_len"] else "branches off"
            whence = f"{edge} {parent['name']} at {count(pool['branch_pos'])}: +"
        self.console.print(f"{group.pool:<14} {whence}{count(pool['own_n_tokens'])} tokens, {took_ms:,.0f} ms")
        return pool | {"client_ms": took_ms}

    def _fan_out(self, url: str, group: "Group", *, pooled: bool) -> "GroupRun":
        from polykv_proxy.cli.demo.agents import run_group

        heard: dict[str, int] = {}
        with self._waiting(f"{len(group.questions)} agents on {group.pool}") as tick:

            def hear(agent: str) -> None:
                heard[agent] = heard.get(agent, 0) + 1
                tick(f"{len(heard)} answering, {sum(heard.values())} tokens")

            return run_group(url, group, pooled=pooled, n_predict=self.n_predict, tick=hear)

    def _without_pools(self, pooled: "GroupRun", pool: dict[str, Any], used_cells: int | None) -> "GroupRun":
        from dataclasses import replace

        from polykv_proxy.cli.demo.content import BASE
        from polykv_proxy.cli.demo.report import agents_table, comparison_notes, comparison_table
        from polykv_proxy.cli.demo.stack import Stack

        self._heading("4  The first four again, without pools: everyone prefills everything")
        with Stack(self.binary, self.model, replace(self.sizes, n_max_pools=0)) as stack:
            self._start(stack, "starting a plain llama-server")
            alone = self._fan_out(stack.url, BASE, pooled=False)
            again = self._fan_out(stack.url, BASE, pooled=False)
        self.console.print(agents_table([alone]))
        self._heading("Beside each other")
        self.console.print(comparison_table(pooled, alone, create_ms=pool["client_ms"], used_cells=used_cells))
        self.console.print("", *comparison_notes(pooled, alone, again), sep="\n")
        return alone

    def _heading(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(f"\n{text}", style="bold"))

    @contextmanager
    def _waiting(self, what: str) -> Iterator[Callable[..., None]]:
        """Show that something goes on, for how long, and how far it is."""
        started_s = time.perf_counter()
        detail = ""

        def line() -> str:
            return f"{what} … {time.perf_counter() - started_s:.0f} s{', ' if detail else ''}{detail}"

        if not self.console.is_terminal:
            self.console.print(f"{what} …")
            yield lambda *_: None
            return
        with self.console.status(line()) as status:

            def tick(more: str = "") -> None:
                nonlocal detail
                detail = more
                status.update(line())

            yield tick


def _check_attached(pools: list[dict[str, Any]], runs: "list[GroupRun]") -> None:
    """A demo that shows nothing must not end well.

    Raises:  ServerRefused
    """
    from polykv_proxy.cli.client import ServerRefused

    for pool, run in zip(pools, runs, strict=True):
        for agent in run.agents:
            if agent.cache_n < pool["prefix_len"] - 1:
                line = f"{agent.agent} reused {agent.cache_n} tokens of a pool of {pool['prefix_len']}"
                raise ServerRefused(f"{line}: {agent.miss_reason}", status=200)


__all__ = ["demo"]
