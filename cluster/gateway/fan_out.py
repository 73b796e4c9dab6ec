"""Several answers to one request: as many requests of their own, their streams merged."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from core.answer import Delta, Finished
from core.request import Request

_SEED_STEP = 0x9E3779B97F4A7C15
_MAX_SEED = (1 << 63) - 1
Piece = Delta | Finished


def expand(request: Request) -> list[Request]:
    """One request per answer; answer i has the seed ``seed + i * _SEED_STEP`` mod 2^63, so the
    first is the answer of n = 1."""
    sampling = request.sampling
    assert sampling.seed is not None, "a seed is given at admission"
    return [
        replace(
            request,
            sampling=replace(sampling, n=1, seed=(sampling.seed + i * _SEED_STEP) & _MAX_SEED),
        )
        for i in range(sampling.n)
    ]


async def merged(
    requests: Sequence[Request], generate: Callable[[int, Request], AsyncGenerator[Piece, None]]
) -> AsyncGenerator[Piece, None]:
    """Pieces of all answers as they come, each with its index; one Finished per answer.

    The first error ends them all. Closing it early ends them all too.
    """
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=len(requests))

    async def follow(index: int, request: Request) -> None:
        try:
            async with aclosing(generate(index, request)) as pieces:
                async for piece in pieces:
                    await queue.put(replace(piece, index=index))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(follow(i, request)) for i, request in enumerate(requests)]
    num_left = len(tasks)
    try:
        while num_left:
            piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            num_left -= isinstance(piece, Finished)
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
