"""How many blocks are needed, and when an experiment may stop."""
