import pytest
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.models import heads
from hpc_rlhf.models.heads import vocab_parallel_log_probs
from hpc_rlhf.models.parallel import initialize_model_parallel
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

TOKENS, HIDDEN, TEMPERATURE = 37, 16, 0.7


def rows_of_rank(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's rows, the last shards padded with numbers that would show if they counted."""
    per_rank = -(-len(weight) // ranks)
    padding = torch.full((per_rank * ranks - len(weight), weight.size(1)), 9.0, dtype=weight.dtype)
    return torch.cat((weight, padding)).split(per_rank)[torch.distributed.get_rank()].clone()


def against_definition(vocab_size: int, chunk_tokens: int) -> tuple[float, float]:
    """Largest difference of values and of gradients from log_softmax in float64, relative to the
    largest of them."""
    heads.ROW_BLOCK = 16  # in this rank's process only: several blocks of a small vocabulary
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    initialize_model_parallel(ParallelConfig(tensor=ranks), seed=0, timeout_s=60)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(vocab_size, HIDDEN, generator=generator)
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    grad_log_probs, grad_entropy = torch.randn(2, TOKENS, generator=generator)

    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (exact_hidden @ exact_weight.T / TEMPERATURE).log_softmax(-1)
    exact_log_probs = log_p[torch.arange(TOKENS), targets]
    exact_entropy = -(log_p.exp() * log_p).sum(-1)
    torch.autograd.backward(
        (exact_log_probs, exact_entropy), (grad_log_probs.double(), grad_entropy.double())
    )
    assert exact_hidden.grad is not None and exact_weight.grad is not None

    our_hidden, our_weight = hidden.requires_grad_(), rows_of_rank(weight, ranks).requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        copy_to_tensor_model_parallel_region(our_hidden),
        our_weight,
        targets,
        temperature=TEMPERATURE,
        chunk_tokens=chunk_tokens,
        vocab_size=vocab_size,
        group=torch.distributed.group.WORLD,
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.autograd.backward((log_probs, entropy), (grad_log_probs, grad_entropy))
    assert our_hidden.grad is not None and our_weight.grad is not None

    first = rank * our_weight.size(0)
    held = exact_weight.grad[first : first + our_weight.size(0)]

    def largest(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
        return max(
            ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs if len(b)
        )

    assert not our_weight.grad[len(held) :].any()  # padding
    return (
        largest((log_probs, exact_log_probs), (entropy, exact_entropy)),
        largest((our_hidden.grad, exact_hidden.grad), (our_weight.grad[: len(held)], held)),
    )


@pytest.mark.parametrize(
    ("ranks", "vocab_size"),
    [(1, 51), (2, 51), (4, 5)],  # padded at 2 ranks; at 4 the last one holds nothing but padding
)
@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_values_and_gradients_are_those_of_the_definition(
    ranks: int, vocab_size: int, chunk_tokens: int
) -> None:
    for values, gradients in run_ranks(against_definition, ranks, vocab_size, chunk_tokens):
        assert values < 5e-6
        assert gradients < 5e-6


def test_temperature_must_be_positive() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"temperature 0\.0 is not positive"):
        vocab_parallel_log_probs(
            x,
            x,
            torch.zeros(1, dtype=torch.int64),
            temperature=0.0,
            chunk_tokens=1,
            vocab_size=1,
            group=None,  # type: ignore[arg-type] - refused before it is used
        )


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns while active."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def largest_tensor(tokens: int, vocab_size: int, hidden_size: int, chunk_tokens: int) -> int:
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, requires_grad=True)
    with LargestTensor() as mode:
        log_probs, entropy = vocab_parallel_log_probs(
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.int64),
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            vocab_size=vocab_size,
            group=torch.distributed.group.WORLD,
        )
        (log_probs.sum() + entropy.sum()).backward()
    return mode.largest


def test_no_tensor_of_all_tokens_by_the_vocabulary_exists() -> None:
    tokens, vocab_size, hidden_size, chunk_tokens = 256, 512, 8, 32
    (chunked,) = run_ranks(largest_tensor, 1, tokens, vocab_size, hidden_size, chunk_tokens)
    assert chunked == chunk_tokens * vocab_size
    (whole,) = run_ranks(largest_tensor, 1, tokens, vocab_size, hidden_size, tokens)
    assert whole == tokens * vocab_size  # the measurement would notice
