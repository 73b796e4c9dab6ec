"""What a known beginning saves: TTFT of a second request against the first.

    python -m benchmarks.prefix_reuse [--prefix-tokens 1024] [--num-pairs 8] [--json]

Each pair shares a beginning nobody else has; the answers must not depend on it. Ratios come
from one run, first and second requests interleaved.
"""

import argparse
import asyncio
import json
import statistics
import time

from rich.console import Console
from tokenizers import Tokenizer

from tandem import AsyncClient, Finished
from tandem.cluster.commands.common import running_server
from tandem.core.config import TINY_MODEL, load
from training.corpus import held_out_prompts

TAIL_TOKENS = 16


async def first_token_ms(client: AsyncClient, ids: list[int]) -> tuple[float, list[int], int]:
    """TTFT as the client sees it, the answer, and how many prompt tokens were known."""
    started_at, first_at = time.perf_counter(), 0.0
    tokens: list[int] = []
    async for piece in client.generate(ids, max_tokens=12, ignore_eos=True):
        if isinstance(piece, Finished):
            return (first_at - started_at) * 1e3, tokens, piece.usage.cached
        first_at = first_at or time.perf_counter()
        tokens += piece.token_ids
    raise AssertionError("the stream ended without its last message")


async def measure(num_pairs: int, prefix_tokens: int, sets: list[str]) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    total = prefix_tokens + TAIL_TOKENS
    prompts = held_out_prompts(tokenizer, num_pairs, total, total, seed=11)
    firsts, seconds, cached = [], [], 0
    config = load(None, ["server.address=127.0.0.1:0", *sets])
    async with running_server(config) as server, AsyncClient(server.address) as client:
        for ids in prompts:
            first, answer, _ = await first_token_ms(client, ids)
            second, again, num_cached = await first_token_ms(client, ids)
            assert again == answer, "a known beginning changed the answer"
            firsts.append(first)
            seconds.append(second)
            cached += num_cached
    ratios = [second / first for first, second in zip(firsts, seconds, strict=True)]
    return {
        "prefix_tokens": prefix_tokens,
        "num_pairs": num_pairs,
        "ttft_first_ms": statistics.median(firsts),
        "ttft_second_ms": statistics.median(seconds),
        "ratio_median": statistics.median(ratios),
        "ratio_max": max(ratios),
        "cached_share": cached / (num_pairs * total),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a known beginning saves.")
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--num-pairs", type=int, default=8)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    result = asyncio.run(measure(args.num_pairs, args.prefix_tokens, args.sets))
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        Console().print(
            f"{name:>16}  {value:.3f}" if isinstance(value, float) else f"{name:>16}  {value}"
        )


if __name__ == "__main__":
    main()
