"""One table of what serving with vllm-rbln takes: packages, indexes, base image, libraries.

Container files, pages and doctor are written from it, or held to it by tests. Nothing is installed here.
Source: metadata and README of the wheels of vllm-rbln 0.12.0 and optimum-rbln 0.12.0, November 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

RELEASE = "0.12.0"
INSTALLED = {"vllm-rbln": f"=={RELEASE}", "optimum-rbln": f"=={RELEASE}", "rebel-compiler": ">=0.12.0,<0.12.1"}
"""Packages that the install command names, with their versions."""
PINNED = {"vllm": "==0.30.0+cpu", "torch": "==2.13.0+cpu"}
"""What these require by local versions, which the public index does not have."""
CLOSED = ("rebel-compiler",)
"""Packages that the vendor's index alone has."""


@dataclass(frozen=True, slots=True)
class PackageIndex:
    """An index beside the public one. file: in ~/.rbln, one line, its address; address: "" where a portal gives it."""

    role: str
    file: str
    packages: tuple[str, ...]
    address: str = ""

    @property
    def secret(self) -> str:
        """Its name among the secrets of a container build."""
        return f"rbln_{self.file.replace('-', '_')}"


INDEXES = (
    PackageIndex("the vendor's", "index-url", CLOSED),
    PackageIndex("vLLM's, CPU wheels", "vllm-index-url", ("vllm",), "https://wheels.vllm.ai/0.30.0/cpu"),
    PackageIndex("PyTorch's, CPU wheels", "torch-index-url", ("torch", "torchvision", "torchaudio", "torchcodec")),
)
GLIBC = (2, 39)
"""What vLLM's CPU wheel needs; with it the libstdc++ of GCC 14."""
OLDER_GLIBC = f"--find-links https://github.com/RBLN-SW/vllm-rbln/releases/expanded_assets/v{RELEASE}"
"""Option of the install command on Ubuntu 22.04 and EL9: the vendor's build of that wheel."""
BASE_IMAGE = "python:3.12.12-slim-trixie"
"""Debian 13: glibc 2.41, GCC 14."""
