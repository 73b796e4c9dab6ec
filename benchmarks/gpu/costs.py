"""v and c at DeepSeek-V2-Lite's dimensions, measured like in benchmarks/verify_cost.py."""

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import random_model
from benchmarks.gpu.steps import Steps
from benchmarks.verify_cost import MAX_DRAFTS, parts_of


def run(device: Device, say: Say) -> None:
    name, context = ("small", 50) if device.is_rehearsal else ("v2-lite", 4096)
    loaded = random_model(name, device.kind, torch.bfloat16, with_mtp=True)
    for num_rows in (1, 2) if device.is_rehearsal else (1, 8, 32, 128):
        with torch.inference_mode():
            batch = Steps(loaded, num_rows, context, MAX_DRAFTS)
            read_B, times = torch.arange(num_rows, device=device.kind), {}
            parts = parts_of(loaded, batch.rows, batch.caches, num_rows)
            for part, function in parts.items():
                repeated = loaded.kernels.make_replayable(function)
                times[part] = device.time_s(lambda: repeated(read_B))  # noqa: B023
        plain = times["verify 0"]
        draft = (times[f"draft {MAX_DRAFTS}"] - times["draft 1"]) / (MAX_DRAFTS - 1)
        v = {f"v{n}": times[f"verify {n}"] / plain for n in range(1, MAX_DRAFTS + 1)}
        say(f"{name}, {num_rows} rows of {context}", plain_ms=1e3 * plain, c=draft / plain, **v)
        del batch, parts
        device.free()
