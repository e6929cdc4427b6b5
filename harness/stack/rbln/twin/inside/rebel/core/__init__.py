"""The part of the runtime that torch.compile calls."""
