"""What the device itself can do: prints its name, memory bandwidth and bfloat16 rate as one line of JSON.

The bandwidth is the faster of two: a large array that is summed (read once) and one that is copied (read and written).
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

REPEATS = 9
BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}  # far beyond any cache
WIDTH = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied


def probe(name: str) -> dict[str, Any]:
    """Bytes/s and floating-point operations/s, medians. Raises what torch does where the device is not there."""
    import torch

    device = torch.device(name)
    source = torch.randn(BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    left = torch.randn(WIDTH[device.type], WIDTH[device.type], device=device).bfloat16()
    right = torch.randn_like(left)
    read = source.nbytes / _seconds(device, source.sum)
    copied = 2 * source.nbytes / _seconds(device, lambda: target.copy_(source))
    rate = 2 * len(left) ** 3 / _seconds(device, lambda: left @ right)
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return found | {"read": read, "copied": copied, "bandwidth": max(read, copied), "bfloat16_rate": rate}


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of one call, after one that is not counted. Waits for the device before it reads a clock."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(REPEATS + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    print(json.dumps(probe(parser.parse_args().device)))


if __name__ == "__main__":
    main()
