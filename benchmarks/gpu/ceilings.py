"""The device's own limits: copy bandwidth and matrix rate."""

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.floors import Rates
from benchmarks.gpu.say import Say, earlier


def run(device: Device, say: Say) -> None:
    num_items = 1 << (17 if device.is_rehearsal else 29)
    source = torch.randn(num_items, device=device.kind)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / device.time_s(lambda: target.copy_(source))
    say("copy", bytes_per_s=copied)
    size = 256 if device.is_rehearsal else 8192
    a, b = (torch.randn(size, size, device=device.kind, dtype=torch.bfloat16) for _ in range(2))
    say("matrix", flops_per_s=2 * size**3 / device.time_s(lambda: a @ b))
    one = torch.zeros(1, device=device.kind)

    def many() -> None:
        for _ in range(100):
            one.add_(1)

    say("launch", s=device.host_s(many) / 100)
    if not device.is_rehearsal:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        say("graph node", s=device.time_s(graph.replay) / 100)


def rates() -> Rates:
    """Return the rates that this section measured, in this run or an earlier one."""
    copy, matrix = earlier("ceilings", "copy"), earlier("ceilings", "matrix")
    return Rates(copy["bytes_per_s"], matrix["flops_per_s"])
