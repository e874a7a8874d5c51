"""The README's pictures of the playground, from a server that runs.

    hamburger serve &
    python benchmarks/pictures.py --url http://127.0.0.1:8000 --out docs/pictures

chat.png: an answer with its passes. race.gif: a race, replayed at a quarter of its speed. Needs Chromium and Pillow.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from host.browser import OPTIONS, chromium

_WIDTH, _HEIGHT = 1000, 620
_FRAMES_A_SECOND = 10
_COLOURS = 32
_LAST_FRAME_MILLISECONDS = 4000
_QUESTION = "Write a Python function that says whether a number is prime."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(OPTIONS))
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(args.url)
        page.wait_for_selector('#model option:not([value=""])', state="attached")
        _chat(page, args.out / "chat.png")
        _race(page, args.out / "race.gif")
        browser.close()
    return 0


def _chat(page: Page, path: Path) -> None:
    page.locator("#max_tokens").fill("160")
    page.locator("#temperature").fill("0")
    page.locator("#prompt").fill(_QUESTION)
    page.locator("#prompt").press("Enter")
    page.locator("article.answer .stats").get_by_text("tokens").wait_for(timeout=60_000)
    page.locator("#send").wait_for(timeout=60_000)
    page.locator("article.answer .pass").nth(8).hover()
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


def _race(page: Page, path: Path) -> None:
    page.locator('nav a[href="#race"]').click()
    page.locator("#race-speed").select_option("0.25", force=True)
    page.locator("#race-start").click()
    # Both lanes run, then are replayed side by side: that is what the picture shows.
    page.locator("#race-verdict").get_by_text("identical").wait_for(timeout=120_000)
    frames = []
    while page.locator("#race-stop").is_visible():
        began = time.monotonic()
        frames.append(_frame(page))
        page.wait_for_timeout(max(0.0, 1000 * (1 / _FRAMES_A_SECOND - (time.monotonic() - began))))
    frames.append(_frame(page))
    frames = [frame.quantize(_COLOURS) for frame in frames]
    durations = [1000 // _FRAMES_A_SECOND] * (len(frames) - 1) + [_LAST_FRAME_MILLISECONDS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


def _frame(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


if __name__ == "__main__":
    sys.exit(main())
