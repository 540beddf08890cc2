"""``polykvctl pools``: look at the pool tree and change it."""

from typing import Annotated, Any

import typer

from polykv_proxy.cli.output import (
    DEFAULT_URL,
    AdminKey,
    AsJson,
    Url,
    called,
    control_client,
    count,
    echo_json,
    ending_well,
    human_bytes,
    show,
    shown,
)

app = typer.Typer(no_args_is_help=True, help="Pools: shared prefixes, kept once in the engine's cache.")

Ref = Annotated[str, typer.Argument(metavar="POOL", help="Id or name.")]
Prompt = Annotated[str | None, typer.Option("--prompt", help="The prefix as text.")]
PromptFile = Annotated[str | None, typer.Option("--prompt-file", metavar="FILE", help="The prefix as a text file.")]
Messages = Annotated[
    str | None,
    typer.Option("--messages", metavar="FILE", help="JSON: messages, or an object with messages and tools."),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="FILE", help="Token ids: a JSON array, or numbers between spaces.")
]
FromSession = Annotated[str | None, typer.Option("--from-session", metavar="ID", help="What a live session holds now.")]
Name = Annotated[str | None, typer.Option("--name", help="Unique; letters, digits and _ . : @ + -")]
Pin = Annotated[bool, typer.Option("--pin", help="Keep it resident under pressure.")]
Ttl = Annotated[float | None, typer.Option("--ttl", min=0, metavar="SECONDS", help="Grace after its last use.")]


@app.command("tree")
def tree(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Draw the tree: prefix length, own tokens and KV, where it is, sessions with tokens per second."""
    from polykv_proxy.cli.pool_tree import draw_tree, has_unpooled, summary

    with ending_well(), control_client(url, admin_key) as control:
        view = control.get("/polykv/pools")
        if as_json:
            echo_json(view)
            return
        if not view["pools"]:
            show("No pools. Make one with: polykvctl pools create --prompt-file FILE --name NAME")
            if not has_unpooled(view):
                return
        show(draw_tree(view))
        show("")
        show(summary(view))


@app.command("ls")
def ls(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """List the pools, one a line."""
    from polykv_proxy.cli.pool_tree import list_table

    with ending_well(), control_client(url, admin_key) as control:
        view = control.get("/polykv/pools")
        if as_json:
            echo_json(view)
        else:
            show(list_table(view))


@app.command("show")
def show_pool(ref: Ref, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show one pool in full, and the tree below it."""
    from polykv_proxy.cli.pool_tree import draw_tree

    with ending_well(), control_client(url, admin_key) as control:
        view = control.get(path_of(ref))
        if as_json:
            echo_json(view)
            return
        pool = view["pools"][0]
        for field, value in pool.items():
            if field not in ("sessions", "children"):
                typer.echo(f"{field:<18}{shown(field, value)}")
        if pool["children"] or pool["sessions"]:
            show("")
            show(draw_tree(view))


@app.command("create")
def create(
    *,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    messages: Messages = None,
    tokens: Tokens = None,
    from_session: FromSession = None,
    name: Name = None,
    pin: Pin = False,
    ttl_s: Ttl = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a root pool; a FILE of - is standard input."""
    from polykv_proxy.cli.pool_source import pool_source

    with ending_well():
        body = pool_source(
            prompt=prompt, prompt_file=prompt_file, messages=messages, tokens=tokens, from_session=from_session
        )
        with control_client(url, admin_key) as control:
            _say_made(control.post("/polykv/pools", body | _wishes(name, pin, ttl_s)), as_json=as_json)


@app.command("fork")
def fork(
    ref: Ref,
    *,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    messages: Messages = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="FILE", help="The child's FULL prefix as token ids.")
    ] = None,
    own_tokens: Annotated[
        str | None, typer.Option("--own-tokens", metavar="FILE", help="Only the tokens behind --branch-pos.")
    ] = None,
    from_session: FromSession = None,
    branch_pos: Annotated[
        int | None,
        typer.Option("--branch-pos", min=1, metavar="D", help="Tokens inherited; default: up to where it diverges."),
    ] = None,
    name: Name = None,
    pin: Pin = False,
    ttl_s: Ttl = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Fork a child that shares a prefix of POOL: extends it, or branches off before its end."""
    from polykv_proxy.cli.pool_source import pool_source

    with ending_well():
        body = pool_source(
            prompt=prompt,
            prompt_file=prompt_file,
            messages=messages,
            tokens=tokens,
            own_tokens=own_tokens,
            from_session=from_session,
            forking=True,
        )
        body |= _wishes(name, pin, ttl_s) | ({} if branch_pos is None else {"branch_pos": branch_pos})
        with control_client(url, admin_key) as control:
            _say_made(control.post(path_of(ref, "fork"), body), parent=ref, as_json=as_json)


@app.command("pin")
def pin(ref: Ref, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Keep a pool resident under pressure; a cold one is brought back first."""
    _keep("pin", ref, url, admin_key, as_json=as_json)


@app.command("unpin")
def unpin(ref: Ref, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Let a pool go under pressure again."""
    _keep("unpin", ref, url, admin_key, as_json=as_json)


def _keep(verb: str, ref: str, url: str, admin_key: str | None, *, as_json: bool) -> None:
    with ending_well(), control_client(url, admin_key) as control:
        pool = control.post(path_of(ref, verb), None)
        if as_json:
            echo_json(pool)
            return
        before = "" if pool["changed"] else ", as it was before"
        typer.echo(f"{called(pool)}: {'pinned' if pool['pinned'] else 'not pinned'}{before}; {pool['residency']}")
        typer.echo(f"pinned       {count(pool['pinned_cells'])} of {count(pool['budget_cells'])} cells")


@app.command("evict")
def evict(
    ref: Ref,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIER", help="warm, or cold; default: warm if it can.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Drop a pool's KV and keep the pool: the next attach brings it back."""
    from polykv_proxy.cli.client import WrongUsage

    with ending_well(), control_client(url, admin_key) as control:
        if to not in (None, "cold", "warm"):
            raise WrongUsage(f"--to {to!r} is neither cold nor warm")
        pool = control.post(path_of(ref, "evict") + (f"?to={to}" if to else ""), None)
        if as_json:
            echo_json(pool)
            return
        typer.echo(f"{called(pool)}: {_left_as(pool)}")
        typer.echo(f"freed        {shown('freed', pool['freed'])}")


@app.command("flush")
def flush(ref: Ref, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Evict a pool and everything below it, except what is pinned or has requests running."""
    with ending_well(), control_client(url, admin_key) as control:
        before = {} if as_json else {pool["pool_id"]: pool for pool in control.get(path_of(ref))["pools"]}
        answer = control.post(path_of(ref, "flush"), None)
        if as_json:
            echo_json(answer)
            return

        def name(pool_id: int) -> str:
            return called(before.get(pool_id, {"pool_id": pool_id}))

        if not answer["evicted"] and not answer["kept"]:
            typer.echo("nothing to evict: neither this pool nor any below it has a sequence in the cache")
            return
        kept = ", ".join(f"{name(pool['pool_id'])}: {pool['reason'].replace('_', ' ')}" for pool in answer["kept"])
        typer.echo(f"evicted      {', '.join(map(name, answer['evicted'])) or 'none'}")
        typer.echo(f"kept         {kept or 'none'}")
        typer.echo(f"freed        {shown('freed', answer['freed'])}")


@app.command("release")
def release(
    ref: Ref,
    recursive: Annotated[bool, typer.Option("--recursive", help="Everything below it too, leaves first.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Take a pool off the tree; its cells are free once the last running request that uses them ends."""
    with ending_well(), control_client(url, admin_key) as control:
        answer = control.delete(path_of(ref) + ("?recursive=true" if recursive else ""))
        if as_json:
            echo_json(answer)
            return
        gone = ", ".join(str(pool_id) for pool_id in answer["released"])
        typer.echo(f"released pool{'s' if len(answer['released']) > 1 else ''} {gone}")
        for field in ("freed_now", "freed_later"):
            typer.echo(f"{field.replace('_', ' '):<12} {shown(field, answer[field])}")


def path_of(ref: str, *more: str) -> str:
    """Check what the server would never know, so that ``..`` stays a wrong name and not another path.

    Raises:  WrongUsage
    """
    from polykv_proxy.cli.client import WrongUsage, pool_path
    from polykv_proxy.errors import RequestError
    from polykv_proxy.tree.pool import check_name

    if not (ref.isascii() and ref.isdigit()):
        try:
            check_name(ref)
        except RequestError as error:
            raise WrongUsage(f"{ref!r} is no pool: {error.message}") from None
    return pool_path(ref, *more)


def _wishes(name: str | None, pin: bool, ttl_s: float | None) -> dict[str, Any]:
    """Only what was asked for: the server has its own defaults."""
    wishes: dict[str, Any] = {} if name is None else {"name": name}
    return wishes | ({"pin": True} if pin else {}) | ({} if ttl_s is None else {"ttl_s": ttl_s})


def _left_as(pool: dict[str, Any]) -> str:
    """What an eviction left of a pool, and where there was nothing to do, that it was so before."""
    now, saved = pool["residency"], human_bytes(pool["warm_bytes"])
    if pool["held_by"] is not None:
        own = "it had no sequence of its own" if pool["freed"]["seq_ids"] == 0 else "its own sequence is free"
        return f"still resident: {own}, and that of pool {pool['held_by']} holds all of it"
    if now == "warm":
        return f"warm as before, {saved} saved" if pool["was"] == "warm" else f"warm, {saved} saved"
    if pool["was"] == "cold":
        return f"{now} as before: nothing of it was in the cache or saved, so there was nothing to save or drop"
    return f"{now}; what was saved of it is forgotten" if pool["was"] == "warm" else str(now)


def _say_made(pool: dict[str, Any], *, parent: str | None = None, as_json: bool) -> None:
    """``parent``: what the person called it."""
    if pool["same_as"] is not None:
        same = f"pool {pool['same_as']}"
        typer.echo(f"note: {same} has the very same tokens; release one of them if nobody needs both", err=True)
    if as_json:
        echo_json(pool)
        return
    above = called({"pool_id": pool["parent"], "name": None if parent is None or parent.isdigit() else parent})
    inherited = "" if pool["parent"] == -1 else f", {count(pool['branch_pos'])} of them from {above}"
    took = f" in {pool['materialize_ms']:,.0f} ms" if pool.get("materialize_ms") is not None else ""
    typer.echo(f"{called(pool)}: {count(pool['prefix_len'])} tokens{inherited}; {pool['residency']}{took}")
