"""Store: the durable journal of pools, an SQLite file. Knows no tree, no engine and no HTTP.

journal   ``Journal``: what control talks to; its own thread, group commits, last uses written now and then
database  the file's contents: schema, opening, one transaction per batch
changes   what may change there
verify    rows as pools, or what is wrong with them
owed      what happened and is not on the disk yet: it goes out before anything else
place     where the file lies: folder and file modes, the lock, and setting a damaged one aside
rows      one pool as it is kept, and its checksum
"""

from polykv_proxy.store.journal import Journal, Opened
from polykv_proxy.store.rows import PoolRow

__all__ = ["Journal", "Opened", "PoolRow"]
