"""Policies lie beside their pools: they come back with them, go with them, and damage is told."""

from pathlib import Path

import pytest

from polykv_proxy.errors import JournalFailed
from polykv_proxy.ids import PoolId
from tests.store.make import MODEL, altered, family, left, opened, root, rows, written

POLICY = {"target_tps_per_session": 12.5, "mode": "enforced", "max_queue": 3}
OTHER = {"target_tps_per_session": 4.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "pools.db"


async def with_policies(path: Path) -> None:
    await written(path, family())
    async with opened(path) as (journal, _):
        await journal.policy_changed(PoolId(2), POLICY)
        await journal.policy_changed(PoolId(4), OTHER)


async def policies_in(path: Path) -> dict[int, object]:
    return {row.pool_id: row.policy for row in await left(path)}


async def test_policies_come_back_with_their_pools(path: Path) -> None:
    await with_policies(path)
    assert await policies_in(path) == {1: None, 2: POLICY, 4: OTHER, 5: None}
    async with opened(path) as (journal, _):
        await journal.policy_changed(PoolId(2), OTHER)  # in its place
        await journal.policy_changed(PoolId(4), None)
        await journal.policy_changed(PoolId(5), None)  # it had none
        found = await journal.bind(MODEL)
        assert {row.pool_id: row.policy for row in found} == {1: None, 2: OTHER, 4: None, 5: None}
    assert await policies_in(path) == {1: None, 2: OTHER, 4: None, 5: None}


async def test_a_policy_goes_with_its_pool_and_does_not_come_to_another(path: Path) -> None:
    await with_policies(path)
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pools_released([PoolId(4), PoolId(2)])
        await journal.policy_changed(PoolId(4), POLICY)  # released meanwhile
        await journal.pool_added(root(6, 1, 2))
    assert await policies_in(path) == {1: None, 5: None, 6: None}
    async with opened(path) as (journal, _):
        assert journal.status["saved_copy"] is None


async def test_policies_wait_with_their_model(path: Path) -> None:
    await with_policies(path)
    async with opened(path) as (journal, _):
        assert await journal.bind("model-b") == []
        assert {row.pool_id: row.policy for row in await journal.bind(MODEL)} == {1: None, 2: POLICY, 4: OTHER, 5: None}


async def test_a_pool_that_is_not_on_the_disk_has_no_policy_there(path: Path) -> None:
    await written(path, family())
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        orphan = root(7, 1)
        orphan.parent = PoolId(99)  # what it is made from is not there, so it cannot be written
        journal.pool_stays(orphan)
        with pytest.raises(JournalFailed, match="pool 7 itself could not be written"):
            await journal.policy_changed(PoolId(7), POLICY)
    assert await left(path) == rows(family())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE policies SET policy = replace(policy, '12.5', '12.0') WHERE pool_id = 2",
        "UPDATE policies SET policy = NULL WHERE pool_id = 2",
        "UPDATE policies SET policy = x'00' WHERE pool_id = 2",
        "UPDATE policies SET policy = (SELECT policy FROM policies WHERE pool_id = 4) WHERE pool_id = 2",
        "UPDATE policies SET pool_id = 5 WHERE pool_id = 2",
        "DELETE FROM policies WHERE pool_id = 2",
    ],
)
async def test_a_policy_altered_by_hand_is_noticed(path: Path, statement: str) -> None:
    await with_policies(path)
    altered(path, statement)
    async with opened(path) as (journal, found):
        assert found.rows == []
        assert journal.status["saved_copy"] is not None
