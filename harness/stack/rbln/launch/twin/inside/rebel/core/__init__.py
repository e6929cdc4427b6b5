"""The modules of the runtime that torch.compile calls."""
