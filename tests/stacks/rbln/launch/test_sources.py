"""Sources are read where they lie; what is no release is one clear line, whatever it is instead."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from release_wheels import SCHEDULER, SOURCE, stack

from harness.errors import SpecError
from harness.stacks.rbln.launch.sources import VLLM, open_sources, vllm_beside


def test_a_wheel_says_its_version_and_the_vllm_it_is_pinned_to(tmp_path: Path) -> None:
    found = open_sources(stack(tmp_path, "0.12.1a8", vllm="0.31.0"))
    assert (found.version, found.vllm_pin, found.read(SCHEDULER)) == ("0.12.1a8", "0.31.0", SOURCE)
    assert found.read("vllm_rbln/none.py") is None


def test_an_environment_and_its_site_packages_hold_both_packages(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for path in (stack(wheels, "0.12.0"), wheels / "vllm-0.30.0-py3-none-any.whl"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    for package in ("vllm_rbln", "vllm"):
        (site / package / "__init__.py").write_text("")
    for place in (tmp_path, site):
        found = open_sources(place)
        engine = vllm_beside(found)
        assert (found.version, engine.version, engine.package) == ("0.12.0", "0.30.0", VLLM)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"not a zip", "is not a wheel or zip"),
        (b"PK\x05\x06" + bytes(18), "holds no vllm_rbln"),
    ],
)
def test_what_is_no_release_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "vllm_rbln-1-py3-none-any.whl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        open_sources(path)


def test_a_damaged_wheel_and_a_folder_without_the_package_are_refused(tmp_path: Path) -> None:
    path = stack(tmp_path, "0.12.0")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"class Scheduler", b"klass Scheduler"))
    with pytest.raises(SpecError, match="cannot be read"):
        open_sources(path).read(SCHEDULER)
    with pytest.raises(SpecError, match="holds no vllm_rbln"):
        open_sources(tmp_path)
