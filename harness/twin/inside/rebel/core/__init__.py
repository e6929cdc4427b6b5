"""The part of the runtime that torch.compile calls. Next: ``rebel.core.torch_compile``."""
