"""The configuration search: thousands of candidates on the simulator, ranked. Nothing is measured here."""
