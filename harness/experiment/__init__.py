"""An experiment resolved: from what people wrote to the runs it means, each one value, made once.

Nothing is run or predicted here.
"""

from harness.experiment.planned import PlannedRun, PlannedRuns, changed_inputs, resolve

__all__ = ["PlannedRun", "PlannedRuns", "changed_inputs", "resolve"]
