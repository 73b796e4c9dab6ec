"""What a figure was taken on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
BUSY = 0.5
"""A load average above this before a turn begins means that something else is running."""


def cpu() -> dict[str, Any]:
    """Model, and which of the instructions that decide the speed of bf16 it has."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    has = set(fields.get("flags", "").split())
    model = fields.get("model name", platform.processor())
    return {"cpu": model, "cpu_flags": [flag for flag in FLAGS if flag in has]}


def moment() -> dict[str, Any]:
    """When, and how busy the machine is before anything of ours runs."""
    load = os.getloadavg()[0]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"at": now, "load_average": round(load, 2), "is_busy": load > BUSY}
