"""Time the vendor libraries' kernels (model.kernels=vendor) against our own."""

from benchmarks.gpu.device import Device
from benchmarks.gpu.kernels import attention, dense_fp8
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import SHAPES
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels import create_kernels

ATTENTIONS = (1, 1, 4096), (8, 1, 4096), (32, 1, 4096), (32, 4, 4096), (8, 4, 32768)
"""Numbers of rows, queries per row, and context lengths."""


def run(device: Device, say: Say) -> None:
    for shape in ["small"] if device.is_rehearsal else ["v2-lite", "v3-slice"]:
        config = ModelConfig.from_dict(SHAPES[shape])
        for kind in ("auto", "vendor"):
            try:
                kernels = create_kernels(kind, config, device.kind)
                quantising = create_kernels(kind, config, device.kind, quantises=True)
            except ValueError as error:
                say(f"{shape}, {kind}", why=str(error))
                continue
            name = f"{shape}, {kernels.name}"
            for size in [(2, 4, 100)] if device.is_rehearsal else ATTENTIONS:
                attention(device, say, name, config, kernels, *size)
            for num_tokens in (1024, 4096) if quantising.supports_fp8_blocks else ():
                dense_fp8(device, say, name, config, [("by FP8 rows", quantising)], num_tokens)
