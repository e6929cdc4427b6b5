"""The method: figures, invariants, decisions and fits, as pure functions of a run's tables.

No raw byte is read here.
"""
