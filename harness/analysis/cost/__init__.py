"""Device time and padding: reconstruction on both channels, comparisons with a baseline, devices and drift."""
