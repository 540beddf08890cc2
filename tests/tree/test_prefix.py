"""Tokens, hashes, longest common prefix."""

import struct
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.errors import RequestError
from polykv_proxy.tree.prefix import (
    cumulative_hashes,
    format_hash,
    hash_tokens,
    lcp_hashed,
    lcp_tokens,
    make_tokens,
)

token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)
alike = st.lists(st.integers(0, 1), max_size=60)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([], "at least one"),
        ([1, -1], "tokens[1] is negative"),
        ([1, True], "tokens[1] is not an integer"),
        ([1, 2.0], "tokens[1] is not an integer"),
        (["1"], "tokens[0] is not an integer"),
        ([None], "tokens[0] is not an integer"),
        ([0, 2**31], "tokens[1] is not a token id"),
        ([0, -(2**70)], "tokens[1] is not a token id"),
        (array("i", [-5]), "tokens[0] is negative"),
        (array("i"), "at least one"),
    ],
)
def test_bad_tokens_are_refused_with_their_position(values: list[int], complaint: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_tokens(values)
    assert complaint in caught.value.message
    assert caught.value.param == "tokens"


def test_an_array_is_taken_without_a_copy() -> None:
    given_tokens = array("i", [0, 2**31 - 1])
    assert make_tokens(given_tokens) is given_tokens


@given(token_lists, st.integers(0, 40))
def test_every_hash_is_xxh64_over_little_endian_int32(values: list[int], cut: int) -> None:
    inherited, own = array("i", values[:cut]), array("i", values[cut:])
    hashes = cumulative_hashes(own, inherited)
    assert list(hashes) == [
        xxhash.xxh64(struct.pack(f"<{n}i", *values[:n]), seed=0).intdigest()
        for n in range(len(inherited) + 1, len(values) + 1)
    ]
    if own:
        assert hash_tokens(array("i", values)) == hashes[-1]


def test_hash_is_written_as_16_digits() -> None:
    assert format_hash(0xAB) == "00000000000000ab"


@given(alike, alike, st.integers(0, 5), st.integers(0, 5), st.none() | st.integers(0, 60))
def test_lcp_counts_equal_leading_tokens(
    a: list[int], b: list[int], a_from: int, b_from: int, n_max: int | None
) -> None:
    a_from, b_from = min(a_from, len(a)), min(b_from, len(b))
    want = 0
    for x, y in zip(a[a_from:], b[b_from:], strict=False):
        if x != y or want == n_max:
            break
        want += 1
    assert lcp_tokens(array("i", a), array("i", b), a_from=a_from, b_from=b_from, n_max=n_max) == want


@pytest.mark.parametrize("at", [0, 1, 2047, 2048, 2049, 6000, 9999, 10000])
def test_lcp_of_long_arrays_finds_the_position(at: int) -> None:
    a = array("i", range(10_000))
    b = array("i", a)
    if at < len(b):
        b[at] = -1
    assert lcp_tokens(a, b) == at
    assert lcp_hashed(a, cumulative_hashes(a), b, cumulative_hashes(b)) == at


@given(alike, alike)
def test_hashed_lcp_equals_the_token_walk(a: list[int], b: list[int]) -> None:
    one, other = array("i", a), array("i", b)
    assert lcp_hashed(one, cumulative_hashes(one), other, cumulative_hashes(other)) == lcp_tokens(one, other)


def test_hash_collision_does_not_make_prefixes_equal() -> None:
    a, b = array("i", [1, 2, 3, 4]), array("i", [1, 9, 3, 4])
    colliding = array("Q", [5, 5, 5, 5])
    assert lcp_hashed(a, colliding, b, colliding) == 1
