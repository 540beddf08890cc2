"""The guess at a prompt's length: seldom too few."""

from typing import Any

import pytest

from polykv_proxy.control.sizes import (
    ANSWER_CELLS,
    MEDIUM_TOKENS,
    TEMPLATE_TOKENS,
    answer_cells,
    guess_media_tokens,
    guess_tokens,
    n_choices,
)


@pytest.mark.parametrize(
    ("body", "n_tokens"),
    [
        ({"prompt": "word" * 100}, 200 + 6),
        ({"prompt": "12345678" * 100}, 800 + 6),
        ({"prompt": "\u8a9e" * 100}, 300 + 6),
        ({"prompt": [12345] * 100}, 100 + 1),
        ({"prompt": [1, "a" * 100]}, 59),
        ({"messages": [{"role": "user", "content": "w" * 1000}]}, 500 + 21),
    ],
)
def test_tokens_of_a_body(body: dict[str, Any], n_tokens: int) -> None:
    assert guess_tokens(body) == n_tokens + TEMPLATE_TOKENS


@pytest.mark.parametrize(
    ("prompt", "n_tokens"),
    [
        ({"prompt_string": "w" * 1000, "multimodal_data": ["A" * 10_000]}, MEDIUM_TOKENS + 500 + 7),
        ([{"prompt_string": "w" * 1000, "multimodal_data": ["A", "B"]}, "w" * 1000], 2 * MEDIUM_TOKENS + 1000 + 9),
        ({"multimodal_data": "?"}, 8),
    ],
)
def test_tokens_of_a_prompt_with_media(prompt: Any, n_tokens: int) -> None:
    assert guess_media_tokens({"prompt": prompt}) == n_tokens + TEMPLATE_TOKENS


def test_the_beginning_of_an_answer() -> None:
    assert answer_cells({}) == answer_cells({"n_predict": -1}) == answer_cells({"max_tokens": 4000}) == ANSWER_CELLS
    assert answer_cells({"max_tokens": 20, "n_predict": 10}) == 10
    assert answer_cells({"max_tokens": "many"}) == ANSWER_CELLS


def test_choices() -> None:
    assert [n_choices(body) for body in ({}, {"n": 3}, {"n_cmpl": 2, "n": 3}, {"n": None}, {"n": 0})] == [1, 3, 2, 1, 1]
