"""A control plane for the command line's tests: contract answers out of a real ``PoolTree``, over a real socket.

What is tested is the command line, so whatever the tree does not decide is answered plainly. ``asked`` keeps what
arrived; ``answer_next`` makes the next answer a given one.
"""

import json
import threading
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from polykv_proxy.errors import PolyKVError
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.tree.accounting import account, parts_of
from polykv_proxy.tree.cells import CellBook
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.tree.view import EngineFacts, RetentionFacts, SessionFacts, TreePicture


@dataclass
class Asked:
    verb: str
    path: str
    body: Any
    authorization: str | None


@dataclass
class ContractServer:
    """``with ContractServer() as server: server.url``"""

    tree: PoolTree = field(default_factory=PoolTree)
    sessions: list[SessionFacts] = field(default_factory=list)
    engine: EngineFacts = field(
        default_factory=lambda: EngineFacts(
            bytes_per_token=46080, seq_ids_used=8, seq_ids_max=22, kv_cells_used=1986, kv_cells_total=16384
        )
    )
    in_use: set[PoolId] = field(default_factory=set)
    grace_end_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    answer_next: tuple[int, bytes, dict[str, str]] | None = None

    def __enter__(self) -> Self:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Tests read stderr."""

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def do_DELETE(self) -> None:
                self._serve()

            def _serve(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length", 0)))
                asked = Asked(self.command, self.path, json.loads(raw) if raw else None, self.headers["authorization"])
                owner.asked.append(asked)
                status, body, headers = owner.answer(asked)
                self.send_response_only(status)
                for key, value in (
                    {"content-type": "application/json", "content-length": str(len(body))} | headers
                ).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, asked: Asked) -> tuple[int, bytes, dict[str, str]]:
        if self.answer_next is not None:
            given, self.answer_next = self.answer_next, None
            return given
        try:
            status, body = self._decide(asked)
        except PolyKVError as error:
            problem = {"message": error.message, "type": "invalid_request_error", "code": error.code, **error.extra}
            status, body = error.status, {"error": problem, "src": "polykv_proxy"}
        return status, json.dumps(body).encode(), {}

    def _decide(self, asked: Asked) -> tuple[int, Any]:
        split = urlsplit(asked.path)
        parts = [unquote(part) for part in split.path.split("/")[1:]]
        assert parts[:2] == ["polykv", "pools"]
        match asked.verb, parts[2:]:
            case "GET", []:
                return 200, self._view()
            case "GET", [ref]:
                top = self.tree.get(ref).pool_id
                return 200, self._view(top)
            case "POST", []:
                tokens = make_tokens(asked.body.get("tokens") or range(len(json.dumps(asked.body))))
                return 201, self._make(self.tree.plan_root(tokens, name=asked.body.get("name")))
            case "POST", [ref, "fork"]:
                parent, name = self.tree.get(ref).pool_id, asked.body.get("name")
                d = asked.body.get("branch_pos")
                if "own_tokens" in asked.body:
                    own = make_tokens(asked.body["own_tokens"])
                    return 201, self._make(self.tree.plan_fork_own(parent, own, branch_pos=d, name=name))
                full = make_tokens(asked.body["tokens"])
                return 201, self._make(self.tree.plan_fork(parent, full, branch_pos=d, name=name))
            case "DELETE", [ref]:
                recursive = parse_qs(split.query).get("recursive") == ["true"]
                gone = self.tree.release(self.tree.get(ref).pool_id, recursive=recursive)
                return 200, {
                    "released": [pool.pool_id for pool in gone],
                    "freed_now": {"seq_ids": 1, "kv_cells": 12, "kv_bytes": 1200},
                    "freed_later": {"kv_cells": 0, "kv_bytes": 0},
                }
        return 404, {"error": {"message": "no such route", "code": "not_found", "type": "invalid_request_error"}}

    def _view(self, top: PoolId | None = None) -> dict[str, Any]:
        book = CellBook()
        for pool in self.tree.residents():
            assert pool.seq_id is not None
            book.adopt(pool.seq_id, 1, parts_of(self.tree, pool))
        retention = RetentionFacts(in_use=self.in_use, grace_end_s=lambda _: self.grace_end_s)
        slots = {SlotId(at): session.suffix_n_tokens for at, session in enumerate(self.sessions)}
        accounts = replace(account(self.tree, {}, book), slot_cells=slots)
        picture = TreePicture(self.tree, self.sessions, self.engine, accounts=accounts, retention=retention, top=top)
        return picture.whole()

    def _make(self, plan: Any) -> dict[str, Any]:
        pool = self.resident(self.tree.commit(plan, now_s=0.0))
        return {
            "pool_id": pool.pool_id,
            "name": pool.name,
            "parent": pool.parent,
            "branch_pos": pool.branch_pos,
            "prefix_len": pool.prefix_len,
            "own_n_tokens": pool.own_n_tokens,
            "seq_id": pool.seq_id,
            "residency": pool.residency,
            "materialize_ms": 6200.4,
            "same_as": min((twin.pool_id for twin in self.tree.twins(pool.pool_id) if twin is not pool), default=None),
        }

    def resident(self, pool: Pool) -> Pool:
        self.tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(5 + pool.pool_id), gen=1)
        return pool
