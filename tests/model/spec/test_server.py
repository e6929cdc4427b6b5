"""What names a server is checked as it is read: none of it becomes an option of the command that it goes into."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.model.spec import ServerSpec


@pytest.mark.parametrize(
    "destination",
    ["-oProxyCommand=touch /tmp/x", "me@-oProxyCommand=x", "ssh://-oProxyCommand=x", "a b", "host\n", "$(x)"],
)
def test_an_ssh_destination_that_could_be_an_option_is_refused(destination: str) -> None:
    with pytest.raises(ValidationError, match="ssh is not HOST, USER@HOST"):
        ServerSpec(ssh=destination)


@pytest.mark.parametrize(
    "destination", ["", "npu1", "me@npu1.example", "ssh://me@npu1:2222", "::1", "[::1]:22", "10.0.0.1"]
)
def test_an_ssh_destination_is_a_host_with_or_without_a_user(destination: str) -> None:
    assert ServerSpec(ssh=destination).ssh == destination


@pytest.mark.parametrize("key", ["artifact", "environment"])
def test_a_name_that_looks_like_an_option_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="would be read as an option"):
        ServerSpec.model_validate({key: "--trust-remote-code"})


def test_a_server_is_written_with_the_keys_that_a_tune_of_an_earlier_version_asked_with() -> None:
    routed = ServerSpec.model_validate({"replicas": 2, "router": {"kind": "haproxy"}})
    always = {"extra_args": [], "env": {}, "url": "", "device_metrics_url": ""}
    assert ServerSpec().model_dump(mode="json", exclude_defaults=True) == always
    router = {"kind": "haproxy", "command": []}
    assert routed.model_dump(mode="json", exclude_defaults=True) == {**always, "replicas": 2, "router": router}
