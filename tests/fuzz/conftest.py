"""The proxy of the relay's tests."""

from tests.relay.conftest import explicit, make_proxy, proxy

__all__ = ["explicit", "make_proxy", "proxy"]
