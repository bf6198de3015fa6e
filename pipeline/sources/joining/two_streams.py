"""Lines of a container runtime, which cuts long lines and mixes two streams of a container, stdout and
stderr.

The pieces of a line come directly one behind the other again, and the lines that stood between them behind
the whole line. No record has lines of both streams."""

from typing import Final

import polars as pl

TWO_STREAMS: Final = frozenset(("cri", "docker"))  # the wrappers of such lines
DOCKER_BEGIN: Final = '{"log":"'
_CRI_STREAM: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[^ ]+ (stdout|stderr) [FP](?: |$)"
_CRI_PARTIAL: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[^ ]+ (?:stdout|stderr) P(?: |$)"
_DOCKER_STREAM: Final = r'","stream":"(stdout|stderr)"'
_DOCKER_LINE_END: Final = r'\\n","stream":"'
# Lines between the pieces of a line wait for its end, up to these bounds.
_MOST_ROWS, _MOST_BYTES = 1_000, 256 << 10


class Weave:
    """Puts rows in turn. The order depends on the rows alone, not on their division into frames.

    Rows have the columns `raw`, `part`, `size`, `end` and perhaps `starts`, rows that have none before them.
    In the result `end` is 0 behind a row where rows in front of it are still to come: no reader may stop
    there."""

    def __init__(self, formats: tuple[str, ...]) -> None:
        self._formats = formats
        self._held: pl.DataFrame | None = None  # what stands behind a line that is cut
        self._front = ""  # the stream of that line, "" without one
        self._newest = 0  # the end of the last row that came in
        self._came = ""  # the stream of the last row that came in
        self._went, self._after_partial = "", False  # of the last row that went out

    def in_turn(self, frame: pl.DataFrame) -> pl.DataFrame:
        """These rows and earlier ones, without those that wait. Adds the columns `stream` and `partial`."""
        if frame.is_empty():
            return frame
        self._newest = frame["end"][-1]
        frame = self._with_streams(frame)
        partial, stream = frame["partial"], frame["stream"]
        if not self._front and not partial.any():
            return frame
        if self._held is None and stream.n_unique() == 1 and self._front in ("", stream[0]):
            self._front = stream[0] if partial[-1] else ""
            return frame
        if self._held is not None:
            frame = pl.concat([self._held, frame])
            self._held = None
        return self._ordered(frame)

    def flush(self) -> pl.DataFrame | None:
        """The rows that wait, in turn; None without any."""
        held, self._held = self._held, None
        found = None if held is None else self._ordered(held, final=True)
        self._front = ""
        return found

    def parted(self, frame: pl.DataFrame, begins: pl.Series) -> pl.Series:
        """`begins` of rows in turn, for the pieces of lines and the change of streams."""
        stream, partial = frame["stream"], frame["partial"]
        behind = partial.shift(1, fill_value=self._after_partial)
        changes = stream != stream.shift(1, fill_value=self._went)
        self._went, self._after_partial = str(stream[-1]), bool(partial[-1])
        return (begins & ~behind) | changes

    def reset(self) -> None:
        """The next row has none before it."""
        self._went, self._after_partial = "", False

    def _with_streams(self, frame: pl.DataFrame) -> pl.DataFrame:
        raw = frame["raw"]
        stream = pl.Series([None], dtype=pl.String).new_from_index(0, raw.len())
        partial = pl.repeat(False, raw.len(), dtype=pl.Boolean, eager=True)
        if "cri" in self._formats:
            stream = raw.str.extract(_CRI_STREAM)
            partial = raw.str.contains(_CRI_PARTIAL)
        if "docker" in self._formats:
            stream = stream.zip_with(stream.is_not_null(), raw.str.extract(_DOCKER_STREAM))
            partial |= raw.str.starts_with(DOCKER_BEGIN) & ~raw.str.contains(_DOCKER_LINE_END)
        # A line without a wrapper, and the next piece of a long line, belong to the line before.
        stream = stream.fill_null(strategy="forward").fill_null(self._came)
        self._came = str(stream[-1])
        return frame.with_columns(stream.alias("stream"), partial.alias("partial"))

    def _ordered(self, frame: pl.DataFrame, *, final: bool = False) -> pl.DataFrame:
        """Rows in turn; those behind a line that is still cut are held."""
        starts = frame["starts"].to_list() if "starts" in frame.columns else [False] * frame.height
        turn = _Turn(self._front)
        for row, (stream, partial, size, begins) in enumerate(
            zip(frame["stream"], frame["partial"], frame["size"], starts, strict=True)
        ):
            if begins:
                turn.release(row - 1)
            turn.add(row, stream, size, partial=partial)
        if final:
            turn.release(frame.height)
        self._front = turn.front
        waiting = sorted(row for group in turn.waiting for row in group)
        self._held = frame[waiting] if waiting else None
        rows = [row for row, _ in turn.rows]
        ends = [*frame["end"], self._newest]
        ordered = [0 if last is None else ends[last] for _, last in turn.rows]
        return frame[rows].with_columns(pl.Series("end", ordered, dtype=pl.Int64))


class _Turn:
    """The numbers of rows in turn, each with the last row that nothing is missing before, else None."""

    def __init__(self, front: str) -> None:
        self.front = front
        self.rows: list[tuple[int, int | None]] = []
        self.waiting: list[list[int]] = []  # lines behind the one that is cut, each with its pieces
        self._streams: list[str] = []  # of these lines
        self._open: dict[str, list[int]] = {}
        self._size = self._count = 0

    def add(self, row: int, stream: str, size: int, *, partial: bool) -> None:
        if self.front in ("", stream):
            self._go(row)
            self.front = stream if partial else ""
            if not partial:
                self._next_lines(row)
            return
        line = self._open.get(stream)
        if line is None:
            line = []
            self.waiting.append(line)
            self._streams.append(stream)
        line.append(row)
        if partial:
            self._open[stream] = line
        else:
            self._open.pop(stream, None)
        self._size += size
        self._count += 1
        if self._count > _MOST_ROWS or self._size > _MOST_BYTES:
            self.release(row)

    def release(self, last: int) -> None:
        """Lets all rows go, though pieces are missing. `last`: the newest of them."""
        self.front = ""
        self._open.clear()
        self._next_lines(last)

    def _next_lines(self, last: int) -> None:
        while self.waiting and not self.front:
            stream, line = self._streams.pop(0), self.waiting.pop(0)
            if self._open.get(stream) is line:
                del self._open[stream]
                self.front = stream
            rest = len(self.waiting)
            for number, row in enumerate(line, start=1):
                self.rows.append((row, last if not rest and number == len(line) else None))
        if not self.waiting:
            self._size = self._count = 0

    def _go(self, row: int) -> None:
        self.rows.append((row, None if self.waiting else row))
