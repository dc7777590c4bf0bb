"""The upstream and the proxies of the door's tests, for these ones too."""

from tests.product.http.conftest import stage, start_proxy

__all__ = ["stage", "start_proxy"]
