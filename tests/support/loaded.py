"""Imported by the process that ``forked`` forks from: what an emulator and most commands need.

A figure is drawn once, since matplotlib reads its fonts and styles at the first; the page's template is read once.
"""

from __future__ import annotations

import importlib
import io
import pkgutil

import duckdb  # noqa: F401
import llvmlite.binding  # noqa: F401
import pyarrow.dataset
import pyarrow.parquet  # noqa: F401
import scipy.special  # noqa: F401

import harness.cli
import harness.extras.paper.catalogue
import harness.judge.prereg
import harness.measure.emulator.server
import harness.measure.server.doctor
import harness.present.report.page
import harness.runner.backends
import tests.support.bare_reports  # noqa: F401
from harness.clock import ScaledClock
from harness.model.experiment import build_plan
from harness.model.spec import ClientSpec, WorkloadSpec
from harness.present.report.svg import Sheet
from tests.support.patience import audited_once, be_patient

importlib.import_module("matplotlib.backends.backend_svg")
for package in (harness.cli, harness.extras.paper.catalogue, harness.runner.backends):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

with Sheet() as sheet:
    figure = sheet.figure(4.0, 3.0)
    figure.subplots().plot([1, 2], [1, 2])
    figure.savefig(io.BytesIO(), format="svg")

harness.present.report.page._environment().get_template("page.html.j2")  # pyright: ignore[reportPrivateUsage]

# Commands have no audit of their own either: they are forked with this one.
be_patient()
audited_once(build_plan(WorkloadSpec(num_sessions=3), 1, 0), ClientSpec(), ScaledClock(1.0))
