"""Answers, verdicts and gates: rules applied to figures."""
