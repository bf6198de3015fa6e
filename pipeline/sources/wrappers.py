"""Wrappers around a line of a log: terminal colours, and the prefixes of container tools.

A wrapper is taken off before the formats look at a line. Wrappers nest in the order of `WRAPPERS`: Compose
may hold lines with a time of Docker. The raw column stays as it was read."""

from datetime import UTC, datetime
from typing import Final

import msgspec
import polars as pl

from pipeline.records.declared import ISO_CLOCK
from pipeline.records.schema import UTC_US
from pipeline.sources import formats_json as pairs
from pipeline.sources.formats_text import CRI
from pipeline.sources.times import read_times, to_utc

WRAPPERS: Final = ("compose", "kubectl", "docker", "cri", "stamped", "counted", "envelope")
OWNED: Final = ("compose", "kubectl")  # several services write into one stream, each line under its name

_SOME_DAY: Final = datetime(2000, 1, 1, tzinfo=UTC)  # for a detection, which needs no times
_ESCAPE: Final = r"\x1b\["

# `docker compose logs`: `web-1  | text`; `docker service logs`; PM2: `0|web  | text`.
_COMPOSE: Final = r"(?:[0-9]{1,4}\|)?(?P<service>[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}) +\|(?: |$)"
_KUBECTL: Final = r"\[pod/(?P<host>[^/\] \n]+)/(?P<service>[^\] \n]+)\](?: |$)"  # `kubectl logs --prefix`
# `kubectl logs --timestamps`, `docker logs --timestamps`: nanoseconds, which programs hardly ever write
_STAMP: Final = (
    r"(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})\.(?P<fraction>[0-9]{7,9})"
    r"(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})(?: |$)"
)
_COUNTED: Final = (
    r"[0-9]{2,6} (?P<rest><[0-9]{1,3}>)"  # syslog over TCP: the length of each message (RFC 6587)
)
PREFIXES: Final = {"compose": _COMPOSE, "kubectl": _KUBECTL, "stamped": _STAMP, "counted": _COUNTED}
# Compose numbers its containers, so such a name is no column of a table.
_NUMBERED: Final = r"^(?:[0-9]+\||[^ |]+(?:[-_]|\.)[0-9]+)"

_DOCKER_HEAD: Final = r'^\{"log":"((?:[^"\\]|\\.)*)"'
_DOCKER_LINE: Final = (
    r'^\{"log":(?P<log>"(?:[^"\\]|\\.)*"),"stream":"(?:stdout|stderr)"(?:,"attrs":\{.*\})?'
    r',"time":"(?P<time>[^"]+)"\}\s*$'
)
# One CRI line: a full one loses its prefix, a partial one also its line end.
_CRI_PREFIX: Final = (
    r"(?m)^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|[+-][0-9]{2}:[0-9]{2}) (?:stdout|stderr) "
    r"(?:F(?: |$)|P ?([^\n]*)(?:\n|\z))"
)


def uncoloured(raw: pl.Series) -> pl.Series:
    """The texts without terminal colours; the same series when it has none."""
    return raw.str.replace_all(pairs.COLOURS, "") if raw.str.contains(_ESCAPE).any() else raw


def recognised(raw: pl.Series, name: str) -> pl.Series:
    """True for lines with this wrapper."""
    if name == "docker":
        return raw.str.contains(_DOCKER_LINE)
    if name == "cri":
        return raw.str.contains("(?s)" + CRI.pattern)
    if name == "envelope":
        return pairs.hold_lines(raw)
    return raw.str.contains("^" + PREFIXES[name])


def is_claimed(lines: pl.Series, name: str, share: float, inside: float) -> bool:
    """Whether a sample's lines with this prefix really have a wrapper.

    `share`: of such lines in the sample; `inside`: of those with a known format behind the prefix. A table
    with bars looks like Compose, and a plain time in nanoseconds like Docker's."""
    if name == "compose":
        numbered = lines.str.contains(_NUMBERED).mean()
        return share >= 0.5 and (inside >= 0.5 or (isinstance(numbered, float) and numbered >= 0.5))
    return name != "stamped" or inside >= 0.5


def owners(raw: pl.Series, name: str) -> pl.Series:
    """The prefix of each line in a wrapper of `OWNED`; null for lines without one."""
    return uncoloured(raw).str.extract(f"^({PREFIXES[name]})").str.strip_chars_end()


def inner_lines(raw: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """Physical lines without colours and wrappers, exact enough for `formats.head_mask`."""
    return behind_prefixes(uncoloured(raw), formats)


def behind_prefixes(inner: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """Physical lines that have no colours, without their wrappers."""
    for name in WRAPPERS:
        if name not in formats or name == "envelope":  # a line of an envelope is a record, whatever is inside
            continue
        if name == "cri":
            inner = inner.str.replace(CRI.head, "")
        elif name == "docker":
            text = inner.str.extract(_DOCKER_HEAD)
            text = (
                text.str.replace_all(pairs.QUOTED_COLOURS, "")
                .str.replace_all(r"\\t", "\t")
                .str.replace_all(r"\\[nr]", "")
                .str.replace_all(r'\\(["\\])', "$1")
            )
            inner = text.zip_with(text.is_not_null(), inner)
        else:
            inner = inner.str.replace("^" + PREFIXES[name], "${rest}")
    return inner


def envelope_lines(raw: pl.Series) -> pl.Series:
    """The first line of the text inside each envelope."""
    found = pairs.parse_envelopes(raw, arrived=_SOME_DAY, zone="UTC", with_times=False)
    inner = found["inner"].drop_nulls()
    return inner.str.split("\n").list.first()


def unwrap(
    raw: pl.Series, name: str, *, arrived: datetime, zone: str = "UTC", with_times: bool = True
) -> pl.DataFrame:
    """`inner` text (null for other records), `timestamp`, `host` and `service` of records in a wrapper.

    The three may be null; an envelope has `level` and `process` too. Every line of a record loses its
    prefix. `with_times`: whether the caller reads times; an envelope's `timestamp` is null otherwise."""
    if name == "envelope":
        return pairs.parse_envelopes(raw, arrived=arrived, zone=zone, with_times=with_times)
    blank = pl.Series([None], dtype=pl.String).new_from_index(0, raw.len())
    columns = {"host": blank, "service": blank}
    if name == "docker":
        inner, times = _unwrap_docker(raw)
        inner = uncoloured(inner)
        time = read_times(times, arrived=arrived, zone="UTC")
    elif name == "cri":
        parts = raw.str.extract_groups(CRI.head).struct.unnest()
        time = to_utc(parts, ISO_CLOCK, arrived=arrived, zone="UTC")
        inner = raw.str.replace_all(_CRI_PREFIX, "${1}").set(parts["time"].is_null(), None)
    else:
        pattern = PREFIXES[name]
        parts = raw.str.extract_groups("^" + pattern).struct.unnest()
        inner = raw.str.replace_all("(?m)^" + pattern, "${rest}").set(parts.to_series(0).is_null(), None)
        time = blank.cast(UTC_US)
        if "time" in parts.columns:
            time = to_utc(parts, ISO_CLOCK, arrived=arrived, zone="UTC")
        columns |= {column: parts[column] for column in columns if column in parts.columns}
    return pl.DataFrame({"inner": inner, "timestamp": time, **columns})


class _DockerLine(msgspec.Struct, gc=False):
    """A line of Docker's json-file."""

    log: str
    time: str


_DOCKER_LINES: Final = msgspec.json.Decoder(_DockerLine)


def _unwrap_docker(raw: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The inner text (null for other rows) and the time of Docker's records.

    The lines of a record are joined without a separator: Docker ends each with a newline, unless it cut a
    long line. One line of another kind makes the whole record an ordinary one."""
    inner: list[str | None] = []
    times: list[str | None] = []
    are_lines = raw.str.contains("(?m)" + _DOCKER_LINE).to_list()
    for text, is_line in zip(raw.to_list(), are_lines, strict=True):
        try:
            lines = _DOCKER_LINES.decode_lines(text) if is_line else []
        except (ValueError, RecursionError):
            lines = []
        inner.append("".join(line.log for line in lines).removesuffix("\n") if lines else None)
        times.append(lines[0].time if lines else None)
    return pl.Series(inner, dtype=pl.String), pl.Series(times, dtype=pl.String)
