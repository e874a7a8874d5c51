"""What the device itself can do: prints its name, memory bandwidth and bfloat16 rate as one line of JSON.

The bandwidth is the faster of two: a large array that is summed (read once) and one that is copied (read and written).
A GPU is kept busy before it is measured, so that its clocks have risen, and is timed by its own events. Where it tells
its memory's clock and width, what they would give at most stands beside the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REPEATS = 15
WARM_SECONDS = {"cuda": 0.5, "cpu": 0.0}
BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}  # far beyond any cache
WIDTH = {"cuda": 8192, "cpu": 256}  # of the square matrices that are multiplied


def probe(name: str) -> dict[str, Any]:
    """Bytes/s and floating-point operations/s, medians. Raises what torch does where the device is not there."""
    import torch

    from hamburger.model.device.devices import make_current

    device = torch.device(name)
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    size = BYTES[device.type]
    if device.type == "cuda":
        make_current(device)
        free = torch.cuda.mem_get_info(device)[0]
        found |= _stated(torch.cuda.get_device_properties(device)) | {"free_gib": round(free / 2**30, 1)}
        size = min(size, free // 4)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    left = torch.randn(WIDTH[device.type], WIDTH[device.type], device=device).bfloat16()
    right = torch.randn_like(left)
    read = source.nbytes / _seconds(device, source.sum)
    copied = 2 * source.nbytes / _seconds(device, lambda: target.copy_(source))
    rate = 2 * len(left) ** 3 / _seconds(device, lambda: left @ right)
    return found | {"read": read, "copied": copied, "bandwidth": max(read, copied), "bfloat16_rate": rate}


def _stated(properties: Any) -> dict[str, Any]:
    """Name and memory; the bandwidth that kHz and bits of its memory give at two transfers a clock, where torch tells
    them."""
    found = {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    clock, width = (getattr(properties, key, 0) for key in ("memory_clock_rate", "memory_bus_width"))
    return found | ({"bandwidth_at_most": 2 * clock * 1000 * width / 8} if clock and width else {})


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of one call, after calls that are not counted."""
    once = _by_events if device.type == "cuda" else _by_clock
    end = time.perf_counter() + WARM_SECONDS[device.type]
    once(work)
    while time.perf_counter() < end:
        once(work)
    return statistics.median(once(work) for _ in range(REPEATS))


def _by_events(work: Callable[[], object]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _by_clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    print(json.dumps(probe(parser.parse_args().device)))


if __name__ == "__main__":
    main()
