"""How the pool tree is drawn: one table whose first column carries the branches. JSON in, rich out.

pool           prefix    own         KV  where
system          1,740  1,740    80.2 MB  resident pinned
├─ reviewer     1,902    162     7.5 MB  resident
│  ▸ agent-1               52     2.4 MB  generating  48.1 tok/s
└─ tester       1,688    240    11.1 MB  resident grace 5 min
unpooled                 786    18.1 MB  2 sessions
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polykv_proxy.cli.output import UNKNOWN, count, human_bytes, plain

if TYPE_CHECKING:
    from rich.text import Text

    from polykv_proxy.cli.fitting import FittedTable, Footer, Label, Row

_LEVELS_MAX = 8
_SESSIONS_MAX = 12
_SESSION_LEAST = 10
_TREE_LABEL = 28
_LIST_LABEL = 10
_PINNED = {False: ("pinned",), True: ("pinned,", "unused")}
_COLOURS = {"resident": "green", "materializing": "yellow", "warm": "cyan", "cold": "bright_black"}


def pool_label(pool: Mapping[str, Any]) -> str:
    return f"#{pool['pool_id']}" if pool.get("name") is None else str(pool["name"])


def summary(view: Mapping[str, Any]) -> "Footer":
    """Below the tree: how much of everything is in use."""
    from polykv_proxy.cli.fitting import Footer
    from polykv_proxy.tree.placement import is_sparse

    pools = view["pools"]
    n_sessions = sum(len(pool["sessions"]) for pool in pools) + len((view.get("unpooled") or {}).get("sessions", ()))
    high, used = view.get("kv_cells_high"), view.get("kv_cells_used")
    stray = f", highest {count(high)}" if high and used is not None and is_sparse(used, high) else ""
    parts = [
        f"{count(len(pools))} pool{'' if len(pools) == 1 else 's'}, depth {view.get('tree_depth', UNKNOWN)}",
        _n_sessions(n_sessions),
        f"sequences {count(view.get('seq_ids_used'))}/{count(view.get('seq_ids_max'))}",
        f"cells {count(used)}/{count(view.get('kv_cells_total'))}{stray}",
    ]
    warm = view.get("warm") or {}
    saved = [
        f"{human_bytes(place['bytes'])} {where}"
        for key, where in (("ram", "in memory"), ("disk", "on disk"))
        if (place := warm.get(key)) and (place["bytes"] or (place["bytes"] is None and place.get("max_bytes")))
    ]
    parts += [f"warm {', '.join(saved)}"] if saved else []
    n_hits = sum(place.get("hits", 0) for key in ("ram", "disk") if (place := warm.get(key)))
    if n_hits or warm.get("misses"):
        parts.append(f"brought back {count(n_hits)}, missed {count(warm.get('misses', 0))}")
    if view.get("idle_tax"):
        parts.append(f"idle cells cost {view['idle_tax']:.0%}")
    return Footer(parts)


def draw_tree(view: Mapping[str, Any]) -> "FittedTable":
    """Draw every pool of the view with its sessions, children in the order of their ids."""
    from polykv_proxy.cli.fitting import FittedTable, Row

    pools = {pool["pool_id"]: pool for pool in view["pools"]}
    rows: list[Row] = []
    # Each entry: pool, the guides of its own row, the guides its children start from, level. A stack, not recursion:
    # the tree may be deeper than Python's.
    tops = [pool for pool in pools.values() if pool["parent"] not in pools]
    stack = [(pool, "", "", 0) for pool in reversed(tops)]
    while stack:
        pool, own_guide, guide, level = stack.pop()
        children = [pools[child] for child in pool["children"] if child in pools]
        numbers = (count(pool["prefix_len"]), count(pool["own_n_tokens"]), human_bytes(pool["own_kv_bytes"]))
        rows.append(Row(_pool_label(pool, own_guide), numbers, _where(pool)))
        rows += _session_rows(pool["sessions"], guide + ("│  " if children else "   "))
        for number, child in reversed(list(enumerate(children, start=1))):
            last = number == len(children)
            if level < _LEVELS_MAX:
                stack.append((child, guide + ("└─ " if last else "├─ "), guide + ("   " if last else "│  "), level + 1))
            else:  # no room for more guides at 80 columns: say the level instead
                stack.append((child, f"{guide}{level + 1}: ", guide, level + 1))
    rows += _released_rows(view.get("released"))
    rows += _unpooled_rows(view.get("unpooled"))
    return FittedTable(("pool", "prefix", "own", "KV", "where"), rows, label_at=0, label_keeps=_TREE_LABEL)


def has_unpooled(view: Mapping[str, Any]) -> bool:
    """Whether anything is in the cache, or anybody there, without a pool."""
    unpooled = view.get("unpooled") or {}
    return bool(unpooled.get("sessions") or unpooled.get("kv_cells") or view.get("released"))


def list_table(view: Mapping[str, Any]) -> "FittedTable":
    """One line per pool, more only where the last column has to wrap; for the eye and for grep."""
    from polykv_proxy.cli.fitting import FittedTable, Label, Row

    rows = []
    for pool in view["pools"]:
        name = str(pool.get("name") or "")
        numbers = (
            str(pool["pool_id"]),
            "" if pool["parent"] == -1 else str(pool["parent"]),
            str(pool["branch_pos"]),
            str(pool["prefix_len"]),
            str(pool["own_n_tokens"]),
            human_bytes(pool["own_kv_bytes"]),
            f"{pool['hits']}/{pool['queries']}",
            str(len(pool["sessions"])),
        )
        rows.append(Row(Label("", name, short=name, least=name[:3]), numbers, _where(pool)))
    headings = ("id", "name", "parent", "D", "prefix", "own", "KV", "hits", "sess", "where")
    return FittedTable(headings, rows, label_at=1, label_keeps=_LIST_LABEL)


def _n_sessions(n: int) -> str:
    return f"{count(n)} session{'' if n == 1 else 's'}"


def _released_rows(released: Sequence[Mapping[str, Any]] | None) -> "Iterator[Row]":
    """What slots still hold of pools that are gone, until their next turn."""
    if released:
        sizes = [pool["own_kv_bytes"] for pool in released]
        n_bytes = None if None in sizes else sum(sizes)
        yield _rest_row("released", sum(pool["own_kv_cells"] for pool in released), n_bytes, "in slots")


def _unpooled_rows(unpooled: Mapping[str, Any] | None) -> "Iterator[Row]":
    """The rest of the cache, so that the column adds up: who has no pool, by number."""
    if unpooled is not None and (unpooled["sessions"] or unpooled["kv_cells"]):
        n_sessions = _n_sessions(len(unpooled["sessions"]))
        yield _rest_row("unpooled", unpooled["kv_cells"], unpooled["kv_bytes"], n_sessions)


def _rest_row(what: str, n_cells: int | None, n_bytes: float | None, where: str) -> "Row":
    from rich.text import Text

    from polykv_proxy.cli.fitting import Label, Row

    label = Label("", what, short=what, least=what, style="bright_black")
    return Row(label, ("", count(n_cells), human_bytes(n_bytes)), [Text(where)])


def _pool_label(pool: Mapping[str, Any], guide: str) -> "Label":
    """A name that is cut is no name to type, so its id goes before it then."""
    from polykv_proxy.cli.fitting import Label

    text, number = pool_label(pool), f"#{pool['pool_id']}"
    return Label(guide, text, short=text if text == number else f"{number} {text}", least=number, style="bold")


def _where(pool: Mapping[str, Any]) -> "list[Text]":
    from rich.text import Text

    residency = pool["residency"]
    parts = [Text(str(residency or "unknown"), style=_COLOURS.get(residency, ""))]
    if residency == "warm":
        parts.append(Text(human_bytes(pool["warm_bytes"]), style="cyan"))
    elif residency is None and pool.get("warm_bytes"):
        parts.append(Text(f"{human_bytes(pool['warm_bytes'])} on disk", style="cyan"))
    if pool.get("pinned"):
        parts += [Text(word, style="magenta") for word in _PINNED[bool(pool.get("orphaned_pin"))]]
    if pool.get("auto"):
        parts.append(Text("auto", style="bright_black"))
    if pool.get("expires_ts") is not None:
        left_s = pool["expires_ts"] - time.time()
        parts += [Text("grace", style="bright_black")]
        parts += [Text("over" if left_s <= 0 else _duration(left_s), style="bright_black")]
    return parts


def _duration(seconds: float) -> str:
    """Round up to two digits or so: ``4 s``, ``5 min``, ``3 h``, ``12 d``."""
    for unit, size, limit in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds <= limit * size:
            return f"{math.ceil(seconds / size)} {unit}"
    return f"{math.ceil(seconds / 86400)} d"


def _session_rows(sessions: Sequence[Mapping[str, Any]], guide: str) -> "Iterator[Row]":
    from rich.text import Text

    from polykv_proxy.cli.fitting import Label, Row

    for session in sorted(sessions, key=lambda session: str(session["session_id"]))[:_SESSIONS_MAX]:
        own = session["suffix_n_tokens"]
        has_cells = own is None or bool(session.get("prefix_n_tokens") or own)  # None: not known
        name = f"▸ {plain(session['session_id'])}"
        yield Row(
            Label(guide, name, short=name, least=name[:_SESSION_LEAST], style="blue"),
            ("", count(own), human_bytes(session["marginal_kv_bytes"])),
            [Text(part, style="" if has_cells else "bright_black") for part in _doing(session, has_cells)],
        )
    if len(sessions) > _SESSIONS_MAX:
        rest = f"… and {len(sessions) - _SESSIONS_MAX} more"
        yield Row(Label(guide, f"{rest} sessions", short=rest, least=rest, style="bright_black"), ("", "", ""), [])


def _doing(session: Mapping[str, Any], has_cells: bool) -> list[str]:
    """What a session does, how fast it was, and where what it said is."""
    tps, parked = session.get("tps_ewma"), session.get("state") == "parked"
    where = human_bytes(session.get("warm_bytes")) if parked else "" if has_cells else "no cells"
    return list(filter(None, (session.get("state"), where, "" if tps is None else f"{tps:.1f} tok/s")))
