from __future__ import annotations

import pytest
import torch

from naiad_kernels.staging import Staging

CPU = torch.device("cpu")


def test_lists_become_tensors_of_one_buffer_with_aligned_beginnings() -> None:
    lists = [
        ([5], torch.int32),
        ([1, -(1 << 40), 3], torch.int64),
        ([], torch.int32),
        ([-0.5], torch.float64),
    ]
    target = torch.full((256,), 9, dtype=torch.uint8)
    staging = Staging(Staging.bytes_for([3, 1], [1, 0]), CPU, target)
    tensors = [staging.put(values, dtype) for values, dtype in lists]
    assert target.eq(9).all()
    staging.send()
    assert [(tensor.tolist(), tensor.dtype) for tensor in tensors] == lists
    assert all((tensor.data_ptr() - target.data_ptr()) % 16 == 0 for tensor in tensors)
    assert target[48 + 16 :].eq(9).all()


def test_the_same_lists_go_to_the_same_places() -> None:
    target = torch.zeros(64, dtype=torch.uint8)
    parts = []
    for values in ([1, 2], [3, 4]):
        staging = Staging(16, CPU, target)
        parts.append(staging.put(values, torch.int64))
        staging.send()
    assert parts[0].tolist() == parts[1].tolist() == [3, 4]


@pytest.mark.asserts
def test_more_than_was_said_is_our_own_bug() -> None:
    staging = Staging(Staging.bytes_for([1], []), CPU)
    staging.put([1], torch.int64)
    with pytest.raises(AssertionError, match="more is put"):
        staging.put([1], torch.int32)
