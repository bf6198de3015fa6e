"""Records of key-value pairs: JSON, logfmt, Windows events as XML; and the JSON around lines of programs.

All become one long table (row, pos, key, value), which `_assemble` turns into columns. Well-known keys fill
the header columns. The message key begins the message, and every other pair follows as `key=value`, so the
model sees all pairs. Nested objects are flattened to dotted keys. A `Shape` names a program's records and
its book-keeping keys, which stay out of the message."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import unescape
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import polars as pl

from pipeline.records.columns import kinds
from pipeline.records.levels import LEVEL_WORDS
from pipeline.sources.times import read_times

JSON_HEAD: Final = r'^\{\s*"[^"]+"\s*:'
JSON_LINE: Final = r'(?s)^\s*\{\s*"[^"]+"\s*:.*\}\s*$'
_PAIR: Final = r'[A-Za-z_@][A-Za-z0-9_.@/-]*=(?:"(?:[^"\\]|\\.)*"|[^ "]*)'
LOGFMT_LINE: Final = rf"(?s)^{_PAIR}(?: +{_PAIR})+\s*$"
# key=value text is logfmt only with one of these keys
LOGFMT_MARK: Final = r"(?:^| )(?:msg|message|level|lvl|severity)="
# Firewalls of Fortinet write the date and the time as two pairs.
FORTIGATE_LINE: Final = (
    r"^(?:<[0-9]{1,3}>)?(?P<before>(?:[A-Za-z_]+=[^ ]+ ){0,8})date=(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})"
    r" time=(?P<clock>[0-9]{2}:[0-9]{2}:[0-9]{2}) (?P<others>[A-Za-z_]+=.*)$"
)
_FORTIGATE_ZONE: Final = r' tz="?([+-][0-9]{4})'
# Its keys that mean something else here, and their names in the message.
_FORTIGATE_KEYS: Final = {
    "devname": "host", "service": "dstservice", "app": "appname", "hostname": "urlhost", "name": "objname",
    "logdesc": "text",
}  # fmt: skip
DOCKER_HEAD: Final = r'^\{"log":"((?:[^"\\]|\\.)*)"'
DOCKER_LINE: Final = (
    r'^\{"log":(?P<log>"(?:[^"\\]|\\.)*"),"stream":"(?:stdout|stderr)"(?:,"attrs":\{.*\})?'
    r',"time":"(?P<time>[^"]+)"\}\s*$'
)
XML_HEAD: Final = r"^\s*<Event[\s>]"
XML_LINE: Final = r"(?s)^\s*<Event[\s>].*</Event>\s*$"

_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
HALF: Final = r"\\u[dD][89a-fA-F]"  # perhaps half a character, which no text can have
_HALF: Final = re.compile(HALF)
_MAX_KEYS: Final = 200  # rows with more distinct keys are read one by one
_MAX_DEPTH: Final = 8  # deeper objects stay compact JSON

# Keys by role, the likeliest first. The first readable key fills the column; the others stay in the message.
_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "message": (
        "message", "msg", "@message", "@m", "MESSAGE", "short_message", "log", "event", "text", "body",
        "textPayload", "jsonPayload.message", "jsonPayload.msg", "protoPayload.status.message",
        "protoPayload.methodName", "RenderedMessage", "Message", "@mt", "MessageTemplate", "Body",
        "body.stringValue", "eventName",
    ),
    "level": (
        "level", "severity", "lvl", "levelname", "severityText", "severity_text", "SeverityText", "log.level",
        "log_level", "loglevel", "LEVEL", "@l", "s", "LevelDisplayName", "Level", "error_severity",
        "PRIORITY", "jsonPayload.level", "jsonPayload.severity", "severityNumber", "SeverityNumber",
        "Event.System.Level",
    ),
    "time": (
        "time", "ts", "timestamp", "@timestamp", "datetime", "date", "asctime", "eventTime", "timeUnixNano",
        "@t", "t.$date", "t", "__REALTIME_TIMESTAMP", "TimeCreated", "TimeCreated.value", "Timestamp",
        "TimeGenerated", "observedTimeUnixNano", "instant.epochSecond",
        "Event.System.TimeCreated.SystemTime", "Event.System.TimeCreated.#attributes.SystemTime",
    ),
    "service": (
        "service", "service.name", "serviceName", "app", "application", "component", "logger", "logger_name",
        "loggerName", "name", "c", "SYSLOG_IDENTIFIER", "_COMM", "_SYSTEMD_UNIT", "_service", "_app",
        "resource.labels.service_name", "resource.labels.container_name", "resource.labels.function_name",
        "resource.labels.module_id", "resource.service.name", "resource.attributes.service.name",
        "Resource.service.name", "ResourceAttributes.service.name", "kubernetes.container_name",
        "ProviderName", "winlog.provider_name", "event.provider", "Event.System.Provider.Name",
        "Event.System.Provider.#attributes.Name", "SourceContext", "Properties.SourceContext", "eventSource",
        "backend_type", "logStreamName", "facility",
    ),
    "host": (
        "host", "hostname", "host.name", "source_host", "HOSTNAME", "_HOSTNAME", "MachineName", "Computer",
        "winlog.computer_name", "computer_name", "Event.System.Computer", "host.hostname", "agent.hostname",
        "kubernetes.host", "resource.host.name", "resource.attributes.host.name",
        "ResourceAttributes.host.name", "resource.labels.pod_name", "resource.labels.instance_id",
    ),
    "process": (
        "pid", "process", "process.pid", "thread", "thread_name", "threadName", "ctx", "_PID", "SYSLOG_PID",
        "ProcessId", "winlog.process.pid", "Event.System.Execution.ProcessID", "process_id",
        "resource.attributes.process.pid",
    ),
}  # fmt: skip
_ALIASES: Final = {key: (role, place) for role, keys in _ROLES.items() for place, key in enumerate(keys)}

# Bunyan and pino count in tens, GELF and journald use the syslog numbers.
_LEVELS: Final = {
    **LEVEL_WORDS,
    "10": "trace", "20": "debug", "30": "info", "40": "warning", "50": "error", "60": "fatal",
    "0": "fatal", "1": "critical", "2": "critical", "3": "error", "4": "warning", "5": "notice", "6": "info",
    "7": "debug",
    **{f"d{n}": "debug" for n in range(1, 6)},  # MongoDB
}  # fmt: skip
# The numbers of Windows and OpenTelemetry, by key.
_WINDOWS: Final = ("info", "critical", "error", "warning", "info", "trace")
_OTEL: Final = ("trace", "debug", "info", "warning", "error", "fatal")
_NUMBERED: Final[Mapping[str, str]] = {
    **{f"{key}:{n}": v for key in ("Level", "Event.System.Level") for n, v in enumerate(_WINDOWS)},
    **{
        f"{key}:{n}": _OTEL[(n - 1) // 4]
        for key in ("severityNumber", "SeverityNumber")
        for n in range(1, 25)
    },
}
_NUMBERED_KEYS: Final = tuple({key.partition(":")[0] for key in _NUMBERED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The records of one program, known by any key of `marks`.

    Keys that match `noise` stay out of the message. A record without level has the level `level`, or "error"
    if it has the key `error`."""

    marks: tuple[str, ...]
    noise: str
    level: str | None = None
    error: str = ""


_ECS: Final = (
    r"^(?:ecs|agent|input|cloud|container|orchestrator|host)\.|^log\.(?:offset|file\.)|^event\."
    r"(?:created|ingested|dataset|module|kind)$|^@version$|^tags$"
)
_SHAPES: Final = (
    Shape(marks=("__REALTIME_TIMESTAMP",), noise=""),  # journald; the empty pattern matches every key
    Shape(
        marks=("insertId", "logName", "receiveTimestamp", "resource.type"),  # Cloud Logging
        noise=r"^(?:insertId|logName|receiveTimestamp|trace|spanId|traceSampled|severity|"
        r"httpRequest\.latency)$"
        r"|^(?:resource|labels|sourceLocation|operation|split)\.|^(?:protoPayload|jsonPayload)\.@type$"
        r"|^protoPayload\.(?:authorizationInfo|requestMetadata|request|response|metadata)",
    ),
    Shape(
        marks=("eventVersion",),  # CloudTrail
        noise=r"^(?:eventVersion|eventID|requestID|sharedEventID|recipientAccountId|eventType|eventCategory|"
        r"managementEvent|readOnly|apiVersion|vpcEndpointId|resources)$|^(?:responseElements|tlsDetails|"
        r"additionalEventData|requestParameters)(?:$|\.)"
        r"|^userIdentity\.(?:principalId|accountId|accessKeyId|arn|sessionContext)",
        level="info",
        error="errorCode",
    ),
    Shape(
        marks=("ProviderName", "winlog.provider_name", "Event.System.EventID", "Event.System.Provider.Name"),
        noise=r"^(?!(?:Id|EventID|winlog\.event_id|Event\.System\.EventID|Event\.EventData\..*|data\..*)$)",
    ),
    Shape(marks=("@mt", "@m", "MessageTemplate"), noise=r"^(?:@i|@mt|MessageTemplate)$", level="info"),
    Shape(marks=("short_message",), noise=r"^version$"),  # GELF
    Shape(
        marks=("error_severity",),  # PostgreSQL
        noise=r"^(?:session_id|line_num|session_start|vxid|txid|query_id|ps|leader_pid|remote_port)$",
    ),
    Shape(
        marks=("devid", "logid"),  # Fortinet
        noise=(
            r"^(?:eventtime|tz|timestamp|logver|devid|logid|log_id|vd|sessionid|poluuid|policytype|"
            r"(?:src|dst)intfrole)$"
        ),
    ),
    Shape(marks=("ecs.version",), noise=_ECS),
    Shape(
        marks=("kubernetes.pod_name", "kubernetes.container_name"),
        noise=r"^kubernetes\.|^(?:stream|_p|time|docker\.container_id)$",
    ),
)
_MARKS: Final = {mark: number for number, shape in enumerate(_SHAPES) for mark in shape.marks}
_KNOWN_KEYS: Final = frozenset({*_ALIASES, *_MARKS, *(shape.error for shape in _SHAPES if shape.error)})
# Keys that tell something beside the message, and the objects around them.
_TELLING: Final = _KNOWN_KEYS - (set(_ROLES["message"]) - _MARKS.keys())
_ABOVE: Final = frozenset(key[: dot.start()] for key in _TELLING for dot in re.finditer(r"\.", key))
# Those of times that tell nothing else.
TIME_PLACES: Final = {key: place for place, key in enumerate(_ROLES["time"]) if key not in _MARKS}

_LONG: Final = {"row": pl.UInt32, "pos": pl.UInt32, "key": pl.String, "value": pl.String}


def parse_json(raw: pl.Series, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows that are JSON objects; message is null in the others."""
    return _assemble(_json_pairs(raw, JSON_LINE), raw.len(), arrived=arrived, zone=zone)


def _json_pairs(raw: pl.Series, pattern: str) -> pl.DataFrame:
    rows = pl.DataFrame({"raw": raw}).with_row_index("row")
    rows = rows.filter(pl.col("raw").str.contains(pattern))
    # A bracket may open a nested value, which columns of text cannot hold. Escaped quotes hide keys, and \\u
    # may be half a character.
    simple = pl.col("raw").str.contains(r"^\s*\{[^\[{]*\}\s*$")
    flat = simple & ~pl.col("raw").str.contains(r'\\["\\u]')
    easy, hard = rows.filter(flat), rows.filter(~flat)
    pairs = pl.concat([_flat_pairs(easy), _python_pairs(hard)]).sort("row", "key", maintain_order=True)
    return pairs.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("pos"))


def parse_xml(raw: pl.Series, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows that are Windows events as XML; message is null in others."""
    row_of: list[int] = []
    keys: list[str] = []
    values: list[str] = []
    for row, text in enumerate(raw.to_list()):
        if not _XML.match(text):
            continue
        for key, value in _event_pairs(text):
            row_of.append(row)
            keys.append(key)
            values.append(value)
    columns = {"row": row_of, "pos": range(len(row_of)), "key": keys, "value": values}
    return _assemble(pl.DataFrame(columns, schema=_LONG), raw.len(), arrived=arrived, zone=zone)


_XML: Final = re.compile(XML_LINE)
# No parser of XML: an entity could make a short text long, and a damaged event would be lost.
_XML_FIELDS: Final = tuple(
    (key if key == "EventID" else f"Event.System.{key}", re.compile(pattern))
    for key, pattern in (
        ("Provider.Name", r"<Provider\b[^>]*?\bName=(?:'([^']*)'|\"([^\"]*)\")"),
        ("EventID", r"<EventID\b[^>]*>([^<]*)<"),
        ("Level", r"<Level>([^<]*)<"),
        ("TimeCreated.SystemTime", r"<TimeCreated\b[^>]*?\bSystemTime=(?:'([^']*)'|\"([^\"]*)\")"),
        ("Execution.ProcessID", r"<Execution\b[^>]*?\bProcessID=(?:'([^']*)'|\"([^\"]*)\")"),
        ("Computer", r"<Computer>([^<]*)<"),
    )
)
_XML_MESSAGE: Final = re.compile(r"<RenderingInfo\b.*?<Message>([^<]*)<", re.DOTALL)
_XML_DATA: Final = re.compile(r"<Data(?:\s+Name=(?:'([^']*)'|\"([^\"]*)\"))?\s*>([^<]*)</Data>")


def _event_pairs(text: str) -> Iterator[tuple[str, str]]:
    for key, pattern in _XML_FIELDS:
        if found := pattern.search(text):
            yield key, unescape(next(filter(None, found.groups()), ""))
    rendered = _XML_MESSAGE.search(text)
    if rendered:
        yield "message", unescape(rendered[1]).strip()
    else:
        for number, data in enumerate(_XML_DATA.finditer(text), 1):
            if value := unescape(data[3]).strip():
                yield f"data.{data[1] or data[2] or number}", value


def parse_logfmt(raw: pl.Series, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows that are logfmt; message is null in the others."""
    rows = pl.DataFrame({"raw": raw}).with_row_index("row")
    rows = rows.filter(pl.col("raw").str.contains(LOGFMT_LINE) & pl.col("raw").str.contains(LOGFMT_MARK))
    return _assemble(_logfmt_pairs(rows), raw.len(), arrived=arrived, zone=zone)


def parse_fortigate(raw: pl.Series, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of a firewall's rows; message is null in the others."""
    text = pl.col("raw")
    rows = pl.DataFrame({"raw": raw}).with_row_index("row").filter(text.str.contains(FORTIGATE_LINE))
    parts = rows.select(
        "row",
        text.str.extract(_FORTIGATE_ZONE).fill_null("").alias("zone"),
        text.str.extract_groups(FORTIGATE_LINE),
    ).unnest("raw")
    joined = parts.select(
        "row", pl.format('time="{} {}{}" {}{}', "date", "clock", "zone", "before", "others").alias("raw")
    )
    pairs = _logfmt_pairs(joined).with_columns(pl.col("key").replace(_FORTIGATE_KEYS))
    return _assemble(pairs, raw.len(), arrived=arrived, zone=zone)


def _logfmt_pairs(rows: pl.DataFrame) -> pl.DataFrame:
    return (
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


class Header(NamedTuple):
    """What the pairs of a record say beside its message; None for nothing."""

    level: str | None = None
    host: str | None = None
    process: str | None = None
    service: str | None = None
    times: tuple[tuple[int, str], ...] = ()  # by their places: the first readable one counts


HEADER: Final = Header._fields[:-1]


def header_of(pairs: Sequence[tuple[str, str]]) -> Header:
    """As `_assemble` finds it for a record with these pairs, which stand in the order of their keys."""
    found: dict[str, tuple[int, str]] = {}
    times: list[tuple[int, str]] = []
    for key, text in pairs:
        role, place = _ALIASES.get(key, ("message", 0))
        value = _level_of(key, text) if role == "level" else text
        if role == "time":
            times.append((place, text))
        elif role != "message" and value is not None and (role not in found or place < found[role][0]):
            found[role] = (place, value)
    columns = {role: value for role, (_, value) in found.items()}
    level = columns.pop("level", None)
    if level is None:
        keys = {key for key, _ in pairs}
        number = min((_MARKS[key] for key in keys & _MARKS.keys()), default=None)
        if number is not None and (level := _SHAPES[number].level) and _SHAPES[number].error in keys:
            level = "error"
    times.sort(key=itemgetter(0))
    return Header(level=level, times=tuple(times), **columns)


def _level_of(key: str, word: str) -> str | None:
    word = word.lower().strip().removesuffix(".0")  # of a collector that makes all numbers fractions
    if key in _NUMBERED_KEYS and word.isascii() and word.isdigit():
        return _NUMBERED.get(f"{key}:{word}")
    return _LEVELS.get(word)


def is_telling(key: str) -> bool:
    """Whether `header_of` may need the member of an object with this key."""
    return key in _TELLING or key in _ABOVE


def members_of(text: str) -> dict[str, msgspec.Raw] | None:
    """The members of an object as they are written; None where `pairs_in` has the last word."""
    if "\\u" in text and _HALF.search(text):
        return None
    try:
        return _MEMBERS.decode(text)
    except (ValueError, RecursionError):
        return None


def member_text(value: bytes) -> str:
    """Of a member that is a text."""
    return _TEXT.decode(value)


def object_of(members: Sequence[tuple[str, bytes]]) -> str:
    """An object with these members, as `pairs_in` reads it."""
    inside = (f"{json.dumps(key)}:{value.decode()}" for key, value in members)
    return f"{{{','.join(inside)}}}"


def pairs_in(text: str) -> list[tuple[str, str]]:
    """The flat pairs of an object, in the order of their keys; none for other texts."""
    loaded = _load(text)
    return sorted(_flatten(loaded, "", 0), key=itemgetter(0)) if isinstance(loaded, dict) else []


def _python_pairs(rows: pl.DataFrame) -> pl.DataFrame:
    """Pairs of any objects, one row at a time; other rows give no pairs."""
    row_of: list[int] = []
    keys: list[str] = []
    values: list[str] = []
    seen: dict[tuple[str, bytes], list[tuple[str, str]]] = {}
    for row, text in rows.select("row", "raw").iter_rows():
        for key, value in _pairs_of(text, seen):
            row_of.append(row)
            keys.append(key)
            values.append(value)
    columns = {"row": row_of, "pos": [0] * len(row_of), "key": keys, "value": values}
    return pl.DataFrame(columns, schema=_LONG)


def _pairs_of(text: str, seen: dict[tuple[str, bytes], list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Pairs of an object. `seen`: those of values that are no texts; many records name the same pod."""
    members = members_of(text)
    if members is not None:
        try:
            found: list[tuple[str, str]] = []
            for key, raw in members.items():
                value = bytes(raw)
                if value.startswith(b'"'):
                    found.append((key, _TEXT.decode(value)))
                    continue
                pairs = seen.get((key, value))
                if pairs is None:
                    loaded = json.loads(value, parse_constant=_refuse)
                    pairs = seen[key, value] = list(_flatten({key: loaded}, "", 0))
                found += pairs
        except (ValueError, RecursionError):  # the parser of Python has the last word
            pass
        else:
            return found
    loaded = _load(text)
    return list(_flatten(loaded, "", 0)) if isinstance(loaded, dict) else []


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
        if (
            isinstance(item, list)
            and not prefix
            and key == "MESSAGE"
            and (text := _bytes_as_text(item)) is not None
        ):
            yield key, text
        elif isinstance(item, dict) and item and depth < _MAX_DEPTH:
            yield from _flatten(item, f"{prefix}{key}.", depth + 1)
        elif isinstance(item, str):
            yield prefix + key, item
        else:
            yield prefix + key, json.dumps(item, ensure_ascii=False, separators=(",", ":"))


def _bytes_as_text(numbers: list[Any]) -> str | None:
    """The text of journald's list of bytes; None for other lists."""
    if not all(type(n) is int and 0 <= n < 256 for n in numbers):
        return None
    return bytes(numbers).decode("utf-8", "backslashreplace")


def _assemble(pairs: pl.DataFrame, n: int, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """n rows of header columns and message; rows without pairs stay null."""
    out = pl.DataFrame({"row": pl.int_range(n, dtype=pl.UInt32, eager=True)})
    known_pairs = _known_pairs(pairs)
    named = known_pairs.filter(pl.col("role").is_not_null())
    used: list[pl.Series] = []
    for name in _ROLES:
        column = "timestamp" if name == "time" else name
        candidates = named.filter(pl.col("role") == name)
        value = candidates["value"]
        if name == "level":
            value = _levels(candidates)
        elif name == "time":
            value = read_times(plain_times(value), arrived=arrived, zone=zone)
        candidates = candidates.with_columns(value.alias(column)).filter(pl.col(column).is_not_null())
        best = candidates.sort("row", "place", maintain_order=True).unique(
            "row", keep="first", maintain_order=True
        )
        used.append(best["pos"])
        out = out.join(best.select("row", column), on="row", how="left", maintain_order="left")
    shapes = _shapes(known_pairs)
    others = pairs.join(pl.DataFrame({"pos": pl.concat(used)}), on="pos", how="anti", maintain_order="left")
    if shapes.height:
        others = _without_noise(others, shapes)
        out = _with_levels(out, shapes, known_pairs)
    extra = (
        others.with_columns(pl.format("{}={}", "key", "value").alias("extra"))
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


def _known_pairs(pairs: pl.DataFrame) -> pl.DataFrame:
    """The pairs of well-known keys, with the `role` and `place` of a key that has one."""
    few, which = kinds(pairs["key"])
    keys = few.to_list()
    roles = [_ALIASES.get(key, (None, None)) for key in keys]
    role = pl.Series("role", [role for role, _ in roles], dtype=pl.String)
    place = pl.Series("place", [place for _, place in roles], dtype=pl.Int32)
    is_known = pl.Series([key in _KNOWN_KEYS for key in keys], dtype=pl.Boolean)[which]
    number = which.filter(is_known)
    return pairs.filter(is_known).with_columns(role[number], place[number])


def _levels(candidates: pl.DataFrame) -> pl.Series:
    """The levels of these pairs, null for unknown words."""
    words = candidates["value"].str.to_lowercase().str.strip_chars()
    found = words.replace_strict(_LEVELS, default=None, return_dtype=pl.String)
    by_key = candidates["key"].is_in(_NUMBERED_KEYS) & words.str.contains("^[0-9]+$")
    if not by_key.any():
        return found
    numbered = (candidates["key"] + ":" + words).replace_strict(
        _NUMBERED, default=None, return_dtype=pl.String
    )
    return numbered.zip_with(by_key, found)


def plain_times(values: pl.Series) -> pl.Series:
    """The number of .NET's `/Date(1763539200123)/`; other values as they are."""
    dates = values.str.starts_with("/Date(")
    return values.str.extract(r"^/Date\((\d+)", 1).zip_with(dates, values) if dates.any() else values


def _shapes(known_pairs: pl.DataFrame) -> pl.DataFrame:
    """`row` and the number of its `shape`, for rows that have one."""
    marks = known_pairs.filter(pl.col("key").is_in(tuple(_MARKS)))
    shape = pl.col("key").replace_strict(_MARKS, return_dtype=pl.UInt8).alias("shape")
    return marks.select("row", shape).group_by("row", maintain_order=True).agg(pl.col("shape").min())


def _without_noise(pairs: pl.DataFrame, shapes: pl.DataFrame) -> pl.DataFrame:
    """The pairs whose shape does not call them noise."""
    pairs = pairs.join(shapes, on="row", how="left", maintain_order="left")
    noise = pl.lit(False)
    for number in shapes["shape"].unique().to_list():
        of_shape = pl.col("shape").eq_missing(pl.lit(number, dtype=pl.UInt8))
        # The crate behind Polars knows no look-ahead, so the few distinct keys are matched here.
        pattern = re.compile(_SHAPES[number].noise)
        keys = pairs.filter(of_shape)["key"].unique().to_list()
        noise |= of_shape & pl.col("key").is_in([key for key in keys if pattern.search(key)])
    return pairs.filter(~noise).drop("shape")


def _with_levels(out: pl.DataFrame, shapes: pl.DataFrame, known_pairs: pl.DataFrame) -> pl.DataFrame:
    """Missing levels filled from the shapes."""
    named = {number: shape for number, shape in enumerate(_SHAPES) if shape.level}
    levels = pl.col("shape").replace_strict(
        {number: shape.level for number, shape in named.items()}, default=None, return_dtype=pl.String
    )
    filled = shapes.with_columns(levels.alias("default"))
    if filled["default"].null_count() == filled.height:
        return out
    errors = known_pairs.filter(pl.col("key").is_in([shape.error for shape in named.values() if shape.error]))
    failed = pl.col("row").is_in(errors["row"].unique().implode()) & pl.col("shape").is_in(
        [number for number, shape in named.items() if shape.error]
    )
    filled = filled.select("row", pl.when(failed).then(pl.lit("error")).otherwise("default").alias("default"))
    joined = out.join(filled, on="row", how="left", maintain_order="left")
    return joined.with_columns(pl.col("level").fill_null(pl.col("default"))).drop("default")
