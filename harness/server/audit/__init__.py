"""What the harness itself does to a measurement: the null server, the audit of every run, the benchmark."""
