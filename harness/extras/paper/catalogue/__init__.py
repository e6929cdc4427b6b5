"""The paper's analyses: tables from ``ExperimentRuns``, and which of them each analysis shows."""
