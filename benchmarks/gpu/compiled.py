"""Properties of kernels compiled for Hopper, without a device."""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from benchmarks.gpu.launches import Launch

SM_SHARED_BYTES, MOST_SHARED_BYTES = 228 * 1024, 227 * 1024
SM_REGISTERS, SM_THREADS, SM_PROGRAMS = 65536, 2048, 32
LAUNCHED = JITFunction.run
"""Launcher of Triton, saved before launches are recorded."""


class Hopper:
    """A Triton driver without a device, which names the target of compilation."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """Properties of a compiled kernel.

    Attributes:
        wgmma_n: Columns of the narrowest product on a warp group, 0 if there is none.
        num_buffers: Minimum number of buffers of anything staged, 0 if nothing is.
        load_bytes: Bytes of the widest global load of a thread.
    """

    num_registers: int
    num_spilled: int
    shared_bytes: int
    num_threads: int
    wgmma_n: int
    num_buffers: int
    load_bytes: int
    is_serialized: bool

    @property
    def per_sm(self) -> int:
        """Number of programs that fit on a processor at once."""
        registers = -(-self.num_registers // 8) * 8 * self.num_threads
        by_shared = SM_SHARED_BYTES // (self.shared_bytes + 1024)
        by_threads = SM_THREADS // self.num_threads
        return min(SM_REGISTERS // registers, by_shared, by_threads, SM_PROGRAMS)


def compiled_of(launch: Launch) -> Compiled:
    """Compile a launch. Raises the errors of Triton and ptxas."""
    given = {name: _mocked(value) for name, value in launch.given.items()}
    assert launch.kernel is not None and launch.grid is not None
    active, driver._active = driver._active, Hopper()
    try:
        made = LAUNCHED(launch.kernel, grid=launch.grid, warmup=True, **given)
    finally:
        driver._active = active
    return figures(made)


def figures(made: Any) -> Compiled:
    """Return the properties of a kernel that Triton has compiled."""
    ptx, staged = made.asm["ptx"], made.asm["ttgir"]
    told = assembled(ptx)
    [num_registers] = map(int, re.findall(r"Used (\d+) registers", told))
    spilled = map(int, re.findall(r"(\d+) bytes spill", told))
    products = map(int, re.findall(r"wgmma\.mma_async[.\w]*\.m64n(\d+)k", ptx))
    buffers = map(int, re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", staged))
    return Compiled(
        num_registers,
        sum(spilled),
        made.metadata.shared,
        32 * made.metadata.num_warps,
        min(products, default=0),
        min(buffers, default=0),
        max(_loads(ptx), default=0),
        "serialized" in told,
    )


def _loads(ptx: str) -> list[int]:
    """Return the bytes of each global load."""
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (\w+)", ptx)
    loaded = re.findall(r"ld\.global(?:\.[a-uw-z]\w*)*\.(?:v(\d)\.)?b(\d+)", ptx)
    sizes = [int(num or 1) * int(bits) // 8 for num, bits in loaded]
    return sizes + [int(size, 0) for size in copied]


@cache
def assembled(ptx: str) -> str:
    """Return ptxas's report on a kernel: registers, spills, and serialised wgmmas (C7510 to
    C7515)."""
    ptxas = [get_ptxas(90).path, "-v", "-arch=sm_90a", "-o", "/dev/null", "-"]
    return subprocess.run(ptxas, input=ptx, capture_output=True, text=True, check=True).stderr


def _mocked(value: Any) -> Any:
    return tree_map(lambda one: MockTensor(one.dtype) if isinstance(one, Tensor) else one, value)
