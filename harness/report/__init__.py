"""Reports of sealed runs: one HTML file, a table for the terminal, a trace for a viewer.

Reads records and computes no figure that analysis has not defined. Nothing here talks to a server.
"""

from harness.report.page import write_report
from harness.report.perfetto import write_perfetto
from harness.report.terminal import conditions_table, on_terminal, serving_tables, summary_tables
