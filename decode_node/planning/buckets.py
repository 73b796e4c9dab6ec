"""Batch sizes that a step is padded to, so that few shapes exist (one captured graph each)."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """``sizes`` rise and end with the number of rows."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, asked: tuple[int, ...] | None, max_rows: int, device_type: str) -> "Buckets":
        """The ``asked`` sizes, or those that suit the device: every size on a CPU, where padding
        costs time and saves nothing; elsewhere 1, 2, 4, 8, then powers of two and what lies
        halfway.

        Raises ValueError if a size is out of range.
        """
        if asked is None:
            if device_type == "cpu":
                return cls(tuple(range(1, max_rows + 1)))
            powers = [1 << i for i in range(max_rows.bit_length())]
            halfway = [size + size // 2 for size in powers if size >= 16]
            asked = tuple(size for size in powers + halfway if size <= max_rows)
        wrong = [size for size in asked if not 1 <= size <= max_rows]
        if wrong:
            raise ValueError(
                f"decode.batch_buckets: {wrong} out of range, use 1 to decode.max_rows={max_rows}"
            )
        return cls(tuple(sorted({*asked, max_rows})))

    def rows(self, num: int) -> int:
        """The smallest size that holds ``num`` rows."""
        return self.sizes[bisect_left(self.sizes, num)]
