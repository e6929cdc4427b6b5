"""An experiment resolved: a specification becomes planned runs, once. Nothing is run or predicted here."""

from harness.experiment.planned import PlannedRun, PlannedRuns, changed_inputs, resolve
