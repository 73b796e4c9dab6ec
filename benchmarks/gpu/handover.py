"""Copy pages into staging and out of it, like both ends of a hand-over."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.ceilings import rates
from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import random_model
from tandem.kv_transfer.caches import PagedCaches, Span
from tandem.kv_transfer.pages import PagePool

PAGE_SIZE = 64


def run(device: Device, say: Say) -> None:
    name, num_tokens = ("small", 100) if device.is_rehearsal else ("v2-lite", 16384)
    loaded = random_model(name, device.kind, torch.bfloat16, with_mtp=True)
    num_pages = -(-num_tokens // PAGE_SIZE)
    pool = PagePool(1 + num_pages, PAGE_SIZE)
    memory = loaded.allocate_caches(pool.num_pages, PAGE_SIZE)
    caches = PagedCaches(memory, pool, loaded.dtype_name, loaded.config.identity())
    pages = [1 + int(page) for page in torch.randperm(num_pages)]
    for group in caches.layout.groups:
        shape = group.num_layers, num_tokens, loaded.config.latent_dim
        out = torch.zeros(shape, dtype=loaded.dtype, device=device.kind).view(torch.uint8)
        ways: dict[str, Callable[..., None]]
        ways = {"gather": caches.gather, "scatter": caches.scatter}
        for what, way in ways.items():
            work = partial(way, Span(group, pages, 0, num_tokens), out)
            per_s = 2 * out.nbytes / device.time_s(work)
            of_copy = per_s / rates().copied_bytes_per_s
            say(f"{name}, {what} of {group.name}", bytes_per_s=per_s, of_copy=of_copy)
