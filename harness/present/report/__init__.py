"""Reports of sealed runs: one HTML file, and a table for the terminal.

Reads records and computes no figure that analysis has not defined. Nothing here talks to a server.
"""

from harness.present.report.page import write_report
from harness.present.report.terminal import conditions_table, on_terminal, serving_tables, summary_tables
