"""``python -m harness``: the command line, where no script was installed."""

from harness.cli import main

main()
