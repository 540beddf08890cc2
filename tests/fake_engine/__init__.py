"""An in-process llama-server for tests: real HTTP, a toy tokenizer, exact cell accounting, faults on demand.

``FakeEngine()`` is the patched engine (hooks of the contract §5), ``FakeEngine(hooks=False)`` a plain llama-server.
It compares tokens, shares and counts cells, and decodes deterministically from the whole context, so that a wrong
attach shows as another text and not only as another number.

``toy``       tokenizer and chat templates of the four dialects
``cache``     sequences and cells: sharing is membership, a cell is free when nobody holds it
``saved``     states of pools and slots outside the cache, in memory and in files
``dialects``  the bytes of the replies, streamed and not
``server``    HTTP, slots, hooks, faults
"""

from tests.fake_engine.faults import Hold, Received, delay, drop, reply
from tests.fake_engine.server import FakeEngine
from tests.fake_engine.toy import ToyTokenizer

__all__ = ["FakeEngine", "Hold", "Received", "ToyTokenizer", "delay", "drop", "reply"]
