"""What models and their training hold in memory on one rank, measured on the tensors that are there."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on this rank's device."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0  # master weights, where they are not the parameters, and moments

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def as_metrics(self, role: str) -> dict[str, float]:
        """``memory/ROLE_...`` in bytes; gradients and optimizer of a trained model only."""
        parts = {"parameters": self.parameters}
        if self.gradients or self.optimizer:
            parts |= {"gradients": self.gradients, "optimizer": self.optimizer}
        return {f"memory/{role}_{name}_bytes": float(size) for name, size in parts.items()}


def of_model(model: torch.nn.Module) -> MemoryUse:
    """Of a model that is not trained."""
    return MemoryUse(resident_bytes(model.parameters()))


def resident_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the memory that ``tensors`` lie in, each piece counted once.

    Args:
        without: memory that these lie in is not counted.
    """
    counted = {tensor.untyped_storage().data_ptr() for tensor in without}
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
