"""Buckets: batch sizes that steps are padded to. Fewer buckets need fewer captured graphs."""

from bisect import bisect_left


def resolve_buckets(
    sizes: tuple[int, ...] | None, max_rows: int, device_type: str
) -> tuple[int, ...]:
    """Return the batch sizes in ascending order; the last one is ``max_rows``.

    If ``sizes`` is None, the device determines the sizes. A CPU gets every size, because padding
    costs time there and saves nothing. Other devices get 1, 2, 4, 8, then powers of two and the
    midpoints between them.

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
            f"decode.batch_sizes: {wrong} are out of range; use 1 to decode.max_num_seqs={max_rows}"
        )
    return tuple(sorted({*sizes, max_rows}))


def bucket_for(num_rows: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest bucket with at least ``num_rows`` rows."""
    return buckets[bisect_left(buckets, num_rows)]
