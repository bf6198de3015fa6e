"""Session keys: the ids of blocks, traces, requests and the like in the text of a record.

A record has the first key of each kind: of the patterns of a user, then of KEY_PATTERNS. It has all of its
blocks. Each key is of a session of its own. The keys depend on the record's own text alone, so a workload
keeps its kinds of keys while it writes the same lines. Ids that outlive a session are never taken by
themselves: pods, processes, threads, users.

Runs on columns, in Rust, in time linear in the text (its regular expressions do not backtrack). A cheap hint
tells which records may hold a key at all.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from pipeline.errors import BadSetting
from pipeline.records.columns import FEW_ROWS
from pipeline.watching.sessions.shapes_of_ids import (
    BETWEEN_COMMAS,
    SHAPES,
    UUID,
    UUID_BYTES,
    VERSIONED,
    W3C,
    IdShapes,
)
from pipeline.watching.sessions.shipped_ids import SPAN, TRACE, ShippedIds

MAX_KEY: Final = 80  # characters
MAX_BLOCKS: Final = 128  # of one record: HDFS deletes up to 100 blocks in a line
SEPARATOR: Final = "\0"  # between a workload, a kind and a key
# A trace goes through several workloads, under an id that no other trace has.
JOINED: Final = frozenset({"trace"})
JOINT: Final = "*"  # stands for the workload of a session that goes through several
_MAX_PATTERN: Final = 2_000
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = UUID
# Between name and value, with the quotes of JSON and of key="value".
_IS: Final = r"""["']?[ \t]*[=:][ \t]*["']?"""
_META: Final = frozenset(r"\.+*?()|[]{}^$")  # make a text a pattern
_NAMES: Final = "request|req|correlation|transaction|txn|operation|execution|job"
_VALUE: Final = "[0-9A-Za-z][0-9A-Za-z._:/-]{3,79}"
_BLOCK: Final = "blk_-?[0-9]+"
_SKYWALKING: Final = r"[ \t]*\[[0-9A-Za-z_.:/-]*,[0-9A-Za-z_.:/@-]*,[ \t]*([0-9a-f]{32}[0-9.]*)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPattern:
    """A pattern of one kind of key, which is its first group. A text that `hint` does not match has none.

    `behind`: the pattern from the end of a literal hint on. The regex engine takes half the time for it.
    `pieces`: the patterns of what stands between commas in `behind`, the last one that of the key. They have
    no comma and no group, and so take half of that time again."""

    name: str
    pattern: str
    hint: str
    behind: str = ""
    pieces: tuple[str, ...] = ()

    def hinted(self, text: pl.Expr) -> pl.Expr:
        # A literal takes no room in Polars' cache of compiled patterns (sources/formats.py).
        return text.str.contains(self.hint, literal=not _META & set(self.hint))

    def keys(self, texts: pl.Series) -> pl.Series:
        """The first key of this kind in each text, null for none."""
        if not self.behind:
            return texts.str.extract(self.pattern, 1)
        parts = pl.col(texts.name).str.splitn(self.hint, 2).struct.field("field_1")
        remainders = texts.to_frame().select(parts).to_series()
        keys = self._behind(remainders)
        if not keys.null_count():
            return keys
        again = keys.is_null() & remainders.str.contains(self.hint, literal=True).fill_null(value=False)
        if again.any():
            keys = keys.scatter(again.arg_true(), texts.filter(again).str.extract(self.pattern, 1))
        return keys

    def _behind(self, remainders: pl.Series) -> pl.Series:
        """The key at the begin of what follows the hint in each text, null for none."""
        if not self.pieces:
            return remainders.str.extract(self.behind, 1)
        parts = remainders.str.splitn(",", len(self.pieces) + 1).struct
        columns = [parts.field(name) for name in parts.fields[: len(self.pieces)]]
        fits = columns[-1].str.contains(self.pieces[-1]).fill_null(value=False)
        for column, piece in zip(columns[:-1], self.pieces[:-1], strict=True):
            # Services and instances are few.
            if not column.unique().str.contains(piece).fill_null(value=False).all():
                fits &= column.str.contains(piece).fill_null(value=False)
        if fits.all():
            return columns[-1]
        others = (~fits).arg_true()
        return columns[-1].scatter(others, remainders.gather(others).str.extract(self.behind, 1))


KEY_PATTERNS: Final = (
    # HDFS: DataNode, NameNode.
    KeyPattern(name="block", hint="blk_", pattern=f"({_BLOCK})"),
    # SkyWalking: [service,instance,trace,segment,span]; the trace is N/A where there is none.
    KeyPattern(
        name="trace",
        hint="SW_CTX:",
        pattern=f"SW_CTX:{_SKYWALKING}",
        behind=f"^{_SKYWALKING}",
        pieces=(r"^[ \t]*\[[0-9A-Za-z_.:/-]*$", "^[0-9A-Za-z_.:/@-]*$", "^[0-9a-f]{32}[0-9.]*$"),
    ),
    # W3C trace context.
    KeyPattern(
        name="trace",
        hint=W3C,
        pattern=rf"(?:^|[^0-9A-Za-z])00-({_HEX}{{32}})-{_HEX}{{16}}-{_HEX}{{2}}",
    ),
    KeyPattern(name="trace", hint=TRACE, pattern=rf"(?i)trace[_.-]?id{_IS}({_UUID}|{_HEX}{{16,32}})"),
    # Spring Cloud Sleuth: [service,trace,span] or [service,trace,span,exported].
    KeyPattern(
        name="trace",
        hint=BETWEEN_COMMAS,
        pattern=r"\[[A-Za-z0-9_.-]*,([0-9a-f]{32}|[0-9a-f]{16}),[0-9a-f]{16}[,\]]",
    ),
    # OpenStack: one request goes through all of its services.
    KeyPattern(name="trace", hint="req-", pattern=f"(req-{_UUID})"),
    KeyPattern(
        name="request",
        hint="req|Req|REQ|equest|EQUEST|orrelation|ORRELATION|ransaction|RANSACTION|txn|TXN|peration|xecution"
        "|job|Job",
        pattern=rf"(?i)(?:{_NAMES})[_.-]?id{_IS}({_VALUE})",
    ),
    # OpenStack: [instance: UUID].
    KeyPattern(
        name="instance",
        hint="nstance|NSTANCE",
        pattern=rf"(?i)instance(?:[_.-]?(?:id|uuid))?{_IS}({_UUID})",
    ),
    KeyPattern(name="session", hint="ession|ESSION", pattern=rf"(?i)session[_.-]?id{_IS}({_VALUE})"),
    # Not that of a parent.
    KeyPattern(
        name="span",
        hint=SPAN,
        pattern=rf"(?i)(?:^|[^0-9a-z_.-])span[_.-]?id{_IS}({_HEX}{{16}})",
    ),
    KeyPattern(name="uuid", hint=VERSIONED, pattern=f"({_UUID})"),
)
USER: Final = "user"
KINDS: Final = tuple(dict.fromkeys([USER, *(kind.name for kind in KEY_PATTERNS)]))
# In the logs that have these, nearly every line does: they are searched one by one.
_FIRST: Final = 2
_OTHERS: Final = KEY_PATTERNS[_FIRST:]
# Alternatives of literals are found three times as fast apart from the others, and twice as fast where none
# holds another.
_LITERALS: Final = frozenset(
    word for kind in _OTHERS if (_META - {"|"}).isdisjoint(kind.hint) for word in kind.hint.split("|")
)
_LITERAL_HINTS: Final = "|".join(
    sorted(word for word in _LITERALS if not any(other in word for other in _LITERALS - {word}))
)
_OTHER_HINTS: Final = "|".join(kind.hint for kind in _OTHERS if not (_META - {"|"}).isdisjoint(kind.hint))
_LISTS: Final = pl.List(pl.String)


def kind_and_key(entry: str) -> tuple[str, str]:
    """(kind, key) of a key as `find_keys` writes it; the kind is "" where none is written."""
    kind, separator, key = entry.partition(SEPARATOR)
    return (kind, key) if separator and kind in KINDS else ("", entry)


def model_name(workload: str, kind: str) -> str:
    """Of the session model of a workload's sessions of one kind; `split_model_name` is the inverse."""
    return workload + SEPARATOR + kind if kind else workload


def split_model_name(name: str) -> tuple[str, str]:
    """(workload, kind)."""
    workload, _, kind = name.partition(SEPARATOR)
    return workload, kind


def user_patterns(patterns: Sequence[str]) -> tuple[KeyPattern, ...]:
    """The setting `session_keys`. Raises BadSetting unless each is a Rust pattern with one group."""
    return tuple(_checked(pattern) for pattern in patterns)


def find_keys(frame: pl.DataFrame, patterns: Sequence[KeyPattern] = ()) -> pl.Series:
    """The session keys of each record (list of String, "sessions"), in the order of KINDS.

    A key is written as `kind NUL key`. A list may hold nulls; it is null or empty where there is none.
    `frame` has `raw`, `message`, or both: only `raw` has the header."""
    columns = [pl.col(name) for name in ("raw", "message") if name in frame.columns]
    text = frame.select(pl.coalesce(columns).alias("text"))["text"]
    if text.len() < FEW_ROWS:
        return _padded(_find_few(text, patterns)).alias("sessions")
    found: dict[str, pl.Series] = {}
    for kind in patterns:
        _search(text, None, kind, found)
    shipped = ShippedIds.of(text)
    if shipped is not None:
        text = shipped.heads
    for kind in KEY_PATTERNS[:_FIRST]:
        _search(text, None, kind, found)
    # A record that has a key of some kind takes no further one.
    kinds = [kind for kind in _OTHERS if kind.name not in found or found[kind.name].null_count()]
    shapes = IdShapes(text, [kind.hint for kind in kinds if kind.hint in SHAPES])
    hinted = dict(_near(text, shapes, kinds))
    for kind in kinds:
        rows = hinted.get(kind)
        ids = None if shipped is None else shipped.ids(kind.hint)
        if ids is not None:
            _add(text, None, ids if rows is None else _said_first(text, rows, kind, ids), kind.name, found)
        elif rows is not None and kind.hint is VERSIONED:
            of, keys = shapes.uuids()
            is_hinted = np.isin(of, rows.to_numpy())
            _add(
                text,
                pl.Series(of[is_hinted], dtype=pl.UInt32),
                keys.filter(pl.Series(is_hinted)),
                kind.name,
                found,
            )
        elif rows is not None:
            _search(text, rows, kind, found)
    return _listed(text, found).alias("sessions")


def _near(
    text: pl.Series, shapes: IdShapes, kinds: Sequence[KeyPattern]
) -> Iterator[tuple[KeyPattern, pl.Series]]:
    """The kinds with a hint in some text, each with the rows of these texts."""
    rows = text.str.contains(_LITERAL_HINTS).fill_null(value=False).arg_true()
    hits: dict[str, pl.Series] = {}
    if not rows.is_empty():
        # One query for all hints: most logs hold none of these, or one.
        said = [kind for kind in kinds if kind.hint not in SHAPES]
        columns = text.gather(rows).to_frame().select(_hinted(said, text.name)).get_columns()
        hits = {kind.hint: rows.filter(hit) for kind, hit in zip(said, columns, strict=True)}
    for kind in kinds:
        if kind.hint in SHAPES:
            near = pl.Series(shapes.rows(kind.hint), dtype=pl.UInt32)
        else:
            near = hits.get(kind.hint, rows)
        if not near.is_empty():
            yield kind, near


def _said_first(text: pl.Series, rows: pl.Series, kind: KeyPattern, ids: pl.Series) -> pl.Series:
    """The keys of all texts: one in the text itself, in these rows, comes before the id of the shipper."""
    in_text = kind.keys(text.gather(rows))
    return ids.clone().scatter(rows, in_text.zip_with(in_text.is_not_null(), ids.gather(rows)))


def extract(frame: pl.DataFrame, patterns: Sequence[KeyPattern] = ()) -> pl.Series:
    """The first of `find_keys` of each record, without its kind (String, "session"); null for none."""
    first = pl.col("sessions").list.drop_nulls().list.first()
    key = first.str.split_exact(SEPARATOR, 1).struct.field("field_1").alias("session")
    return find_keys(frame, patterns).to_frame().select(key).to_series()


def _search(text: pl.Series, rows: pl.Series | None, kind: KeyPattern, found: dict[str, pl.Series]) -> None:
    """Add the keys of this pattern in these rows, which its hint matches (None: in all rows)."""
    candidates = text if rows is None else text.gather(rows)
    if rows is None and kind.hint:
        hinted = text.to_frame().select(kind.hinted(pl.col(text.name)).fill_null(value=False)).to_series()
        if not hinted.any():
            return
        if not hinted.all():
            candidates, rows = text.filter(hinted), hinted.arg_true()
    _add(text, rows, kind.keys(candidates), kind.name, found)


def _add(
    text: pl.Series, rows: pl.Series | None, keys: pl.Series, name: str, found: dict[str, pl.Series]
) -> None:
    """Add the keys of these rows (None: of all) that have none of this kind."""
    if int(keys.str.len_bytes().max() or 0) > MAX_KEY:  # type: ignore[arg-type] # of numbers
        keys = keys.str.head(MAX_KEY)
    # An id of zeros or dashes stands for none.
    hit = keys.str.contains("[^0.-]").fill_null(value=False)
    before = found.get(name)
    if before is None and rows is None and hit.all():
        found[name] = keys
        return
    if before is not None:
        hit &= before.is_null() if rows is None else before.gather(rows).is_null()
    if hit.any():
        if before is None:
            before = pl.Series(name, [None], dtype=pl.String).new_from_index(0, len(text))
        places = hit.arg_true() if rows is None else rows.filter(hit)
        found[name] = before.scatter(places, keys.filter(hit))


def _listed(text: pl.Series, found: dict[str, pl.Series]) -> pl.Series:
    """The keys of all kinds, and those of further blocks."""
    if not found:
        return pl.Series([None], dtype=_LISTS).new_from_index(0, len(text))
    names = [name for name in KINDS if name in found]
    frame = pl.DataFrame([found[name].alias(name) for name in names])
    # A UUID that stands in another key is no key of its own.
    holding = [name for name in names if name != "uuid" and _may_hold_uuids(found[name])]
    if "uuid" in found and holding:
        others = [pl.col(name).str.contains(pl.col("uuid"), literal=True) for name in holding]
        alone = ~pl.any_horizontal(others).fill_null(value=False)
        frame = frame.with_columns(pl.when(alone).then(pl.col("uuid")).alias("uuid"))
    # All lists are as long as each other: an array takes a quarter of the time of lists.
    lists = (
        frame.select(pl.concat_arr([_entry(name).alias(name) for name in names])).to_series().arr.to_list()
    )
    if "block" not in found:
        return lists
    rows = found["block"].is_not_null().arg_true()
    texts = text.gather(rows)
    several = texts.str.count_matches("blk_", literal=True) > 1
    if not several.any():
        return lists
    rows, texts = rows.filter(several), texts.filter(several)
    blocks = pl.Series("block", map(_further_blocks, texts.to_list()), dtype=_LISTS)
    longer = pl.DataFrame([lists.gather(rows).alias("first"), blocks]).select(
        pl.concat_list("first", "block")
    )
    which = np.arange(len(text))
    which[rows.to_numpy()] = len(text) + np.arange(rows.len())
    return pl.concat([lists, longer.to_series().alias(lists.name)])[which]


def _may_hold_uuids(keys: pl.Series) -> bool:
    """Whether some key is as long as a UUID, and some has a dash."""
    longest = int(keys.str.len_bytes().max() or 0)  # type: ignore[arg-type] # of numbers
    return longest >= UUID_BYTES and keys.str.contains("-", literal=True).any()


def _entry(name: str) -> pl.Expr:
    return pl.lit(name + SEPARATOR) + pl.col(name)


def _further_blocks(text: str) -> list[str]:
    """Keys of the blocks of a text but the first one."""
    blocks = dict.fromkeys(block[:MAX_KEY] for block in re.findall(_BLOCK, text) if block.strip("0.-"))
    return [f"block{SEPARATOR}{block}" for block in list(blocks)[1:MAX_BLOCKS]]


def _find_few(text: pl.Series, patterns: Sequence[KeyPattern]) -> list[list[str] | None]:
    """The session keys of few texts: a query costs as much as hundreds of rows in Python."""
    keys: dict[int, dict[str, str]] = {}  # place -> kind -> key, in the order of KINDS
    texts = text.to_frame()

    def take(kind: KeyPattern, places: Sequence[int]) -> None:
        if keys:
            places = [place for place in places if kind.name not in keys.get(place, ())]
        if places:
            for place, found in zip(places, text[places].str.extract(kind.pattern, 1).to_list(), strict=True):
                if found is not None and found.strip("0.-"):
                    keys.setdefault(place, {})[kind.name] = found[:MAX_KEY]

    for kind in patterns:
        take(kind, range(text.len()))
    first = KEY_PATTERNS[:_FIRST]
    near, *hits = texts.select(_any_hint(text.name), *_hinted(first, text.name)).get_columns()
    for kind, hit in zip(first, hits, strict=True):
        take(kind, _true(hit))
    places = _true(near)
    if places:
        columns = texts[places].select(_hinted(_OTHERS, text.name)).get_columns()
        for kind, hit in zip(_OTHERS, columns, strict=True):
            take(kind, [places[at] for at in _true(hit)])
    lists: list[list[str] | None] = [None] * text.len()
    for place, found in keys.items():
        lists[place] = _listed_few(found)
    blocks = [place for place, found in keys.items() if "block" in found]
    for place, whole in zip(blocks, text[blocks].to_list() if blocks else (), strict=True):
        if whole.count("blk_") > 1:
            lists[place] = [*(lists[place] or ()), *_further_blocks(whole)]
    return lists


def _padded(lists: Sequence[list[str] | None]) -> pl.Series:
    """As a column, with nulls behind shorter lists: nested lists take ten times as long."""
    width = max((len(found) for found in lists if found), default=0)
    if not width:
        return pl.Series([None], dtype=_LISTS).new_from_index(0, len(lists))
    flat = [key for found in lists for key in (*(found or ()), *[None] * (width - len(found or ())))]
    return pl.Series(flat, dtype=pl.String).reshape((len(lists), width)).arr.to_list()


def _listed_few(found: dict[str, str]) -> list[str]:
    if len(found) > 1 and "uuid" in found:
        uuid = found.pop("uuid")
        if not any(uuid in key for key in found.values()):
            found["uuid"] = uuid
    return [kind + SEPARATOR + key for kind, key in found.items()]


def _true(hits: pl.Series) -> list[int]:
    return [place for place, hit in enumerate(hits.to_list()) if hit]


def _any_hint(name: str) -> pl.Expr:
    """Whether a text may have a key of a kind that is not searched first."""
    text = pl.col(name).str
    near = text.contains(_LITERAL_HINTS) | text.contains(_OTHER_HINTS)
    return near.fill_null(value=False).alias("any")


def _hinted(kinds: Sequence[KeyPattern], name: str) -> list[pl.Expr]:
    return [
        kind.hinted(pl.col(name)).fill_null(value=False).alias(str(place)) for place, kind in enumerate(kinds)
    ]


def _checked(pattern: str) -> KeyPattern:
    shown = pattern if len(pattern) <= 120 else pattern[:120] + "..."
    if not pattern or len(pattern) > _MAX_PATTERN:
        raise BadSetting(f"session_keys {shown!r} is empty or longer than {_MAX_PATTERN:,} characters")
    try:
        # The empty alternative in front makes the number of groups independent of any text.
        groups = pl.select(pl.lit("").str.extract_groups(f"(?:)|(?:{pattern})")).to_series()
    except pl.exceptions.ComputeError as exc:
        lines = [line.strip() for line in str(exc).splitlines()]
        why = next((line for line in lines if line.startswith("error:")), lines[0])
        raise BadSetting(
            f"session_keys {shown!r} is not a Rust regular expression ({why}); correct it. In a variable "
            "a comma separates patterns: write \\x2c there, or use the configuration file"
        ) from exc
    number = len(groups.struct.fields)
    if number != 1:
        raise BadSetting(
            f"session_keys {shown!r} has {number} groups; put the key, and nothing else, into one: "
            "order=([0-9]+)"
        )
    return KeyPattern(name=USER, pattern=pattern, hint="")
