"""A newcomer's first walk through the console with its seconds, and a picture of each page.

`logweir up` in an empty directory, its link in a real Chromium, the samples of the repository: the walk finds
the disk that was full, marks one pattern as normal, and sees the mark on the page. What a person reads and
thinks takes no time here; the seconds are those of the machine."""

import base64
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, Page, sync_playwright

from bench._load import environment
from bench._running import scratch
from bench.idle import up

ROOT: Final = Path(__file__).resolve().parents[1]
SAMPLES: Final = ROOT / "samples"
WAIT_MS: Final = 300_000
SIZES: Final = ((1_600, 1_000), (400, 860))
MOST_BYTES: Final = 1_800_000  # of all pictures; those of a page have about 85,000
QUALITIES: Final = (60, 45, 30, 20, 10)
FULL: Final = "No space left on device"
# Of the samples: the minutes with faults, and an order that two programs wrote about.
FAULTY: Final = "since=2026-11-20T15:36&until=2026-11-20T15:50"
ORDER: Final = "834697cc-e817-be92-00ff-1ed4d0eeb64c"
FLAGS: Final = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


def main(out: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("console_pictures: needs Chromium; on Debian apt-get install chromium")
    with scratch() as folder, sync_playwright() as playwright:
        steps: list[tuple[str, float]] = []
        began = time.monotonic()

        def done(step: str) -> None:
            steps.append((step, time.monotonic() - began - sum(seconds for _, seconds in steps)))
            print(f"{steps[-1][1]:6.1f} s  {step}", flush=True)

        with up(folder, LOGWEIR_API="http://127.0.0.1:0", LOGWEIR_INTAKE="") as _:
            done("logweir up")
            chromium = playwright.chromium.launch(executable_path=browser, args=list(FLAGS))
            context = chromium.new_context()
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            page.goto(json.loads(_command(folder, "console", "--json"))["url"])
            page.wait_for_selector("text=Waiting for the first line")
            done("the link is open, and the page waits for lines")
            pictures = _Pictures(context, page.url, out)
            pictures.take("now-empty", "/")
            _walk(folder, page, done)
            print(f"{time.monotonic() - began:6.1f} s  in all")
            pictures.take_all()
            # The last one, for it changes what the other pages show.
            _command(folder, "silence", "*postgres*", "--for", "2h", "--why", "the disk is being replaced")
            pictures.take("silences", "/silences")
            chromium.close()
        print(f"{pictures.save():,} bytes of pictures in {out}")


def _walk(folder: Path, page: Page, done: Callable[[str], None]) -> None:
    _command(folder, "send", str(SAMPLES / "baseline"), "--wait")
    done("the quiet samples are sent")
    _command(folder, "train")
    done("a model is learnt")
    _command(folder, "send", str(SAMPLES / "observed"), "--wait")
    done("the samples with faults are sent")
    page.goto(f"{_origin(page)}/incidents")
    card = page.locator("article.incident", has_text=FULL).first
    card.wait_for()
    card.locator("[data-open]").click()
    page.wait_for_selector("li.cause")
    done("the incident of the full disk is open")
    cause = page.locator("li.cause", has=page.locator("form.mark")).first
    cause.get_by_role("button", name="Normal").click()
    page.wait_for_selector("li.cause .is-normal")
    done("one pattern is marked normal, and the page shows it")


class _Pictures:
    """Pictures by name, in the best quality in which all of them fit."""

    def __init__(self, context: BrowserContext, url: str, out: Path) -> None:
        self.context, self.out = context, out
        self.url = f"http://{urlsplit(url).netloc}"
        self.taken: dict[str, list[bytes]] = {}

    def take_all(self) -> None:
        page = self.context.new_page()
        page.goto(self.url)
        pages = page.eval_on_selector_all("#pages a", "all => all.map(one => one.getAttribute('href'))")
        wide = "?since=30d"
        for path in pages:
            name = path.strip("/") or "now"
            self.take(name, path + (wide if name in ("patterns", "lines") else ""))
        self.take("units", f"/units?{FAULTY}&by=workload")
        self.take("session", f"/sessions?{FAULTY}&key={ORDER}")
        for name, path, inside in (
            ("incident", "/incidents", f"article.incident:has-text('{FULL}') [data-open]"),
            ("pattern", f"/patterns{wide}", "td.text a[href^='/patterns/T']"),
            ("line", f"/lines{wide}&anomalous=true", "li.line a.at"),
        ):
            page.goto(self.url + path)
            found = page.locator(inside).first.get_attribute("href")
            if found and name == "pattern":
                found = found.replace("since=24h", "since=30d")
            self.take(name, found or path)
        page.close()

    def take(self, name: str, path: str) -> None:
        page = self.context.new_page()
        answer = page.goto(self.url + path)
        if answer is not None and not answer.ok:
            print(f"no picture of {path}: {answer.status}", flush=True)
            return
        session = self.context.new_cdp_session(page)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
            for width, height in SIZES:
                page.set_viewport_size({"width": width, "height": height})
                page.wait_for_timeout(150)  # charts take their new size
                self.taken[f"{name}-{theme}-{width}"] = [
                    base64.b64decode(
                        session.send("Page.captureScreenshot", {"format": "webp", "quality": quality})["data"]
                    )
                    for quality in QUALITIES
                ]
        page.close()

    def save(self) -> int:
        """The bytes of all."""
        sizes = [sum(len(kinds[at]) for kinds in self.taken.values()) for at in range(len(QUALITIES))]
        at = next((at for at, size in enumerate(sizes) if size <= MOST_BYTES), len(QUALITIES) - 1)
        self.out.mkdir(parents=True, exist_ok=True)
        for name, kinds in self.taken.items():
            (self.out / f"{name}.webp").write_bytes(kinds[at])
        return sizes[at]


def _origin(page: Page) -> str:
    return f"http://{urlsplit(page.url).netloc}"


def _command(folder: Path, *verb: str) -> str:
    words = [sys.executable, "-m", "pipeline.cli", *verb]
    return subprocess.run(
        words, env=environment(folder), check=True, cwd=folder, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
