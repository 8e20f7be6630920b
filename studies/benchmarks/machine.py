"""Facts about the machine that a result means nothing without; no names, no paths.

``busy_before``: the share of all cores' time that others took in two seconds before anything was measured.
"""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch


def facts() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": version("grpcio"),
        "protobuf": version("protobuf"),
        "busy_before": round(psutil.cpu_percent(2.0) / 100, 2),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """As Linux names it, with family and model number where the name is vague; else what Python knows."""
    try:
        entries = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    info = {key.strip(): value.strip() for key, _, value in reversed(entries)}
    name = info.get("model name") or info.get("Model") or platform.machine()
    numbers = ", ".join(f"{key} {info[key]}" for key in ("cpu family", "model") if key in info)
    return f"{name} ({numbers})" if numbers else name
