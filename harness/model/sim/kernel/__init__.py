"""The compiled event loop of the simulator, and the arrays that it reads and writes. It steps the engine."""
