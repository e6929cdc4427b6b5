"""What the raw bytes of a run say: log lines, scrapes and observer records become tables.

No figure is computed here.
"""
