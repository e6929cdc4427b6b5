"""Sealed runs in the shapes that other tools read: result files of benchmarks, spans, tables.

Figures come from ``harness.analysis``; a format only arranges them. Nothing is measured or judged here.
"""

from harness.export.formats import FORMATS, Format, named_format, write_runs
from harness.export.measured import MeasuredRequest, MeasuredRun, measured
from harness.export.otel import batches, post_spans, spans_of
from harness.export.peers import peer_side
