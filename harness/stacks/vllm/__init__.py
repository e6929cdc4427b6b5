"""vLLM itself, on any platform that pads its batches: its launch above, the records of its steps below."""
