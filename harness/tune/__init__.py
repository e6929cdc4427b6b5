"""The one advisor: what a workload loses on a server, which configuration saves most, and the way to a measured answer.

``explore`` predicts; the path of ``harness tune`` diagnoses, confirms on new plans and answers.
"""
