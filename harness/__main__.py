"""The command line: ``python -m harness`` and the script ``harness``.

Loads the commands where an interruption is already caught: until then, Ctrl-C would show how far the imports were.
"""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from harness.cli import main as run_command

        run_command()
    except KeyboardInterrupt:
        print("harness: interrupted; nothing half-written counts as a run", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
