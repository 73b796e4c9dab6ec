"""When the requests of an open loop are due."""

import random


def arrival_times_s(
    num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds from the start to each arrival, the first one after a gap of its own.

    Gaps are gamma distributed with mean ``1 / rate`` (rate in requests per second) and squared
    coefficient of variation ``1 / burstiness``: 1 is Poisson, below 1 burstier, above 1 steadier.
    """
    rng = random.Random(f"arrivals {seed}")
    times_s, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times_s.append(now_s)
    return times_s
