"""Kinds of server: each turns the [server] table of an experiment into a LaunchPlan. Nothing is started here."""
