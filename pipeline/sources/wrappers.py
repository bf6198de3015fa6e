"""Wrappers around a line of a log: terminal colours, and the prefixes of container tools.

A wrapper is taken off before the formats look at a line. Wrappers nest in the order of `WRAPPERS`: Compose
may hold lines with a time of Docker. The raw column stays as it was read."""

from datetime import UTC, datetime
from typing import Final

import polars as pl

from pipeline.records.schema import UTC_US
from pipeline.sources import formats_json as pairs
from pipeline.sources.formats_text import CRI
from pipeline.sources.times import ISO_CLOCK, read_times, to_utc

WRAPPERS: Final = ("compose", "kubectl", "docker", "cri", "stamped", "envelope")
OWNED: Final = ("compose", "kubectl")  # several services write into one stream, each line under its name
STAMPING: Final = ("docker", "cri", "stamped")  # wrappers with a time, which wins over the inner one

_SOME_DAY: Final = datetime(2000, 1, 1, tzinfo=UTC)  # for a detection, which needs no times
_ESCAPE: Final = r"\x1b\["
_COLOURS: Final = r"\x1b\[[0-9;:?]*[A-Za-z]"
_QUOTED_COLOURS: Final = r"\\u001[bB]\[[0-9;:?]*[A-Za-z]"  # within JSON

# `docker compose logs`: `web-1  | text`; `docker service logs`; PM2: `0|web  | text`.
_COMPOSE: Final = r"(?:[0-9]{1,4}\|)?(?P<service>[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}) +\|(?: |$)"
_KUBECTL: Final = r"\[pod/(?P<host>[^/\] \n]+)/(?P<service>[^\] \n]+)\](?: |$)"  # `kubectl logs --prefix`
# `kubectl logs --timestamps`, `docker logs --timestamps`: nanoseconds, which programs hardly ever write
_STAMP: Final = (
    r"(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})\.(?P<fraction>[0-9]{7,9})"
    r"(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})(?: |$)"
)
PREFIXES: Final = {"compose": _COMPOSE, "kubectl": _KUBECTL, "stamped": _STAMP}
# Compose numbers its containers, so such a name is no column of a table.
_NUMBERED: Final = r"^(?:[0-9]+\||[^ |]+(?:[-_]|\.)[0-9]+)"

# One CRI line: a full one loses its prefix, a partial one also its line end.
_CRI_PREFIX: Final = (
    r"(?m)^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|[+-][0-9]{2}:[0-9]{2}) (?:stdout|stderr) "
    r"(?:F(?: |$)|P ?([^\n]*)(?:\n|\z))"
)


def uncoloured(raw: pl.Series) -> pl.Series:
    """The texts without terminal colours; the same series when it has none."""
    return raw.str.replace_all(_COLOURS, "") if raw.str.contains(_ESCAPE).any() else raw


def recognised(raw: pl.Series, name: str) -> pl.Series:
    """True for lines with this wrapper."""
    if name == "docker":
        return raw.str.contains(pairs.DOCKER_LINE)
    if name == "cri":
        return raw.str.contains("(?s)" + CRI.pattern)
    if name == "envelope":
        return raw.str.contains(pairs.ENVELOPE_LINE) & raw.str.contains(pairs.ENVELOPE_MARK)
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
    inner = uncoloured(raw)
    for name in WRAPPERS:
        if name not in formats or name == "envelope":  # a line of an envelope is a record, whatever is inside
            continue
        if name == "cri":
            inner = inner.str.replace(CRI.head, "")
        elif name == "docker":
            text = inner.str.extract(pairs.DOCKER_HEAD)
            text = (
                text.str.replace_all(_QUOTED_COLOURS, "")
                .str.replace_all(r"\\t", "\t")
                .str.replace_all(r"\\[nr]", "")
                .str.replace_all(r'\\(["\\])', "$1")
            )
            inner = text.zip_with(text.is_not_null(), inner)
        else:
            inner = inner.str.replace("^" + PREFIXES[name], "")
    return inner


def envelope_lines(raw: pl.Series) -> pl.Series:
    """The first line of the text inside each envelope."""
    inner = pairs.unwrap_envelope(raw, arrived=_SOME_DAY, zone="UTC")["inner"].drop_nulls()
    return inner.str.split("\n").list.first()


def unwrap(raw: pl.Series, name: str, *, arrived: datetime, zone: str = "UTC") -> pl.DataFrame:
    """`inner` text (null for other records), `timestamp`, `host` and `service` of records in a wrapper.

    The three may be null; an envelope has `level` and `process` too. Every line of a record loses its
    prefix."""
    if name == "envelope":
        return pairs.unwrap_envelope(raw, arrived=arrived, zone=zone)
    blank = pl.Series([None], dtype=pl.String).new_from_index(0, raw.len())
    columns = {"host": blank, "service": blank}
    if name == "docker":
        wrapped = pairs.unwrap_docker(raw)
        inner = uncoloured(wrapped["inner"])
        time = read_times(wrapped["time"], arrived=arrived, zone="UTC")
    elif name == "cri":
        parts = raw.str.extract_groups(CRI.head).struct.unnest()
        time = to_utc(parts, ISO_CLOCK, arrived=arrived, zone="UTC")
        inner = raw.str.replace_all(_CRI_PREFIX, "${1}").set(parts["time"].is_null(), None)
    else:
        pattern = PREFIXES[name]
        parts = raw.str.extract_groups("^" + pattern).struct.unnest()
        inner = raw.str.replace_all("(?m)^" + pattern, "").set(parts.to_series(0).is_null(), None)
        time = blank.cast(UTC_US)
        if "time" in parts.columns:
            time = to_utc(parts, ISO_CLOCK, arrived=arrived, zone="UTC")
        columns |= {column: parts[column] for column in columns if column in parts.columns}
    return pl.DataFrame({"inner": inner, "timestamp": time, **columns})
