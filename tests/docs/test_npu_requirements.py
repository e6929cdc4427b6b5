"""What the pages say of the NPU stack is in the table of its requirements, and the table is what the wheels say."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from harness.extras.twin.environment import TwinEnvironment
from harness.model.spec import load_toml
from harness.runner.backends.rbln import VLLM_RBLN
from harness.stacks.rbln.launch import requirements
from tests.docs.pages import page_text
from tests.support.checkout import ROOT

GUIDE = page_text("guides/npu")


def test_the_release_is_the_one_whose_rules_are_the_default() -> None:
    assert requirements.RELEASE == VLLM_RBLN


def test_the_guide_installs_what_the_table_says_from_the_indexes_of_the_table() -> None:
    (install,) = re.findall(r"\$ /opt/stack/bin/pip install (.*?)\n\$", GUIDE, re.DOTALL)
    assert re.findall(r"([\w-]+)((?:==|>=)[\w.,<>=]+)", install) == [*requirements.INSTALLED.items()]
    assert re.findall(r"cat ~/.rbln/([\w-]+)", install) == [index.file for index in requirements.INDEXES]
    for index in requirements.INDEXES:
        (row,) = re.findall(rf"^\| {index.role} \|.*", GUIDE, re.MULTILINE)
        assert re.findall(r"`([\w-]+)`", row.split("|")[2]) == [*index.packages]
        assert f"`{index.address}`" in row if index.address else "http" not in row
    for name, version in requirements.PINNED.items():
        assert f"`{name}{version}`" in GUIDE


def test_the_way_for_an_older_system_stands_where_the_library_is_named() -> None:
    (paragraph,) = [text for text in GUIDE.split("\n\n") if "glibc 2.39" in text]
    assert f"`{requirements.OLDER_GLIBC}`" in paragraph


def test_the_images_are_built_in_the_guide_with_the_secrets_of_the_table() -> None:
    for index in requirements.INDEXES:
        assert f"--secret id={index.secret},src=$HOME/.rbln/{index.file}" in page_text("guides/npu-hosts")


def test_the_extra_of_the_package_has_the_same_pins() -> None:
    extra = load_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]["rbln"]
    assert set(extra) <= {f"{name}{version}" for name, version in requirements.INSTALLED.items()}


def required_by_the_wheels(twin: TwinEnvironment) -> dict[str, str]:
    """Versions by package, as the wheels of vllm-rbln and optimum-rbln ask for them on x86-64."""
    wanted: dict[str, str] = {}
    for package in ("vllm-rbln", "optimum-rbln"):
        (found,) = metadata.distributions(name=package, path=[str(twin.site_packages)])
        assert f"=={found.version}" == requirements.INSTALLED[package]
        for line in found.requires or ():
            name, version = re.findall(r"^([\w-]+)([^;]*)", line)[0]
            if ("extra" not in line or "runtime" in line) and "aarch64" not in line:
                wanted[name] = wanted.get(name) or ",".join(reversed(version.strip().split(",")))
    return wanted


def test_the_wheels_themselves_require_what_the_table_says(twin: TwinEnvironment) -> None:
    wanted = required_by_the_wheels(twin)
    assert {name: wanted[name] for name in requirements.PINNED} == requirements.PINNED
    assert {name: wanted[name] for name in requirements.CLOSED} == {
        name: requirements.INSTALLED[name] for name in requirements.CLOSED
    }
    local = {name for name, version in wanted.items() if "+" in version}
    assert local | {*requirements.CLOSED} == {name for index in requirements.INDEXES for name in index.packages}


def is_on_the_public_index(*asked: str) -> bool:
    """Whether uv finds all of it there; nothing is installed."""
    uv = Path(sys.executable).with_name("uv")
    words = [str(uv), "pip", "install", "--dry-run", "--no-deps", "--reinstall", "--python", sys.executable, *asked]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_the_pins_resolve_as_far_as_the_public_index_goes_and_stop_where_the_table_says(twin: TwinEnvironment) -> None:
    wanted = {**required_by_the_wheels(twin), **requirements.INSTALLED}
    elsewhere = {name for index in requirements.INDEXES for name in index.packages}
    if not is_on_the_public_index("packaging"):
        pytest.skip("no package index can be reached")
    assert is_on_the_public_index(*(f"{name}{version}" for name, version in wanted.items() if name not in elsewhere))
    assert [name for name in sorted(elsewhere) if is_on_the_public_index(f"{name}{wanted[name]}")] == []
