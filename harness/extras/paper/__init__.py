"""The paper: its tables from a user's own runs, its printed figures, and the signs of its Tables I and II."""

from harness.plugins import Plugin

_AT = "harness.extras.paper.commands"
PLUGIN = Plugin(
    name="paper",
    summary="the paper's experiments, tables, signs and rules",
    groups={"paper": "The paper's experiments, analyses and tables.\n\nExample: `harness paper catalogue`"},
    commands={
        "paper catalogue": f"{_AT}:catalogue",
        "paper analyse": f"{_AT}:analyse",
        "paper tables": f"{_AT}:tables",
        "paper signs": f"{_AT}:signs",
        "paper rules": f"{_AT}:rules",
    },
)
