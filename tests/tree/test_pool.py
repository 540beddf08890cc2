"""Names, and what a pool says about itself."""

import pytest

from polykv_proxy.errors import RequestError
from polykv_proxy.tree.pool import NAME_MAX, check_name
from polykv_proxy.tree.tree import PoolTree
from tests.tree.make import add_root, extend, toks


@pytest.mark.parametrize("name", ["a", "7b", "coder:v2", "team_x.tools-3@2026+b", "_", "x" * NAME_MAX, "1e3"])
def test_sane_names_are_kept(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "12",
        "007",
        "٣",
        "²",
        "a b",
        "a/b",
        "a\n",
        "ä",
        "-x",
        ".x",
        "a" * (NAME_MAX + 1),
        "auto",
        "a\x00",
        "a%2f",
        "a,b",
    ],
)
def test_names_that_break_urls_headers_labels_or_ids_are_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_name(name)
    assert (caught.value.status, caught.value.param) == (400, "name")


def test_pool_tells_its_own_range() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)), name="system")
    child = extend(tree, root.pool_id, toks(70, 71), branch_pos=4)
    assert (root.is_root, root.own_n_tokens, root.label, root.depth) == (True, 10, "system", 0)
    assert (child.is_root, child.own_n_tokens, child.label, child.depth) == (False, 2, str(child.pool_id), 1)


def test_residency_is_read_only_on_the_pool() -> None:
    root = add_root(PoolTree(), toks(1))
    with pytest.raises(AttributeError):
        root.residency = "resident"  # type: ignore[misc]
