"""How what the host decides gets to the device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, without waiting for anything that runs there.

    It goes by pinned memory, of which torch knows when it is read and may be used again: from other memory the driver may
    wait, for all that was launched before, until it can copy. On a CPU it is the tensor itself.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
