"""`logweir gpu top`: every device with its leases below it, and who waits and why. Live in a terminal."""

import argparse
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import cell, out, print_json, printable
from pipeline.errors import BadInput, RedisUnavailable
from pipeline.gpu.policy.explain import short, shorten
from pipeline.units import listed, plural, seconds, size, span
from pipeline.upkeep import UpkeepThread

DRAW_S: Final = 1.0  # Longest pause between two drawings, so that the age of a picture is seen to grow.
SILENT_S: Final = 2.0  # A picture overdue for so long is called old.
WIDE: Final = 110  # Columns of a terminal with room for names and temperatures.
EMPTY: Final = (
    "no GPUs in the pool; `logweir up` on a machine with NVIDIA GPUs adds them (LOGWEIR_GPU_AGENT=yes), and "
    "without any everything runs on the CPU"
)


def main(args: argparse.Namespace, look: Callable[[], Mapping[str, Any]]) -> int:
    """Show the pool; `look` may raise RedisUnavailable."""
    interval = span(args.interval)
    if interval is None or not 0 < interval.total_seconds() <= 3600:
        raise BadInput(f"--interval {args.interval!r} is not a span up to an hour; write 1s or 2m")
    if args.json:
        print_json(look())
        return 0
    console = out()
    if args.once or not (console.is_terminal and sys.stdin is not None and sys.stdin.isatty()):
        console.print(picture(look(), console.width, why=args.why))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _watch(console, look, interval.total_seconds(), why=args.why)
    return 0


def _watch(
    console: Console, look: Callable[[], Mapping[str, Any]], interval_s: float, *, why: bool = False
) -> None:
    """Until q or Ctrl-C. While Redis is away or hangs, the last picture stays, with a note."""
    with _Refresher(look, interval_s) as refresher, _keys() as pressed, Live(
        console=console, screen=True, auto_refresh=False
    ) as live:  # fmt: skip
        while True:
            live.update(_page(refresher.shown, refresher.silent_s(), console, why=why), refresh=True)
            if pressed(min(interval_s, DRAW_S)) == "q":
                return


class _Refresher:
    """Reads the pool in a thread of its own, once per interval: a hung Redis answers after its time-out
    only."""

    def __init__(self, look: Callable[[], Mapping[str, Any]], interval_s: float) -> None:
        """Look once, here. Raises RedisUnavailable."""
        self.look, self.interval_s = look, interval_s
        self.shown = look()
        self.failed: BaseException | None = None
        self._next = time.monotonic() + interval_s
        self._end = threading.Event()
        self._thread = UpkeepThread("gpu-top", self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # not joined: it may hang in Redis, and changes nothing

    def silent_s(self) -> float:
        """Seconds that the next picture is overdue. Raises the error of the thread, unless it was Redis."""
        if self.failed is not None:
            raise self.failed
        return time.monotonic() - self._next

    def _run(self) -> None:
        try:
            while not self._end.wait(max(0.0, self._next - time.monotonic())):
                try:
                    self.shown = self.look()
                except RedisUnavailable:
                    self._end.wait(min(self.interval_s, DRAW_S))
                else:
                    self._next = time.monotonic() + self.interval_s
        except Exception as exc:  # noqa: BLE001 - raised again where the picture is drawn
            self.failed = exc


def _page(shown: Mapping[str, Any], silent_s: float, console: Console, *, why: bool) -> RenderableType:
    height = console.height - (len(shown["packing"]["forms"]) + 3 if why else 0)
    parts: list[RenderableType] = [
        picture(cropped(shown, height), console.width, why=why),
        Text("\nq ends", style="dim"),
    ]
    if silent_s > SILENT_S:
        words = f"no answer from Redis for {seconds(silent_s)}; this is how it was before"
        parts.insert(0, Text(words, style="red"))
    return Group(*parts)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Single keys from the terminal, without Enter; the terminal gets its mode back at the end."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(wait_s: float) -> str:
        ready, _, _ = select.select([number], [], [], wait_s)
        if not ready:
            return ""
        # Past Python's buffer, of which select knows nothing. Nothing at all: the terminal has gone.
        keys = os.read(number, 1024)
        return "q" if not keys or b"q" in keys.lower() else ""

    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def picture(shown: Mapping[str, Any], width: int, *, why: bool = False) -> RenderableType:
    """The facts as one page of text for a terminal of so many columns."""
    parts: list[RenderableType] = [Text(line) for line in _headline(shown)]
    parts += [Text(printable(line), style="yellow") for line in _remarks(shown)]
    if shown["devices"]:
        parts += [Text(), _devices(shown, width)]
    if shown["waiting"]:
        parts += [Text(), _waiting(shown, width)]
    if why:
        parts += [Text(), _packing(shown["packing"])]
    if shown.get("more"):
        parts += [Text(f"\n{shown['more']} more; --once shows all", style="dim")]
    return Group(*parts)


def _packing(packing: Mapping[str, Any]) -> RenderableType:
    """The recent needs that packing looks ahead by, and the cost of the next one of each form."""
    if not packing["needs"]:
        return Text("packing: best fit; too few needs have come yet to look ahead by")
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"packing looks ahead by {plural(packing['needs'], 'recent need')}; the next one of each form:"
    )
    for name in ("share", "form", "would go to", "costs later needs"):
        table.add_column(name, overflow="fold", justify="right" if name == "share" else "left")
    for form in packing["forms"]:
        cost = "it fits nowhere now"
        if form["node"]:
            cost = (
                f"{max(0.0, form['worth']):.2f} GPU; fragments {form['fragments']:+.2f} GPU; best of "
                f"{plural(form['compared'], 'kind')} of node"
            )
        row = (f"{100 * form['share']:.0f}%", form["form"], shorten(form["node"]), cost)
        table.add_row(*map(cell, row))
    return table


def cropped(shown: Mapping[str, Any], height: int) -> dict[str, Any]:
    """The part that fits on a screen; waiting needs must not scroll away."""
    room = max(6, height - 8 - len(_remarks(shown)))
    waiting = shown["waiting"][: max(3, room // 3)]
    room -= len(waiting)
    devices: list[Mapping[str, Any]] = []
    for device in shown["devices"]:
        room -= 1 + len(device["leases"])
        if devices and room < 0:
            break
        devices.append(device)
    more = [
        plural(len(shown[name]) - len(visible), noun)
        for name, visible, noun in (("devices", devices, "GPU"), ("waiting", waiting, "waiting need"))
        if len(visible) < len(shown[name])
    ]
    return {**shown, "devices": devices, "waiting": waiting, "more": " and ".join(more)}


def _headline(shown: Mapping[str, Any]) -> list[str]:
    s = shown["summary"]
    if not s["devices"]:
        return [EMPTY]
    line = f"{plural(s['devices'], 'GPU')} on {plural(s['nodes'], 'machine')}"
    line += f", {s['usable']} usable" if s["usable"] < s["devices"] else ""
    line += f", {size(s['free_mib'])} of "
    line += f"{size(s['schedulable_mib'])} free, {plural(s['leases'], 'lease')}, {s['waiting']} waiting"
    return [line]


def _remarks(shown: Mapping[str, Any]) -> list[str]:
    """Warnings for an operator, above the tables."""
    remarks = []
    if shown["quarantine_s"] > 0:
        wait = seconds(shown["quarantine_s"])
        remarks.append(
            f"Redis was restarted and may have forgotten a lease: nothing is granted for {wait} more"
        )
    if shown["reservation"]:
        reservation = shown["reservation"]
        names = listed(map(short, reservation["devices"]))
        remarks.append(f"door closed to new leases: {names} kept for {reservation['for']}")
    for node in shown["nodes"]:
        if node["silent"]:
            silence = seconds(node["heard_s_ago"])
            remarks.append(
                f"{shorten(node['node'])} has been silent for {silence}: no new leases there; look after its "
                "agent"
            )
        if node["clock_wrong"]:
            off = node["clock_ahead_s"]
            word = "ahead of" if off > 0 else "behind"
            remarks.append(
                f"the clock of {shorten(node['node'])} is {seconds(abs(off))} {word} the one of Redis"
            )
    for orphan in shown["left"]:
        pids = ", ".join(map(str, orphan["pids"])) or "unknown"
        clear = f"`logweir gpu clear {short(orphan['device'])}`"
        how = (
            "it opens by itself"
            if orphan["opens_by_itself"]
            else f"its driver lists no processes, so say {clear}"
        )
        remarks.append(
            f"{short(orphan['device'])} keeps {size(orphan['memory_mib'])} back until the processes of lease "
            f"{orphan['lease']} "
            f"({pids}) are gone, because {orphan['why']}; {how} then"
        )
    return remarks


def _devices(shown: Mapping[str, Any], width: int) -> Table:
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, expand=False)
    place = max(len(_place(device, wide)) for device in shown["devices"])
    table.add_column("GPU, leases", overflow="fold", min_width=min(place, width // 3))
    if wide:
        table.add_column("", overflow="fold")
    table.add_column("leased GiB", justify="right", no_wrap=True)
    if wide:
        table.add_column("share", justify="right", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    if wide:
        table.add_column("°C", justify="right", no_wrap=True)
        table.add_column("MPS", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    by_id = {lease["lease"]: lease for lease in shown["leases"]}
    for device in shown["devices"]:
        table.add_row(*_device(device, wide), style=_style(device))
        for lease_id in device["leases"]:
            lease = by_id[lease_id]
            style = "yellow" if lease["yields_in_s"] is not None else None
            table.add_row(*_lease(lease, device["device"], wide), style=style)
    return table


def _style(device: Mapping[str, Any]) -> str:
    if not device["usable"]:
        return "red"
    return "bold yellow" if device["door_closed_for"] or device["state"].startswith("closed") else "bold"


def _device(device: Mapping[str, Any], wide: bool) -> list[Text]:
    leased = f"{device['leased_mib'] / 1024:.1f}/{device['total_mib'] / 1024:.1f}"
    name = shorten(device["name"].removeprefix("NVIDIA "))
    row = [_place(device, wide), *([name] if wide else [])]
    row += [leased, f"{device['leased_percent']}%"] if wide else [leased]
    row += [_gib(device["used_mib"]), _percent(device["utilisation_percent"])]
    if not wide:
        return [cell(text) for text in (*row, device["state"])]
    row.append("" if device["temperature_c"] is None else str(device["temperature_c"]))
    return [cell(text) for text in (*row, mps_words(device["mps"]), device["state"])]


def mps_words(mps: Mapping[str, Any] | None) -> str:
    """The processes under the MPS daemon of a device: `3`, `3 shared` with other devices, "" without one."""
    if mps is None:
        return ""
    count = "?" if mps["clients"] is None else str(mps["clients"])
    return count if mps["own"] else f"{count} shared"


def _place(device: Mapping[str, Any], wide: bool) -> str:
    return f"{shorten(device['node'])}:{device['index']}{'  ' if wide else ' '}{short(device['device'])}"


def _lease(lease: Mapping[str, Any], uuid: str, wide: bool) -> list[Text]:
    part = next(part for part in lease["parts"] if part["device"] == uuid)
    name, holder, tenant = (shorten(lease[key]) for key in ("lease", "holder", "tenant"))
    whose = f"{holder}, {tenant}, {lease['mode']}"
    row = [f"  {name}", whose] if wide else [f"  {name}"]
    row += [f"{part['memory_mib'] / 1024:.1f}"]
    row += [f"{part['compute_percent']}%" if part["compute_percent"] else ""] if wide else []
    row += [_gib(part["used_mib"]), ""] + (["", ""] if wide else [])
    remark = "" if wide else f"{holder}, {tenant}; "
    remark += f"{seconds(lease['age_s'])} old, "
    if lease["yields_in_s"] is not None:
        remark += f"gives back within {seconds(lease['yields_in_s'])}: {lease['yield_why']}"
    elif lease["expires_in_s"] < 0:
        remark += "expired"
    else:
        remark += f"expires in {seconds(lease['expires_in_s'])}"
    return [cell(text) for text in (*row, remark)]


def _waiting(shown: Mapping[str, Any], width: int) -> Table:
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False)
    for name in ("waiting", *(("tenant", "holder") if wide else ()), "for"):
        table.add_column(name, no_wrap=name == "for", overflow="fold")
    table.add_column("because", overflow="fold", ratio=1)
    for w in shown["waiting"]:
        who = [shorten(w[key]) for key in ("request", *(("tenant", "holder") if wide else ()))]
        row = [*who, seconds(w["waits_s"]), w["why"]]
        table.add_row(*map(cell, row))
    return table


def _gib(mib: int | None) -> str:
    return "?" if mib is None else f"{mib / 1024:.1f}"


def _percent(value: int | None) -> str:
    return "?" if value is None else f"{value}%"
