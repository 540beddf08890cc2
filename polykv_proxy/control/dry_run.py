"""What a request would get, without changing or preparing anything: ``POST /polykv/match``.

Token ids are compared without the engine; a prompt or messages are rendered by it, which it does while it is busy.
"""

from collections.abc import Callable
from typing import Any

from polykv_proxy.control.compare import Comparer
from polykv_proxy.control.orders import Source
from polykv_proxy.control.sources import CHAT, COMPLETION
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import RequestError, UpstreamLoading, UpstreamTimeout, UpstreamUnavailable
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens, lcp_tokens, make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient


class DryRun:
    def __init__(
        self,
        *,
        tree: PoolTree,
        comparer: Comparer,
        engine: EngineClient,
        watch: EngineWatch,
        is_resident: Callable[[Pool], bool],
    ):
        self._tree, self._comparer, self._engine, self._watch = tree, comparer, engine, watch
        self._is_resident = is_resident

    async def match(self, source: Source, ref: int | str | None) -> dict[str, Any]:
        """Compare with the pool ``ref``, or find the one that a new session would get.

        Raises:  PoolNotFound (404), RequestError (400), EngineUnpatched (501), UpstreamError and its heirs
        """
        await self._look_at_engine(source)
        if ref is not None:
            self._tree.get(ref)  # before anything is rendered for it
        tokens, incompatible = await self._tokens(source)
        named = self._tree.get(ref) if ref is not None else None
        if incompatible:
            return _answer(None, 0, tokens, "incompatible", None)
        stats = self._watch.stats
        if stats is not None and stats.share != "ok":
            return _answer(None, 0, tokens, "swa_or_recurrent", None)
        if not len(self._tree):
            return _answer(None, 0, tokens, "no_pool", None)
        found = self._comparer.compare_tokens([tokens], named)
        pool, n_prefix = found.pool, found.prefix_n_tokens
        if pool is None or not n_prefix:
            reason = "diverged" if named is not None else "no_pool"  # who names none expects none
            return _answer(None, 0, tokens, reason, await self._divergence(source, tokens, named, None))
        if n_prefix < min(pool.prefix_len, len(tokens)):
            return _answer(pool, n_prefix, tokens, "diverged", await self._divergence(source, tokens, pool, n_prefix))
        return _answer(pool, n_prefix, tokens, None if self._is_resident(pool) else "cold", None)

    async def _look_at_engine(self, source: Source) -> None:
        """Token ids only need to have seen it once."""
        try:
            await self._watch.require_patched()
        except (UpstreamUnavailable, UpstreamLoading, UpstreamTimeout):
            if source.tokens is None or self._watch.stats is None:
                raise

    async def _tokens(self, source: Source) -> tuple[Tokens, bool]:
        """The prompt's tokens, and whether it is of a kind that cannot be shared."""
        if source.tokens is not None:
            tokens = make_tokens(source.tokens)
            n_vocab = self._watch.stats.model.n_vocab if self._watch.stats is not None else None
            if n_vocab is not None and max(tokens) >= n_vocab:
                at = next(i for i, token in enumerate(tokens) if token >= n_vocab)
                raise RequestError(f"tokens[{at}] is no token id of this model: {tokens[at]}", param="tokens")
            return tokens, False
        try:
            if source.prompt is not None:
                rendered = await self._engine.render(COMPLETION, {"prompt": source.prompt})
            else:
                rendered = await self._engine.render(CHAT, _chat(source, source.messages or []))
        except RequestError as e:
            e.param = e.param or source.kind
            raise
        return rendered.tokens, rendered.has_media or rendered.n_prompts != 1

    async def _divergence(
        self, source: Source, tokens: Tokens, pool: Pool | None, n_prefix: int | None
    ) -> dict[str, Any]:
        """Where the prompt leaves the pool; without one, the pool it follows furthest."""
        if pool is None:
            match = self._tree.match(tokens)
            pool = self._tree.get(match.pool_id) if match is not None else None
        if n_prefix is None:
            n_prefix = self._tree.lcp(pool.pool_id, tokens) if pool is not None else 0
        told: dict[str, Any] = {
            "pos": n_prefix,
            "pool_id": pool.pool_id if pool is not None else None,
            "pool_prefix_len": pool.prefix_len if pool is not None else None,
        }
        if source.messages is not None:
            told["message"] = await self.message_at(source, source.messages, tokens, n_prefix)
        return told

    async def message_at(self, source: Source, messages: list[dict[str, Any]], tokens: Tokens, pos: int) -> int | None:
        """Which message the token at ``pos`` is of, by rendering fewer of them: log2 times.

        None when it is of what stands before them (tools) or behind (the cue to answer), or the template refuses to
        render fewer.
        """

        async def n_kept(asked: list[dict[str, Any]]) -> int:
            rendered = await self._engine.render(CHAT, _chat(source, asked) | {"add_generation_prompt": False})
            return lcp_tokens(rendered.tokens, tokens)

        low, high = 1, len(messages) + 1  # the smallest number of messages whose rendering has that token
        try:
            while low < high:
                middle = (low + high) // 2
                if middle <= len(messages) and await n_kept(messages[:middle]) <= pos:
                    low = middle + 1
                else:
                    high = middle
            if low == 1 and (source.tools or source.chat_template_kwargs):
                other = messages[0] | {"content": "9" if messages[0].get("content") != "9" else "0"}
                return 0 if await n_kept([other]) <= pos else None
        except RequestError:
            return None
        return low - 1 if low <= len(messages) else None


def _chat(source: Source, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": messages}
    if source.tools is not None:
        body["tools"] = source.tools
    if source.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = source.chat_template_kwargs
    return body


def _answer(
    pool: Pool | None, n_prefix: int, tokens: Tokens, reason: str | None, divergence: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "pool_id": pool.pool_id if pool is not None else None,
        "name": pool.name if pool is not None else None,
        "prefix_n_tokens": n_prefix,
        "uncached_n_tokens": len(tokens) - n_prefix,
        "miss_reason": reason,
        "divergence": divergence,
    }
