"""uv installs from where pip would: every setting of pip's that says where packages come from has its counterpart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.uv import UV_LOCK, pip_settings, uv_environment

LISTING = """\
:env:.index-url='https://example.org/of-the-environment'
:env:.cert='/etc/own.pem'
global.index-url='https://example.org/of-the-file'
global.extra-index-url='https://example.org/a\\nhttps://example.org/b'
global.trusted-host='one two'
install.find-links='/wheels https://example.org/wheels'
download.no-index='true'
WARNING: something = else
"""


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_INDEX_STRATEGY", "UV_SYSTEM_CERTS"):
        monkeypatch.delenv(name, raising=False)


def test_the_environment_has_the_last_word_and_other_commands_none() -> None:
    settings = pip_settings(LISTING)
    assert settings["index-url"] == "https://example.org/of-the-environment"
    assert settings["find-links"] == "/wheels https://example.org/wheels"
    assert "no-index" not in settings


def test_every_place_that_pip_looks_in_is_one_that_uv_looks_in() -> None:
    variables = uv_environment(pip_settings(LISTING))
    assert variables["UV_DEFAULT_INDEX"] == "https://example.org/of-the-environment"
    assert variables["UV_INDEX"] == "https://example.org/a https://example.org/b"
    assert variables["UV_FIND_LINKS"] == "/wheels,https://example.org/wheels"
    assert variables["UV_INSECURE_HOST"] == "one two"
    assert variables["SSL_CERT_FILE"] == "/etc/own.pem"
    assert variables["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_who_sets_a_variable_of_uvs_own_means_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://example.org/of-uv")
    assert uv_environment(pip_settings(LISTING))["UV_DEFAULT_INDEX"] == "https://example.org/of-uv"


def test_a_machine_without_settings_leaves_uv_to_its_own() -> None:
    assert uv_environment(pip_settings("")).keys() == {"UV_INDEX_STRATEGY", "UV_SYSTEM_CERTS"}


def test_the_listing_is_what_pip_prints(tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = https://example.org/a%20b\n[install]\nfind-links =\n  /one\n  /two\n")
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={"PIP_CONFIG_FILE": str(file), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert pip_settings(listing)["index-url"] == "https://example.org/a%20b"
    assert pip_settings(listing)["find-links"].split() == ["/one", "/two"]


def test_uv_itself_is_locked_by_hash_and_its_lock_names_no_index() -> None:
    text = UV_LOCK.read_text()
    assert text.startswith("uv==")
    assert "--hash=sha256:" in text
    assert "://" not in text
