"""Hand-overs between two processes on one device, over gloo and pinned memory.

They are compared with what gloo alone sends. NCCL is left out, because its ranks need a GPU each.
"""

import statistics

from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import SHAPES
from benchmarks.handover import StepShape, measured
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.network.cache import MAIN, MTP

NUM_ROUNDS = 3


def run(device: Device, say: Say) -> None:
    name, num_tokens = ("small", 100) if device.is_rehearsal else ("v2-lite", 16384)
    config = ModelConfig.from_dict(SHAPES[name])
    layers = {MAIN: config.num_hidden_layers, MTP: 1}
    shape = StepShape(num_tokens, config.latent_dim, layers, device.kind.type)
    num_bytes, seconds = measured(shape, NUM_ROUNDS)
    raw, pulled = (
        num_bytes / statistics.median(times[1:]) for times in (seconds.sent, seconds.pulled)
    )
    say("gloo alone", bytes_per_s=raw)
    say("a prompt pulled", bytes_per_s=pulled, of_raw=pulled / raw)
