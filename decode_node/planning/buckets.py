"""Batch sizes that a step is padded to, so that few shapes exist (one captured graph each)."""

from bisect import bisect_left


def resolve_buckets(
    sizes: tuple[int, ...] | None, max_rows: int, device_type: str
) -> tuple[int, ...]:
    """The ``sizes`` sizes, or those that suit the device: every size on a CPU, where padding
    costs time and saves nothing; elsewhere 1, 2, 4, 8, then powers of two and what lies
    halfway. They rise and end with the number of rows.

    Raises ValueError if a size is out of range.
    """
    if sizes is None:
        if device_type == "cpu":
            return tuple(range(1, max_rows + 1))
        powers = [1 << i for i in range(max_rows.bit_length())]
        halfway = [size + size // 2 for size in powers if size >= 16]
        sizes = tuple(size for size in powers + halfway if size <= max_rows)
    wrong = [size for size in sizes if not 1 <= size <= max_rows]
    if wrong:
        raise ValueError(
            f"decode.batch_sizes: {wrong} out of range, use 1 to decode.max_num_seqs={max_rows}"
        )
    return tuple(sorted({*sizes, max_rows}))


def bucket_for(num_rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest size that holds so many rows."""
    return buckets[bisect_left(buckets, num_rows)]
