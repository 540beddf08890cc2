"""What the relay's benchmark makes of what it measured, and that its engine and clients count right."""

import asyncio
from typing import Any

import pytest

from benchmarks.idle_engine import TOOK, idle_engine
from benchmarks.raw_client import Asker, Heard, Listener, place, request
from benchmarks.relay_overhead import Took, added, missed, per_second, table
from benchmarks.relay_streams import growth_10_min
from tests.relay.raw import until

MIB = 1 << 20


def test_what_a_way_adds_is_beside_the_direct_way() -> None:
    found = added({"direct": Took([0.1, 0.1, 9.0]), "bare": Took([0.3]), "proxy": Took([0.35])})
    assert found == pytest.approx({"direct": 0.1, "bare": 0.2, "proxy": 0.25, "ratio": 1.25, "more": 0.05})


def test_requests_per_second_are_those_of_all_clients_together() -> None:
    assert per_second({"proxy": Took([1.0] * 300, together_s=0.1)}) == pytest.approx({"proxy": 3000})


def streams(**proxy: Any) -> dict[str, Any]:
    of = {
        "events_per_s": 12800.0,
        "delivered": 1.0,
        "late_ms": {"p50": 1, "p99": 9, "max": 20},
        "cpu": 0.4,
        "memory": {"mib": 60.0, "growth_10_min": None},
    }
    return {"proxy": of | proxy}


@pytest.mark.parametrize(
    ("requests", "of_streams", "said"),
    [
        ({}, streams(), None),
        ({"1 at a time": 1.3, "32 at a time": 1.3, "pooled": 0.99}, {}, None),
        ({"1 at a time": 1.31, "32 at a time": 1.0, "pooled": 0.1}, {}, "1 at a time: 1.31 x"),
        ({"1 at a time": 1.0, "32 at a time": 1.4, "pooled": 0.1}, {}, "32 at a time: 1.40 x"),
        ({"1 at a time": 1.0, "32 at a time": 1.0, "pooled": 1.1}, {}, "pooled: 1.10 ms more"),
        ({}, streams(delivered=0.98), "98.00% of what the engine wrote"),
        ({}, streams(late_ms={"p50": 1, "p99": 101, "max": 200}), "101 ms late"),
        ({}, streams(memory={"mib": 60.0, "growth_10_min": 0.11}), "grows by 11.0%"),
    ],
)
def test_every_bar_is_told_that_was_not_reached(
    requests: dict[str, float], of_streams: dict[str, Any], said: str | None
) -> None:
    row = {"direct": 0.05, "bare": 0.1, "proxy": 0.1}
    rows = {name: row | {"ratio": value, "more": value} for name, value in requests.items()}
    rows |= {"per second": row} if rows else {}
    found = missed(rows, of_streams)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert all(name in table(rows, of_streams) for name in (*requests, *of_streams))


def test_growth_is_that_after_the_first_minute() -> None:
    warming = [(float(t), 10 * MIB + t * MIB) for t in range(60)]
    assert growth_10_min([*warming, *((float(t), 100 * MIB) for t in range(60, 181))]) == pytest.approx(0)
    grown = growth_10_min([*warming, *((float(t), 100 * MIB + (t - 60) * MIB // 100) for t in range(60, 181))])
    assert grown == pytest.approx(0.06, rel=0.01)
    assert growth_10_min([*warming, *((float(t), 100 * MIB) for t in range(60, 120))]) is None


async def test_the_engine_writes_what_was_asked_for_and_the_client_counts_it() -> None:
    async with idle_engine(2) as url:
        heard = Heard()
        asked = request(url, b'{"stream":true,"max_tokens":5,"messages":[]}')
        made = await asyncio.get_running_loop().create_connection(lambda: Listener(asked, heard), *place(url))
        await until(lambda: heard.n_ended >= 2)
        made[1].close()
        assert heard.n_events // 5 == 2  # and the third one has begun at most
        assert 0 < heard.late_ms.total() <= heard.n_events
        asker = await Asker.to(url)
        assert b'"cache_n": 1' in await asker.ask(request(url, b'{"messages":[]}'))
        with pytest.raises(RuntimeError, match="404"):
            await asker.ask(request(url, None, "/nothing"))
        asker.close()


async def test_a_reply_that_takes_its_time_says_how_long_it_was() -> None:
    async with idle_engine(2, reply_s=0.01) as url:
        asker = await Asker.to(url)
        told = await asker.ask(request(url, b'{"messages":[]}'))
        at = told.index(TOOK) + len(TOOK)
        assert 3_000 < int(told[at : at + 8]) < 10_000_000
        asker.close()


def test_quantiles_of_how_late_pieces_were() -> None:
    heard = Heard()
    heard.late_ms.update({0: 98, 7: 1, 900: 1})
    assert [heard.quantile_ms(q) for q in (0.5, 0.99, 1.0)] == [0, 7, 900]
