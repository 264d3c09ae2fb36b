from __future__ import annotations

import pytest

from naiad.model_runner.graph_buckets import Bucket, Buckets


def test_sizes_of_an_engine() -> None:
    buckets = Buckets.of(max_num_seqs=40, max_query_len=9, max_model_len=10_000)
    assert buckets.nums_seqs == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    assert (buckets.query_lens, buckets.max_seq_lens) == ([1, 9], [4096, 10_000])
    assert len(buckets.all()) == 11 * 2 * 2
    assert Buckets.of(1, 1, 100).all() == [Bucket(1, 1, 100)]


def test_the_largest_is_captured_first() -> None:
    sizes = [bucket.num_tokens for bucket in Buckets.of(64, 5, 9000).all()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ((1, 1, 1), Bucket(1, 1, 4096)),
        ((5, 1, 4096), Bucket(6, 1, 4096)),
        ((5, 2, 4097), Bucket(6, 9, 10_000)),
        ((100, 1, 5), Bucket(100, 1, 4096)),
        ((101, 1, 5), None),
        ((3, 10, 5), None),
        ((3, 9, 10_001), None),
        ((48, 9, 5), Bucket(48, 9, 4096)),
        ((49, 9, 5), None),
    ],
)
def test_a_step_takes_the_smallest_that_holds_it(step: tuple[int, int, int], expected: Bucket | None) -> None:
    buckets = Buckets.of(max_num_seqs=100, max_query_len=9, max_model_len=10_000)
    assert buckets.smallest(*step) == expected
    assert expected is None or expected in buckets.all()
