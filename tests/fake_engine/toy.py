"""A tokenizer of one token per byte, and a chat template; enough to be exact about prefixes.

Bytes are tokens 0..255, ``<|im_start|>`` is 256, ``<|im_end|>`` (also end of text) 257. So a text of n ASCII
characters has n tokens and a test can say where two prompts diverge by counting.
"""

import json
from collections.abc import Callable
from typing import Any

IM_START, IM_END, N_VOCAB = 256, 257, 300
COMPLETION_PATHS = ("/completion", "/completions", "/v1/completions")
CHAT_PATHS = ("/chat/completions", "/v1/chat/completions")
ATTACHABLE = (*COMPLETION_PATHS, *CHAT_PATHS, "/v1/messages", "/v1/responses")


class Refused(Exception):
    """The engine's 400."""


class ToyTokenizer:
    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(text.split("<|im_start|>")):
            if i:
                tokens.append(IM_START)
            for j, piece in enumerate(part.split("<|im_end|>")):
                if j:
                    tokens.append(IM_END)
                tokens += piece.encode()
        return tokens

    def decode(self, tokens: list[int]) -> str:
        out = b"".join(
            bytes([t]) if t < 256 else {IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}.get(t, b"?") for t in tokens
        )
        return out.decode("utf-8", "replace")


class Template:
    """``refuses``: messages → reason, to play templates that insist on an order of roles.

    ``image``: the text that stands for a picture, and is as long.
    """

    def __init__(self) -> None:
        self.tokenizer = ToyTokenizer()
        self.image = "<image>"
        self.refuses: Callable[[list[dict[str, Any]]], str | None] = lambda messages: None

    def render(self, path: str, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """(token lists, one per prompt; has_media) as the route would see them. Raises Refused."""
        if path in COMPLETION_PATHS:
            return self._prompts(body)
        if path in CHAT_PATHS:
            messages = body.get("messages")
        elif path == "/v1/messages":
            messages = _from_anthropic(body)
        elif path == "/v1/responses":
            messages = _from_responses(body)
        else:
            raise Refused(f"no such route: {path}")
        if not isinstance(messages, list) or not messages:
            raise Refused("'messages' is required")
        text, media = self._chat(messages, body)
        return [self.tokenizer.encode(text)], media

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        if "prompt" not in body:
            raise Refused('"prompt" is required')
        prompt = body["prompt"]
        media = False

        def one(p: Any) -> list[int]:
            nonlocal media
            if isinstance(p, str):
                return self.tokenizer.encode(p)
            if isinstance(p, dict):
                media = media or bool(p.get("multimodal_data"))
                return self.tokenizer.encode(p["prompt_string"])
            out: list[int] = []
            for part in p:
                out += self.tokenizer.encode(part) if isinstance(part, str) else [int(part)]
            return out

        if isinstance(prompt, list) and (not prompt or not all(isinstance(p, int) for p in prompt)):
            mixed = any(isinstance(p, int) for p in prompt)
            lists = [one(prompt)] if mixed else [one(p) for p in prompt]
        else:
            lists = [one(prompt)]
        for tokens in lists:
            if any(not 0 <= t < N_VOCAB for t in tokens):
                raise Refused("Prompt contains invalid tokens")
        return lists, media

    def _chat(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> tuple[str, bool]:
        reason = self.refuses(messages)
        if reason:
            raise Refused(reason)
        media = False
        out = ""
        if body.get("tools"):
            out += f"<|im_start|>tools\n{json.dumps(body['tools'], sort_keys=True)}<|im_end|>\n"
        if body.get("chat_template_kwargs"):
            out += f"<|im_start|>kwargs\n{json.dumps(body['chat_template_kwargs'], sort_keys=True)}<|im_end|>\n"
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or "role" not in message:
                raise Refused("each message needs a role")
            text, m = _content(message.get("content"), self.image)
            media = media or m
            if message.get("tool_calls"):
                text += json.dumps(message["tool_calls"], sort_keys=True)
            out += f"<|im_start|>{message['role']}\n{text}"
            if message["role"] == "assistant" and i == len(messages) - 1:
                return out, media  # llama-server continues the last assistant message
            out += "<|im_end|>\n"
        if body.get("add_generation_prompt", True):
            out += "<|im_start|>assistant\n"
        return out, media


def _content(content: Any, image: str) -> tuple[str, bool]:
    if content is None:
        return "", False
    if isinstance(content, str):
        return content, False
    text, media = "", False
    for part in content:
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text"):
            text += part["text"]
        else:
            media = True
            text += image
    return text, media


def _from_anthropic(body: dict[str, Any]) -> list[dict[str, Any]]:
    system = body.get("system")
    first = [{"role": "system", "content": system}] if system else []
    return first + list(body.get("messages") or [])


def _from_responses(body: dict[str, Any]) -> list[dict[str, Any]]:
    if body.get("previous_response_id"):
        raise Refused("llama.cpp does not support 'previous_response_id'.")
    first = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    given = body.get("input")
    if isinstance(given, str):
        return [*first, {"role": "user", "content": given}]
    return first + [{"role": m.get("role", "user"), "content": m.get("content")} for m in given or []]
