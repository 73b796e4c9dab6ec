"""Time of prefilling a prompt in one forward, compared with its floor.

The checkpoint is random. With FP8 weights, bf16's floor is shown as well.
"""

import torch

from benchmarks.gpu import floors
from benchmarks.gpu.ceilings import rates
from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import random_model
from tandem.model.network.batch import Batch, Segment, pack_segments
from tandem.model.network.cache import Caches

PAGE_SIZE = 64


def run(device: Device, say: Say) -> None:
    for name in ["small"] if device.is_rehearsal else ["v2-lite", "v3-slice"]:
        for in_fp8 in (False, True)[: 1 + (name == "v3-slice")]:
            _of(device, say, name, in_fp8)
            device.free()


def _of(device: Device, say: Say, name: str, in_fp8: bool) -> None:
    kind = device.kind, torch.bfloat16
    loaded = random_model(name, *kind, with_mtp=False, in_fp8=in_fp8, quantises=in_fp8)
    for num_tokens in (100,) if device.is_rehearsal else (1024, 4096, 16384):
        num_pages = -(-num_tokens // PAGE_SIZE)
        caches = loaded.allocate_caches(1 + num_pages, PAGE_SIZE)
        ids = torch.randint(3, loaded.config.vocab_size, (num_tokens,)).tolist()
        batch = pack_segments([Segment(ids, 0, range(1, num_pages + 1))], PAGE_SIZE, device.kind)

        def read(batch: Batch = batch, caches: Caches = caches) -> None:
            loaded.network.logits(loaded.network(batch, caches)[:, -1])

        with torch.inference_mode():
            took = device.time_s(read, 5, 2)
        work = floors.prefill(loaded.config, num_tokens)
        say(
            f"{name}{', FP8' * in_fp8}, {num_tokens} tokens",
            ms=1e3 * took,
            floor_ms=1e3 * work.floor_s(rates()),
            of_floor=work.floor_s(rates()) / took,
            of_matrix_rate=work.num_flops / took / rates().flops_per_s,
        )
