"""Imported by the process that ``command_line`` forks from: what nearly every command that draws or runs needs.

A figure is drawn once, since matplotlib reads its fonts and styles at the first.
"""

from __future__ import annotations

import io

import duckdb  # noqa: F401
import llvmlite.binding  # noqa: F401
import matplotlib.backends.backend_svg  # noqa: F401
import pyarrow.dataset
import pyarrow.parquet  # noqa: F401
import scipy.stats  # noqa: F401

import harness.cli
import harness.judge.catalogue
import harness.judge.prereg
import harness.judge.report.page
import harness.measure.server.doctor
import harness.runner  # noqa: F401
from harness.judge.report.svg import Sheet

with Sheet() as sheet:
    figure = sheet.figure(4.0, 3.0)
    figure.subplots().plot([1, 2], [1, 2])
    figure.savefig(io.BytesIO(), format="svg")
