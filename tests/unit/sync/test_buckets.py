"""Bucket plans and what travels in them."""

import json

import pytest
import torch

from hpc_rlhf.sync.buckets import Bucket, pack, plan_buckets, unpack

TENSORS = [
    ("a", torch.float32, (3, 5)),  # 60 bytes, 64 aligned
    ("b", torch.bfloat16, (7,)),  # 14, 16
    ("c", torch.float32, (40,)),  # 160: larger than a bucket
    ("d", torch.int64, (2, 2)),  # 32
    ("e", torch.bfloat16, ()),  # a scalar
]


def sample(bucket: Bucket, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = {name: dtype for name, dtype, _ in TENSORS}
    return [
        torch.randint(-99, 99, slot.shape, generator=generator).to(dtypes[slot.name])
        for slot in bucket.slots
    ]


def test_plan_keeps_the_order_and_the_limit() -> None:
    plan = plan_buckets(TENSORS, 100)
    assert [[slot.name for slot in bucket.slots] for bucket in plan] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
    ]
    # 64 + 16 + 8 of checksum; a whole tensor whatever the limit; 32 + 16 + 8
    assert [bucket.nbytes for bucket in plan] == [88, 168, 56]
    assert [slot.offset for bucket in plan for slot in bucket.slots] == [0, 64, 0, 0, 32]


def test_plan_survives_json() -> None:
    for bucket in plan_buckets(TENSORS, 100):
        assert Bucket.from_json(json.loads(json.dumps(bucket.to_json()))) == bucket


def test_a_name_that_comes_twice() -> None:
    with pytest.raises(ValueError, match="tensor a comes twice"):
        plan_buckets([TENSORS[0], TENSORS[0]], 100)


def test_tensors_arrive_bit_for_bit() -> None:
    for bucket in plan_buckets(TENSORS, 100):
        buffer = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
        tensors = sample(bucket)
        pack(bucket, tensors, buffer)
        arrived = unpack(bucket, buffer.clone())
        assert [name for name, _ in arrived] == [slot.name for slot in bucket.slots]
        for (_, got), sent in zip(arrived, tensors, strict=True):
            assert got.dtype == sent.dtype
            assert torch.equal(got, sent)


def test_non_contiguous_tensors() -> None:
    (bucket,) = plan_buckets([("t", torch.float32, (5, 3))], 1000)
    tensor = torch.arange(15.0).view(3, 5).t()
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
    pack(bucket, [tensor], buffer)
    assert torch.equal(unpack(bucket, buffer)[0][1], tensor)


def test_every_flipped_bit_is_found() -> None:
    bucket = plan_buckets(TENSORS, 100)[0]
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
    pack(bucket, sample(bucket), buffer)
    for byte in range(bucket.nbytes):
        for bit in (0, 7):
            damaged = buffer.clone()
            damaged[byte] ^= 1 << bit
            with pytest.raises(ValueError, match=r"checksum of the bucket a \.\.\. b"):
                unpack(bucket, damaged)


def test_tensors_that_are_not_as_planned() -> None:
    bucket = plan_buckets(TENSORS, 100)[0]
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
    a, b = sample(bucket)
    with pytest.raises(ValueError, match="a: planned float32"):
        pack(bucket, [a.double(), b], buffer)
    with pytest.raises(ValueError, match="a: planned"):
        pack(bucket, [a.t(), b], buffer)
