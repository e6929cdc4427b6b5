"""What only measures this harness: client, emulator, parser, plans, simulator, and other load generators beside ours.

It lies beside the package, not in the wheel.
"""

from pathlib import Path

SIX_SESSIONS = Path(__file__).parent / "six-sessions.toml"
"""The experiment from whose runs several benchmarks draw."""
