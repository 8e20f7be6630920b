"""Stand-in until the real one is merged."""
from torch import nn
def is_pure(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and all(is_pure(m) for m in module.children())
