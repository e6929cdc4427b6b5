"""The paper: its tables from a user's own runs, its printed figures, and the signs of its Tables I and II.

Nothing but the command line imports this package, and no measurement depends on it.
"""

from harness.paper.source import Source
from harness.paper.tables import paper_tables
