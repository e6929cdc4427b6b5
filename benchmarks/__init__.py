"""What only measures this harness: client, emulator, parser, plans, simulator, and other load generators beside ours.

It lies beside the package, not in the wheel.
"""
