"""What a request carries besides its prompt: what is refused, each with its reason."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.spec import parse_experiment


def experiment(**request: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "base_seed": 1,
        "workload": {"num_sessions": 2, "request": request},
        "condition": [{"name": "base"}],
    }


@pytest.mark.parametrize(
    ("request_table", "says"),
    [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"max_tokens": 4}}, "the harness writes that itself"),
        ({"extra_body": {"when": date(2027, 1, 1)}}, "must be JSON"),
        ({"extra_body": {"a": [{"b": "{sesion}"}]}}, "knows no {sesion}"),
        ({"extra_body": {"key": "{env:HOME}"}}, "in headers only"),
        ({"headers": {"X-Request-Id": "1"}}, "the harness writes that itself"),
        ({"headers": {"two words": "1"}}, "not the name of a header"),
        ({"headers": {"x-note": "a\r\nHost: b"}}, "printable ASCII"),
        ({"headers": {"x-api-key": "abc"}}, "write {env:NAME}"),
        ({"header": {}}, "did you mean headers?"),
    ],
)
def test_what_no_request_can_carry_is_refused_with_its_reason(request_table: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_experiment(experiment(**request_table), where="here")
    assert says in str(refused.value)
    assert "workload.request" in str(refused.value)


def test_a_text_in_braces_can_be_written() -> None:
    body = {"guided_regex": "[a-z]{{3}}", "grammar": '{"a": 1}'}
    assert parse_experiment(experiment(extra_body=body), where="here").workload.request.extra_body == body
