"""vLLM itself, on any platform that pads its batches: step records of a server, and their reader."""
