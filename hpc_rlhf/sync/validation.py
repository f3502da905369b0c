"""Whether the tensors that a learner announces are those that a server's model is made of."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

# In some published checkpoints; every implementation computes it.
_COMPUTED = ("rotary_emb.inv_freq",)


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a Hugging Face directory, from the files' headers.

    Raises:
        FileNotFoundError: no safetensors files there.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def check_tensors(
    announced: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    """Check the announced tensors against those of the checkpoint that the server started from.

    Args:
        tied: the output layer shares the embedding, and may be absent on either side.

    Raises:
        ValueError: one is missing, unknown, or of another shape.
    """
    optional = {"lm_head.weight"} if tied else set()
    expected = {name: s for name, s in expected.items() if not name.endswith(_COMPUTED)}
    missing = sorted(expected.keys() - announced.keys() - optional)
    unknown = sorted(announced.keys() - expected.keys() - optional)
    if missing or unknown:
        raise ValueError(
            f"{len(missing)} tensors of the checkpoint are not announced {missing[:3]}, "
            f"{len(unknown)} announced ones are not in it {unknown[:3]}"
        )
    for name, shape in announced.items():
        if expected.get(name, shape) != shape:
            raise ValueError(f"{name}: announced as {shape}, {expected[name]} in the checkpoint")
