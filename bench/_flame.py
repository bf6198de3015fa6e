"""Flame graphs of processes that ran with bench/_sampled in their PYTHONPATH: one SVG for each role.

Width is processor time, depth the stack (Gregg, The Flame Graph, ACM Queue 14(2), 2016). What waits is not in
it."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

SAMPLER: Final = Path(__file__).parent / "_sampled"
_WIDTH: Final = 1200
_ROW: Final = 17
_LEAST: Final = 0.002  # of the whole; narrower frames are left out
_CHARS: Final = 6.6  # width of one
_OTHER: Final = "#d5d8dc"
_COLOURS: Final = {"pipeline": "#e8a33d", "polars": "#7aa6d6"} | dict.fromkeys(
    ("redis", "celery", "kombu"), "#d98880"
)


@dataclass(slots=True)
class _Frame:
    count: int = 0
    inside: "dict[str, _Frame]" = field(default_factory=lambda: defaultdict(_Frame))


def environment(folder: Path) -> dict[str, str]:
    """For processes whose stacks are to be counted in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"SAMPLES_FOLDER": str(folder), "PYTHONPATH": f"{SAMPLER}:{SAMPLER.parents[1]}"}


def frame_of(function: Callable[..., object]) -> str:
    """The frame of a function as bench/_sampled writes it; functions within it begin with the same name."""
    code = function.__code__
    return f"pipeline/{Path(code.co_filename).stem}.{code.co_qualname}"


def draw(folder: Path, role: str, root: str, to: Path) -> int:
    """The flame graph of the processes whose last argument is `role`, from the frame `root` on; samples in
    it. Raises RuntimeError for no sample: a picture without stacks says nothing."""
    stacks: Counter[str] = Counter()
    for path in folder.glob(f"{role}-*.folded"):
        for line in path.read_text(encoding="utf-8").splitlines():
            stack, _, samples = line.rpartition(" ")
            _, found, below = stack.partition(root)
            if found:
                stacks[root + below] += int(samples)
    if not stacks:
        raise RuntimeError(
            f"no sample of a process {role!r} holds the frame {root!r}; correct one of the names"
        )
    top = _Frame()
    for stack, count in stacks.items():
        frame = top
        frame.count += count
        for name in stack.split(";"):
            frame = frame.inside[name]
            frame.count += count
    depth = _depth(top, top.count)
    height = (depth + 2) * _ROW
    boxes = "".join(_boxes(top, top.count, 0.0, 0, height))
    head = escape(
        f"{role}: {top.count:,} samples at work; orange ours, blue Polars, red Redis and Celery, grey others"
    )
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="monospace" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="4" y="12">{head}</text>{boxes}</svg>\n',
        encoding="utf-8",
    )
    return top.count


def _depth(frame: _Frame, whole: int) -> int:
    return 1 + max((_depth(f, whole) for f in frame.inside.values() if f.count >= _LEAST * whole), default=0)


def _boxes(frame: _Frame, whole: int, left: float, level: int, height: int) -> "list[str]":
    made: list[str] = []
    for name, inner in sorted(frame.inside.items()):
        width = inner.count / whole * _WIDTH
        if inner.count >= _LEAST * whole:
            y = height - (level + 1) * _ROW
            shown = escape(name.partition("/")[2][: int(width / _CHARS)]) if width > 4 * _CHARS else ""
            told = escape(f"{name} {inner.count / whole:.1%}")
            made.append(
                f'<g><title>{told}</title><rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" '
                f'fill="{_colour(name)}"/><text x="{left + 2:.1f}" y="{y + 12}">{shown}</text></g>'
            )
            made += _boxes(inner, whole, left, level + 1, height)
        left += width
    return made


def _colour(name: str) -> str:
    return _COLOURS.get(name.partition("/")[0], _OTHER)
