"""The address of a server as URL and headers, and the key that its variable must hold."""

from __future__ import annotations

import pytest

from harness.errors import SpecError
from harness.measure.client.target import Endpoint


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (Endpoint("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        (Endpoint("::1", 8000), "http://[::1]:8000"),
        (Endpoint("::1", 443, is_https=True), "https://[::1]"),
        (Endpoint("example.org", 80, prefix="/llm"), "http://example.org/llm"),
        (Endpoint("example.org", 80, is_https=True), "https://example.org:80"),
        (Endpoint("example.org", 443), "http://example.org:443"),
    ],
)
def test_an_address_is_written_as_in_a_url(endpoint: Endpoint, url: str) -> None:
    assert endpoint.url == url


def test_a_key_comes_from_its_variable_and_a_missing_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint("127.0.0.1", 8000, api_key_env="A_KEY_OF_TESTS")
    assert Endpoint("127.0.0.1", 8000).headers == {}
    monkeypatch.setenv("A_KEY_OF_TESTS", "a-key-of-tests")
    assert endpoint.headers == {"Authorization": "Bearer a-key-of-tests"}
    monkeypatch.delenv("A_KEY_OF_TESTS")
    with pytest.raises(SpecError, match="no key in A_KEY_OF_TESTS"):
        endpoint.headers  # noqa: B018
