"""Sealed runs in the shapes that other tools read: tables here, result files and spans of plug-ins.

Figures come from ``harness.analysis``; a format only arranges them. Nothing is measured or judged here.
"""

from harness.present.export.formats import FORMATS, Format, named_format, write_runs
from harness.present.export.measured import MeasuredRequest, MeasuredRun, measured
