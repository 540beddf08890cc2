"""Tokens as int32 arrays, their cumulative hashes, and the longest common prefix of two of them.

Tokens decide, hashes only pre-filter: nothing in here calls two prefixes equal before their tokens were compared.

Shapes:  tokens [L] ids from position 0; hashes [L] u64, hashes[i] covers tokens[:i + 1]
Units:   8 bytes of host memory per position for the hashes, 4 for the token
Source:  design §3.1 (prefix_hash), §11 (xxhash64); the engine's ``tokens_hash`` is hashes[-1]
"""

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

from polykv_proxy.errors import RequestError

if TYPE_CHECKING:
    Tokens = array[int]
    Hashes = array[int]
else:  # ``array`` cannot be subscripted at run time before Python 3.12
    Tokens = array
    Hashes = array

TOKEN_BYTES = 4
TOKEN_MAX = 2**31 - 1
_CHUNK = 2048
_BIG_ENDIAN = sys.byteorder == "big"


def make_tokens(values: Iterable[int], *, param: str = "tokens") -> Tokens:
    """Check a caller's token ids and pack them.

    An array is taken as it is (no copy) once its values are checked. ``true`` is not a token, nor is ``1.0``.

    Raises:  RequestError (400) naming the first bad position
    """
    if isinstance(values, array) and values.typecode == "i":
        tokens = values
    else:
        listed = list(values)
        if not set(map(type, listed)) <= {int}:
            at = next(i for i, value in enumerate(listed) if type(value) is not int)
            raise RequestError(f"{param}[{at}] is not an integer", param=param)
        try:
            tokens = array("i", listed)
        except OverflowError:
            at = next(i for i, value in enumerate(listed) if not 0 <= value <= TOKEN_MAX)
            raise RequestError(f"{param}[{at}] is not a token id", param=param) from None
    if not tokens:
        raise RequestError(f"{param} must hold at least one token", param=param)
    if min(tokens) < 0:
        at = next(i for i, value in enumerate(tokens) if value < 0)
        raise RequestError(f"{param}[{at}] is negative", param=param)
    return tokens


def token_bytes(tokens: Tokens) -> bytes:
    """Lay tokens out as the engine hashes them: little-endian int32."""
    if not _BIG_ENDIAN:
        return tokens.tobytes()
    swapped = array("i", tokens)
    swapped.byteswap()
    return swapped.tobytes()


def cumulative_hashes(own: Tokens, inherited: Tokens | None = None) -> Hashes:
    """Hash every prefix that ends inside ``own``, which follows ``inherited``.

    One bulk update for what is inherited, then one update and one digest per own token.

    Shapes:  own [L - D], inherited [D] → [L - D], result[i] covers (inherited + own)[:D + i + 1]
    """
    hasher = xxhash.xxh64(token_bytes(inherited) if inherited else b"")
    update, digest = hasher.update, hasher.intdigest
    hashes = array("Q", bytes(8 * len(own)))
    for i, (one,) in enumerate(struct.iter_unpack("4s", token_bytes(own))):
        update(one)
        hashes[i] = digest()
    return hashes


def hash_tokens(tokens: Tokens) -> int:
    """Hash the whole of ``tokens`` at once: what the engine calls ``tokens_hash``."""
    return xxhash.xxh64_intdigest(token_bytes(tokens))


def format_hash(value: int) -> str:
    """Write a hash the way the engine prints it: 16 lower-case hex digits."""
    return f"{value:016x}"


def lcp_tokens(a: Tokens, b: Tokens, *, a_from: int = 0, b_from: int = 0, n_max: int | None = None) -> int:
    """Count the equal tokens of ``a[a_from:]`` and ``b[b_from:]``, at most ``n_max``. One pass of memcmp."""
    n = min(len(a) - a_from, len(b) - b_from)
    if n_max is not None:
        n = min(n, n_max)
    done = 0
    while done < n:
        step = min(_CHUNK, n - done)
        one = a[a_from + done : a_from + done + step]
        other = b[b_from + done : b_from + done + step]
        if one != other:
            return done + next(i for i in range(step) if one[i] != other[i])
        done += step
    return n


def lcp_hashed(a: Tokens, a_hashes: Hashes, b: Tokens, b_hashes: Hashes) -> int:
    """Count the equal leading tokens of two hashed prefixes: bisect by hash, then let the tokens decide.

    Finds the divergence after O(log n) hash compares; a collision only costs the walk that follows.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high) // 2
        if a_hashes[middle] == b_hashes[middle]:
            low = middle + 1
        else:
            high = middle
    if lcp_tokens(a, b, n_max=low) < low:
        return lcp_tokens(a, b)
    return low + lcp_tokens(a, b, a_from=low, b_from=low)
