"""NPUs as the driver and the exporter report them. Nothing is configured or reset."""
