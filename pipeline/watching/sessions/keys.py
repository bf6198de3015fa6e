"""Session keys: the id of a block, a trace or a request in the text of a record.

A record's key is the first match of the user's patterns, then of KEY_PATTERNS, in its own text alone. So the
key depends on nothing around the record, and a workload keeps its sort of key while it writes the same lines.
Ids that outlive a session are never taken by themselves: pods, processes, threads, users.

Runs on columns, in Rust, in time linear in the text (its regular expressions do not backtrack). A cheap hint
tells which records may hold a key at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from pipeline.errors import BadSetting
from pipeline.records.columns import FEW_ROWS

MAX_KEY: Final = 80  # characters
_MAX_PATTERN: Final = 2_000
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
# Between name and value, with the quotes of JSON and of key="value".
_IS: Final = r"""["']?[ \t]*[=:][ \t]*["']?"""
_META: Final = frozenset(r"\.+*?()|[]{}^$")  # make a text a pattern
_NAMES: Final = "request|req|correlation|transaction|txn|operation|execution|job|session"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPattern:
    """One sort of key: the first group of `pattern`. A text that `hint` does not match has no such key."""

    name: str
    pattern: str
    hint: str

    def hinted(self, text: pl.Expr) -> pl.Expr:
        # A literal takes no room in Polars' cache of compiled patterns (sources/formats.py).
        return text.str.contains(self.hint, literal=not _META & set(self.hint))


KEY_PATTERNS: Final = (
    # HDFS: DataNode, NameNode.
    KeyPattern(name="block", hint="blk_", pattern="(blk_-?[0-9]+)"),
    # SkyWalking: [service,instance,trace,segment,span]; the trace is N/A where there is none.
    KeyPattern(
        name="trace",
        hint="SW_CTX:",
        pattern=r"SW_CTX:[ \t]*\[[0-9A-Za-z_.:/-]*,[0-9A-Za-z_.:/@-]*,[ \t]*([0-9a-f]{32}[0-9.]*)",
    ),
    # W3C trace context.
    KeyPattern(
        name="trace",
        hint="00-[0-9a-f]{8}",
        pattern=rf"(?:^|[^0-9A-Za-z])00-({_HEX}{{32}})-{_HEX}{{16}}-{_HEX}{{2}}",
    ),
    KeyPattern(name="trace", hint="race|RACE", pattern=rf"(?i)trace[_.-]?id{_IS}({_UUID}|{_HEX}{{16,32}})"),
    # Spring Cloud Sleuth: [service,trace,span] or [service,trace,span,exported].
    KeyPattern(
        name="trace",
        hint=r",[0-9a-f]{16},|,[0-9a-f]{16}\]",
        pattern=r"\[[A-Za-z0-9_.-]*,([0-9a-f]{32}|[0-9a-f]{16}),[0-9a-f]{16}[,\]]",
    ),
    # OpenStack.
    KeyPattern(name="request", hint="req-", pattern=f"(req-{_UUID})"),
    KeyPattern(
        name="request",
        hint="equest|EQUEST|[Rr]eq[_.-]?[Ii]|orrelation|ORRELATION|ransaction|RANSACTION|txn|TXN|peration"
        "|xecution|[Jj]ob[_.-]?[Ii]|ession|ESSION",
        pattern=rf"(?i)(?:{_NAMES})[_.-]?id{_IS}([0-9A-Za-z][0-9A-Za-z._:/-]{{3,79}})",
    ),
    KeyPattern(name="uuid", hint="-[0-9a-fA-F]{4}-[1-7][0-9a-fA-F]{3}-[89abAB]", pattern=f"({_UUID})"),
)
# In the logs that have these, nearly every line does: they are searched one by one.
_FIRST: Final = 2
_HINTS: Final = "|".join(kind.hint for kind in KEY_PATTERNS)


def user_patterns(patterns: Sequence[str]) -> tuple[KeyPattern, ...]:
    """The setting `session_keys`. Raises BadSetting unless each is a Rust pattern with one group."""
    return tuple(_checked(pattern) for pattern in patterns)


def extract(frame: pl.DataFrame, patterns: Sequence[KeyPattern] = ()) -> pl.Series:
    """The session key of each record (String, "session") or null; `patterns` of the user come first.

    `frame` has `raw`, `message`, or both: only `raw` has the header.
    """
    columns = [pl.col(name) for name in ("raw", "message") if name in frame.columns]
    text = frame.select(pl.coalesce(columns).alias("text"))["text"]
    if text.len() < FEW_ROWS:
        return pl.Series("session", _extract_few(text, patterns), dtype=pl.String)
    keys = pl.Series("session", [None], dtype=pl.String).new_from_index(0, len(text))
    rows = text.is_not_null().arg_true()  # without a key so far
    for kind in patterns:
        keys, rows = _extract(text, keys, rows, kind)
    rows = rows.filter(text.gather(rows).str.contains(_HINTS))
    for kind in KEY_PATTERNS[:_FIRST]:
        keys, rows = _extract(text, keys, rows, kind)
    if rows.is_empty():
        return keys
    # One query for all hints: most logs hold none of these, or one.
    candidates = text.gather(rows).to_frame()
    others = KEY_PATTERNS[_FIRST:]
    hits = candidates.select(
        kind.hinted(pl.col("text")).any().alias(str(place)) for place, kind in enumerate(others)
    )
    for kind, any_near in zip(others, hits.row(0), strict=True):
        if any_near:
            keys, rows = _extract(text, keys, rows, kind)
    return keys


def _extract_few(text: pl.Series, patterns: Sequence[KeyPattern]) -> list[str | None]:
    """The session keys of few texts: a query costs as much as hundreds of rows in Python."""
    keys: list[str | None] = [None] * text.len()
    texts = text.to_frame()

    def take(kind: KeyPattern, places: Sequence[int]) -> None:
        places = [place for place in places if keys[place] is None]
        if places:
            for place, found in zip(places, text[places].str.extract(kind.pattern, 1).to_list(), strict=True):
                if found is not None and found.strip("0.-"):
                    keys[place] = found[:MAX_KEY]

    def take_hinted(kinds: Sequence[KeyPattern], places: Sequence[int], hits: Sequence[pl.Series]) -> None:
        for kind, hinted in zip(kinds, hits, strict=True):
            take(kind, [place for place, hit in zip(places, hinted.to_list(), strict=True) if hit])

    for kind in patterns:
        take(kind, range(text.len()))
    first, others = KEY_PATTERNS[:_FIRST], KEY_PATTERNS[_FIRST:]
    hints = pl.col(text.name).str.contains(_HINTS).alias("any")
    near, *hits = texts.select(hints, *_hinted(first, text.name)).get_columns()
    places = [place for place, hit in enumerate(near.to_list()) if hit]
    take_hinted(first, range(text.len()), hits)
    places = [place for place in places if keys[place] is None]
    if places:
        take_hinted(others, places, texts[places].select(_hinted(others, text.name)).get_columns())
    return keys


def _hinted(kinds: Sequence[KeyPattern], name: str) -> list[pl.Expr]:
    return [kind.hinted(pl.col(name)).alias(str(place)) for place, kind in enumerate(kinds)]


def _extract(
    text: pl.Series, keys: pl.Series, rows: pl.Series, kind: KeyPattern
) -> tuple[pl.Series, pl.Series]:
    """(`keys` with those of this pattern, the rows that still have none)."""
    candidates, places = text.gather(rows), rows
    if kind.hint:
        hinted = candidates.to_frame().select(kind.hinted(pl.col(candidates.name))).to_series()
        candidates, places = candidates.filter(hinted), rows.filter(hinted)
    if places.is_empty():
        return keys, rows
    found = candidates.str.extract(kind.pattern, 1)
    # An id of zeros or dashes stands for none.
    hit = (found.str.strip_chars("0.-") != "").fill_null(value=False)
    if not hit.any():
        return keys, rows
    keys = keys.scatter(places.filter(hit), found.filter(hit).str.head(MAX_KEY))
    return keys, rows.filter(keys.gather(rows).is_null())


def _checked(pattern: str) -> KeyPattern:
    shown = pattern if len(pattern) <= 120 else pattern[:120] + "..."
    if not pattern or len(pattern) > _MAX_PATTERN:
        raise BadSetting(f"session_keys {shown!r} is empty or longer than {_MAX_PATTERN:,} characters")
    if "," in pattern:  # settings travel to other processes as one text
        raise BadSetting(
            f"session_keys {shown!r} has a comma, which separates patterns; write \\x2c, and + for {{3,}}"
        )
    try:
        # The empty alternative in front makes the number of groups independent of any text.
        groups = pl.select(pl.lit("").str.extract_groups(f"(?:)|(?:{pattern})")).to_series()
    except pl.exceptions.ComputeError as exc:
        lines = [line.strip() for line in str(exc).splitlines()]
        why = next((line for line in lines if line.startswith("error:")), lines[0])
        raise BadSetting(
            f"session_keys {shown!r} is not a Rust regular expression ({why}); correct it"
        ) from exc
    number = len(groups.struct.fields)
    if number != 1:
        raise BadSetting(
            f"session_keys {shown!r} has {number} groups; put the key, and nothing else, into one: "
            "order=([0-9]+)"
        )
    return KeyPattern(name="user", pattern=pattern, hint="")
