"""Rotary position embeddings as transformers computes them, looked up by position.

Megatron's own table starts every packed sequence at position 0 by splitting the batch in each layer.
Here the angles of a micro-batch are computed once from its ``position_ids``, so that packing costs
nothing and a sequence may start anywhere.
"""

import math

import torch

from hpc_rlhf.models.hf_layout import RopeSpec


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and the scale of cos and sin.

    The formulas, and the order of operations, are those of ``transformers.modeling_rope_utils``.

    Returns:
        float32 [head_dim / 2] on the CPU, and the attention factor (1.0 but for yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    match rope.rope_type:
        case "default":
            return inverse, 1.0
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(inverse, rope), 1.0
        case "yarn":
            return _yarn(exponents, rope, head_dim), _yarn_attention_factor(rope)
    raise ValueError(f"unknown rope_type {rope.rope_type!r}")


def _llama3(inverse: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths divided by ``factor``, short ones kept, a linear blend between."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / rope.factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, blended, scaled)


def _yarn(exponents: torch.Tensor, rope: RopeSpec, dim: int) -> torch.Tensor:
    """Peng et al., "YaRN" (2023), section 3.2: interpolation by wavelength ("NTK by parts")."""

    def correction_dim(rotations: float) -> float:
        return (dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    extrapolated = 1 - ramp.clamp(0, 1)
    positions = rope.theta**exponents
    return (1.0 / (rope.factor * positions)) * (1 - extrapolated) + (1.0 / positions) * extrapolated


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale()


class RotaryAngles:
    """Positions -> angles, in the form Megatron's attention takes.

    Not a module, so that casting a model to half precision leaves the frequencies in float32.
    ``attention_factor`` is not applied here: scaling q and k by it is scaling their product by its
    square, which the model does in the softmax scale.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        inverse, self.attention_factor = rotary_frequencies(rope, head_dim)
        self.inverse_frequencies = inverse.to(device)

    @torch.no_grad()
    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> float32 [T, 1, 1, head_dim], radians."""
        angles = position_ids.float()[:, None] * self.inverse_frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
