"""Records of key-value pairs: JSON lines and logfmt; and the JSON around Docker's lines.

Both become one long table (row, pos, key, value), which `_assemble` turns into columns. Well-known keys fill
the header columns. The message key begins the message, and every other pair follows as `key=value`, so the
model sees all pairs. Nested objects are flattened to dotted keys."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.sources.formats_text import LEVEL_WORDS
from pipeline.sources.times import read_times

JSON_HEAD: Final = r'^\{\s*"[^"]+"\s*:'
JSON_LINE: Final = r'(?s)^\s*\{\s*"[^"]+"\s*:.*\}\s*$'
_PAIR: Final = r'[A-Za-z_@][A-Za-z0-9_.@/-]*=(?:"(?:[^"\\]|\\.)*"|[^ "]*)'
LOGFMT_LINE: Final = rf"(?s)^{_PAIR}(?: +{_PAIR})+\s*$"
# key=value text is logfmt only with one of these keys
LOGFMT_MARK: Final = r"(?:^| )(?:msg|message|level|lvl|severity)="
DOCKER_HEAD: Final = r'^\{"log":"((?:[^"\\]|\\.)*)"'
DOCKER_LINE: Final = (
    r'^\{"log":(?P<log>"(?:[^"\\]|\\.)*"),"stream":"(?:stdout|stderr)"(?:,"attrs":\{.*\})?'
    r',"time":"(?P<time>[^"]+)"\}\s*$'
)

_MAX_KEYS: Final = 200  # rows with more distinct keys are read one by one
_MAX_DEPTH: Final = 8  # deeper objects stay compact JSON

# Keys by role, the likeliest first. The first readable key fills the column; the others stay in the message.
_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "message": (
        "message", "msg", "@message", "@m", "MESSAGE", "short_message", "log", "event", "text", "body",
    ),
    "level": (
        "level", "severity", "lvl", "levelname", "severityText", "severity_text", "log.level", "log_level",
        "loglevel", "LEVEL", "@l", "s",
    ),
    "time": (
        "time", "ts", "timestamp", "@timestamp", "datetime", "date", "asctime", "eventTime", "timeUnixNano",
        "@t", "t.$date", "t",
    ),
    "service": (
        "service", "service.name", "serviceName", "app", "application", "component", "logger", "logger_name",
        "loggerName", "name", "c",
    ),
    "host": ("host", "hostname", "host.name", "source_host", "HOSTNAME"),
    "process": ("pid", "process", "process.pid", "thread", "thread_name", "threadName", "ctx"),
}  # fmt: skip
_ALIASES: Final = {key: (role, place) for role, keys in _ROLES.items() for place, key in enumerate(keys)}

# Bunyan and pino count in tens, GELF and journald use the syslog numbers.
_LEVELS: Final = {
    **LEVEL_WORDS,
    "10": "trace", "20": "debug", "30": "info", "40": "warning", "50": "error", "60": "fatal",
    "0": "fatal", "1": "critical", "2": "critical", "3": "error", "4": "warning", "5": "notice", "6": "info",
    "7": "debug",
}  # fmt: skip

_LONG: Final = {"row": pl.UInt32, "pos": pl.UInt32, "key": pl.String, "value": pl.String}


def parse_json(raw: pl.Series, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows that are JSON objects; message is null in the others."""
    rows = pl.DataFrame({"raw": raw}).with_row_index("row")
    rows = rows.filter(pl.col("raw").str.contains(JSON_LINE))
    # A bracket may open a nested value, which columns of text cannot hold. Escaped quotes hide keys, and \\u
    # may be half a character.
    simple = pl.col("raw").str.contains(r"^\s*\{[^\[{]*\}\s*$")
    flat = simple & ~pl.col("raw").str.contains(r'\\["\\u]')
    easy, hard = rows.filter(flat), rows.filter(~flat)
    pairs = pl.concat([_flat_pairs(easy), _python_pairs(hard)]).sort("row", "key", maintain_order=True)
    pairs = pairs.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("pos"))
    return _assemble(pairs, raw.len(), arrived=arrived, zone=zone)


def parse_logfmt(raw: pl.Series, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows that are logfmt; message is null in the others."""
    rows = pl.DataFrame({"raw": raw}).with_row_index("row")
    rows = rows.filter(pl.col("raw").str.contains(LOGFMT_LINE) & pl.col("raw").str.contains(LOGFMT_MARK))
    pairs = (
        rows.select("row", pl.col("raw").str.extract_all(_PAIR).alias("pair"))
        .explode("pair", keep_nulls=False, empty_as_null=False)
        .with_columns(
            pl.col("pair").str.extract_groups(r'(?s)^(?P<key>[^=]+)=(?:"(?P<quoted>.*)"|(?P<bare>.*))$')
        )
        .unnest("pair")
        .select(
            "row",
            pl.int_range(pl.len(), dtype=pl.UInt32).alias("pos"),
            "key",
            pl.coalesce(
                pl.col("quoted")
                .str.replace_all(r'\\(["\\])', "$1")
                .str.replace_all(r"\n", "\n", literal=True),
                "bare",
            ).alias("value"),
        )
    )
    return _assemble(pairs, raw.len(), arrived=arrived, zone=zone)


def unwrap_docker(raw: pl.Series) -> pl.DataFrame:
    """`inner` (null for other rows) and `time` text of Docker json-file records.

    The inner lines of a record are joined without a separator: Docker ends each with a newline, unless it cut
    a long line."""
    rows = pl.DataFrame({"raw": raw}).with_row_index("row")
    lines = rows.with_columns(pl.col("raw").str.split("\n")).explode(
        "raw", keep_nulls=False, empty_as_null=False
    )
    lines = lines.with_columns(pl.col("raw").str.extract_groups(DOCKER_LINE)).unnest("raw")
    lines = lines.with_columns(_unquote(lines["log"]))
    # one line of another kind makes the whole record an ordinary one
    joined = lines.group_by("row", maintain_order=True).agg(
        pl.when(pl.col("log").is_null().any())
        .then(None)
        .otherwise(pl.col("log").str.join(""))
        .first()
        .alias("inner"),
        pl.col("time").first(),
    )
    return (
        rows.select("row")
        .join(joined, on="row", how="left", maintain_order="left")
        .select(pl.col("inner").str.strip_suffix("\n"), "time")
    )


def _unquote(quoted: pl.Series) -> pl.Series:
    """JSON string literals to text; null for invalid ones."""
    try:
        return quoted.str.json_decode(pl.String).alias("log")
    except pl.exceptions.PolarsError:
        return pl.Series("log", [None if q is None else _load(q) for q in quoted.to_list()], dtype=pl.String)


def _flat_pairs(rows: pl.DataFrame) -> pl.DataFrame:
    """Pairs of objects without nested values and escapes, decoded as columns."""
    if rows.is_empty():
        return pl.DataFrame(schema=_LONG)
    keys = rows.select(
        pl.col("raw")
        .str.extract_all(r'"[^"]*"\s*:')
        .list.explode()
        .str.extract(r'^"([^"]*)"')
        .unique()
        .drop_nulls()
    )["raw"]
    if keys.len() > _MAX_KEYS or keys.str.contains("\\", literal=True).any():
        return _python_pairs(rows)
    shape = pl.Struct(dict.fromkeys(sorted(keys.to_list()), pl.String()))
    try:
        decoded = rows["raw"].str.json_decode(shape)
    except pl.exceptions.PolarsError:  # one bad row fails the column: decode the loadable rows
        good = pl.Series([isinstance(_load(text), dict) for text in rows["raw"].to_list()], dtype=pl.Boolean)
        if good.all() or not good.any():
            return _python_pairs(rows)
        return _flat_pairs(rows.filter(good))
    wide = decoded.struct.unnest().select(pl.all().name.prefix("k:")).with_columns(rows["row"])
    return (
        wide.unpivot(index="row", variable_name="key", value_name="value")
        .filter(pl.col("value").is_not_null())
        .select(
            "row",
            pl.lit(0, dtype=pl.UInt32).alias("pos"),
            pl.col("key").cast(pl.String).str.strip_prefix("k:"),
            "value",
        )
    )


def _python_pairs(rows: pl.DataFrame) -> pl.DataFrame:
    """Pairs of any objects, one row at a time; other rows give no pairs."""
    row_of: list[int] = []
    keys: list[str] = []
    values: list[str] = []
    for row, text in rows.select("row", "raw").iter_rows():
        loaded = _load(text)
        if not isinstance(loaded, dict):
            continue
        for key, value in _flatten(loaded, "", 0):
            row_of.append(row)
            keys.append(key)
            values.append(value)
    columns = {"row": row_of, "pos": [0] * len(row_of), "key": keys, "value": values}
    return pl.DataFrame(columns, schema=_LONG)


def _load(text: str) -> Any:
    try:
        loaded = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:  # a lone surrogate is valid JSON but no text
            json.dumps(loaded, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return loaded


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _flatten(value: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if item is None:
            continue
        if isinstance(item, dict) and item and depth < _MAX_DEPTH:
            yield from _flatten(item, f"{prefix}{key}.", depth + 1)
        elif isinstance(item, str):
            yield prefix + key, item
        else:
            yield prefix + key, json.dumps(item, ensure_ascii=False, separators=(",", ":"))


def _assemble(pairs: pl.DataFrame, n: int, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """n rows of header columns and message; rows without pairs stay null."""
    out = pl.DataFrame({"row": pl.int_range(n, dtype=pl.UInt32, eager=True)})
    role = {key: role for key, (role, _) in _ALIASES.items()}
    place = {key: place for key, (_, place) in _ALIASES.items()}
    named = pairs.filter(pl.col("key").is_in(list(_ALIASES))).with_columns(
        pl.col("key").replace_strict(role, return_dtype=pl.String).alias("role"),
        pl.col("key").replace_strict(place, return_dtype=pl.Int32).alias("place"),
    )
    used: list[pl.Series] = []
    for name in _ROLES:
        column = "timestamp" if name == "time" else name
        candidates = named.filter(pl.col("role") == name)
        value = candidates["value"]
        if name == "level":
            words = value.str.to_lowercase().str.strip_chars()
            value = words.replace_strict(_LEVELS, default=None, return_dtype=pl.String)
        elif name == "time":
            value = read_times(value, arrived=arrived, zone=zone)
        candidates = candidates.with_columns(value.alias(column)).filter(pl.col(column).is_not_null())
        best = candidates.sort("row", "place", maintain_order=True).unique(
            "row", keep="first", maintain_order=True
        )
        used.append(best["pos"])
        out = out.join(best.select("row", column), on="row", how="left", maintain_order="left")
    extra = (
        pairs.join(pl.DataFrame({"pos": pl.concat(used)}), on="pos", how="anti", maintain_order="left")
        .with_columns(pl.format("{}={}", "key", "value").alias("extra"))
        .group_by("row", maintain_order=True)
        .agg(pl.col("extra").str.join(" "))
    )
    out = out.join(extra, on="row", how="left", maintain_order="left")
    present = pl.col("row").is_in(pairs["row"].unique().implode())
    return out.select(
        "timestamp",
        "level",
        "host",
        "process",
        "service",
        pl.when(present)
        .then(pl.concat_str("message", "extra", separator=" ", ignore_nulls=True))
        .alias("message"),
    )
