"""Token sequences without meaning, drawn from the ordinary part of a model's vocabulary.

Same seed, same tokens. Only tokens that are plain ASCII words or word parts are drawn: a grammar can force each of them
(it cannot force half a character), and their text survives every route of the server.
"""

import random
import re
from pathlib import Path

import gguf

_WORD = re.compile(r"Ġ?[A-Za-z]{2,}")


class Noise:
    """Draws tokens of one vocabulary."""

    def __init__(self, vocabulary_of: Path) -> None:
        field = gguf.GGUFReader(vocabulary_of).fields["tokenizer.ggml.tokens"]
        texts: list[str] = field.contents()
        self.n_vocab = len(texts)
        self.words = {token: text for token, text in enumerate(texts) if _WORD.fullmatch(text)}
        self._ids = list(self.words)
        self._beginnings = [text for text in self.words.values() if text.startswith("Ġ")]

    def __call__(self, seed: int, n: int) -> list[int]:
        return random.Random(seed).choices(self._ids, k=n)

    def text(self, seed: int, n_words: int) -> str:
        """Words that stand for about as many tokens (a tokenizer may cut some of them otherwise)."""
        drawn = random.Random(seed).choices(self._beginnings, k=n_words)
        return "".join(drawn).replace("Ġ", " ").strip()
