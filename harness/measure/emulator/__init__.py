"""The emulator: the engine's decisions in real time, behind an OpenAI-compatible HTTP server in a separate process.

A step lasts exactly as long as the cost model says, whatever the host does. The engine alone decides the schedule.
Start the emulator with ``harness server emulator``.
"""
