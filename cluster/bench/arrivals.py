"""Arrival times of open-loop requests."""

import random


def arrival_times_s(
    num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Return the arrival time of each request in seconds after the start.

    Gaps, including the one before the first request, are gamma distributed.

    Args:
        num_requests: Number of arrival times.
        rate: Mean requests per second.
        burstiness: Inverse of the gaps' squared coefficient of variation. 1 is a Poisson process,
            below 1 is burstier, above 1 is steadier.
        seed: Seed of the gaps.
    """
    rng = random.Random(f"arrivals {seed}")
    times_s = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times_s.append(now_s)
    return times_s
