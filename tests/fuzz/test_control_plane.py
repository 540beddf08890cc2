"""Chains of calls on the control plane: what one answer names, the next call uses. And single ones for longer."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contract.test_openapi import ALL_CHECKS, PAGE, Served
from tests.contract.test_openapi import schema as described

QUICK = settings(
    max_examples=6, stateful_step_count=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=80, stateful_step_count=25, derandomize=False)
CHECKS = [check for check in ALL_CHECKS if check.__name__ not in ("use_after_free", "ensure_resource_availability")]
"""A released pool's name may be given again, and a pool made by another call meanwhile."""


SOURCES: dict[str, Callable[[int, Any], Any]] = {
    "/polykv/pools": lambda n, _: {"tokens": [n % 300, n % 7, 5]},
    "/polykv/pools/{ref}/fork": lambda n, _: {"own_tokens": [n % 300, 8]},
    "/polykv/pools/{ref}/admission": lambda n, _: {"target_tps_per_session": n},
    "/polykv/pools/{ref}/compact": lambda n, _: {"ancestor": "base", "tokens": [*range(40), n % 300, 9]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    served.start()
    yield served
    served.stop()


def linked() -> dict[str, Any]:
    """The page, with what leads on from an answer: a pool that was made is the pool of any call that takes one."""
    page = deepcopy(PAGE)
    operations = [(path, operation) for path, verbs in page["paths"].items() for operation in verbs.values()]
    links = {
        operation["operationId"]: {
            "operationId": operation["operationId"],
            "parameters": {"path.ref": "$response.body#/pool_id"},
        }
        for path, operation in operations
        if "{ref}" in path
    }
    for _, operation in operations:
        if "201" in operation["responses"]:
            operation["responses"]["201"]["links"] = links
    return page


def machine(served: Served) -> type[Any]:
    schema = schemathesis.openapi.from_dict(linked())
    schema.config.seed = 1

    class Workflow(schema.as_state_machine()):  # type: ignore[misc]
        def setup(self) -> None:
            served.furnish()

        def before_call(self, case: schemathesis.Case) -> None:
            """Three of four that make a pool can: chains begin there."""
            n = len(str(case.body))
            if n % 4 and case.method == "POST":
                case.body = SOURCES.get(case.path, lambda _, body: body)(n, case.body)

        def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
            if "stream" in (case.query or {}):
                case.query["stream"] = "0"  # a stream has no end to wait for
            return {"base_url": served.url}

        def validate_response(self, response: Any, case: schemathesis.Case, **kw: Any) -> None:
            assert response.status_code != 500, response.text
            case.validate_response(response, checks=CHECKS)

    return Workflow


def test_chains_of_calls(served: Served) -> None:
    run_state_machine_as_test(machine(served), settings=QUICK)


@pytest.mark.slow
def test_chains_of_calls_for_long(served: Served) -> None:
    run_state_machine_as_test(machine(served), settings=LONG)


@pytest.mark.slow
@described.parametrize()
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_call_for_long(case: schemathesis.Case, served: Served) -> None:
    served.furnish()
    if str((case.query or {}).get("stream", "0")).lower() in ("", "1", "true"):
        case.query["stream"] = "0"
    response = case.call_and_validate(base_url=served.url, checks=ALL_CHECKS)
    assert response.status_code != 500, response.text
