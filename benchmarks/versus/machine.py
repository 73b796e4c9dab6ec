"""The machine on which a figure was measured."""

import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
BUSY = 0.1
"""Share of cores used by other work above which figures are unreliable."""
SAMPLE_S = 1.0


def cpu() -> dict[str, Any]:
    """Return the CPU's model, and which instructions that decide the speed of bf16 it has."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    has = set(fields.get("flags", "").split())
    model = fields.get("model name", platform.processor())
    return {"cpu": model, "cpu_flags": [flag for flag in FLAGS if flag in has]}


def moment(sample_s: float = SAMPLE_S) -> dict[str, Any]:
    """Return the time, and the share of the cores in use while nothing of ours runs."""
    share = busy_share(sample_s)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"at": now, "others_share": round(share, 3), "is_busy": share > BUSY}


def busy_share(sample_s: float) -> float:
    """Return the used share of all cores during ``sample_s``; 0 if it is unknown."""
    idle, total = _ticks()
    time.sleep(sample_s)
    idle_then, total_then = _ticks()
    passed = total_then - total
    return 1 - (idle_then - idle) / passed if passed else 0.0


def _ticks() -> tuple[int, int]:
    """Return idle ticks, including waits for a disk, and all ticks."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    ticks = [int(text) for text in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
