"""Loaded by every Python process with this folder in PYTHONPATH: samples what its main thread does.

Every `PERIOD_S` of wall time the stack of the main thread is counted when the process has used processor time
since the last look. The counts are written to `$SAMPLES_FOLDER/<pid>.folded` now and then, one stack a line,
as flame graph tools read them."""

import atexit
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

PERIOD_S = 0.005
WRITE_EVERY = 400  # looks
BUSY_SHARE = 0.2  # of a period: less is a look at a process that waits
DEPTH = 80
PACKAGES = ("polars", "redis", "celery", "kombu", "torch", "pipeline")
NAMES = {}  # of code objects


def start() -> None:
    folder = os.environ.get("SAMPLES_FOLDER")
    if folder is None:
        return
    counts: Counter[str] = Counter()
    threading.Thread(target=look, args=(Path(folder), counts), daemon=True, name="sampler").start()
    atexit.register(write, Path(folder), counts)


def look(folder: Path, counts: "Counter[str]") -> None:
    main, last, looks = threading.main_thread().ident, time.process_time(), 0
    while True:
        time.sleep(PERIOD_S)
        now = time.process_time()
        busy, last = now - last, now
        frame = sys._current_frames().get(main)
        if busy >= PERIOD_S * BUSY_SHARE and frame is not None:
            counts[stack(frame)] += 1
        looks += 1
        if looks % WRITE_EVERY == 0:
            write(folder, counts)


def stack(frame) -> str:
    names = []
    while frame is not None and len(names) < DEPTH:
        names.append(named(frame.f_code))
        frame = frame.f_back
    return ";".join(reversed(names))


def named(code) -> str:
    """package/module.function; the package tells whose work it is."""
    known = NAMES.get(code)
    if known is None:
        path = Path(code.co_filename)
        package = next((p for p in PACKAGES if p in path.parts), "other")
        known = NAMES[code] = f"{package}/{path.stem}.{code.co_qualname}".replace(";", ",").replace(" ", "_")
    return known


def write(folder: Path, counts: "Counter[str]") -> None:
    name = sys.argv[-1].replace("/", "_") if len(sys.argv) > 1 else "python"
    text = "".join(f"{stack} {count}\n" for stack, count in list(counts.items()))
    part = folder / f".{os.getpid()}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / f"{name}-{os.getpid()}.folded")


start()
os.register_at_fork(after_in_child=start)
