"""What names the session of a record: a block, a trace, a request, found by looking at its text.

Each record gets the first key, by the order of `KINDS`, that its own text holds; patterns of the user come before all.
So a record's key depends on nothing around it, neither on the batch it came in nor on what was seen before, and a
workload keeps its kind of key as long as it writes the same lines. What is never taken by itself is what outlives a
session: a pod, a process, a thread, a user.

In columns, in Rust, in time linear in the text (its regular expressions know no backtracking). A hint, which is cheap
to look for, says which records may hold a key at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from pipeline.errors import BadSetting

MAX_KEY: Final = 80  # characters
_MAX_PATTERN: Final = 2_000
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_IS: Final = (
    r"""["']?[ \t]*[=:][ \t]*["']?"""  # between name and value, with the quotes of JSON and of key="value"
)
_META: Final = frozenset(r"\.+*?()|[]{}^$")  # what makes a pattern of a text
_NAMES: Final = "request|req|correlation|transaction|txn|operation|execution|job|session"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One sort of key. The first group of `pattern` is the key; a text that `hint` does not match has none."""

    name: str
    pattern: str
    hint: str

    def hinted(self, text: pl.Expr) -> pl.Expr:
        # What is no pattern takes no room among those that Polars keeps compiled (sources/formats.py).
        return text.str.contains(self.hint, literal=not _META & set(self.hint))


KINDS: Final = (
    # HDFS: DataNode, NameNode.
    Kind(name="block", hint="blk_", pattern="(blk_-?[0-9]+)"),
    # SkyWalking: [service,instance,trace,segment,span]; the trace is N/A where there is none.
    Kind(
        name="trace",
        hint="SW_CTX:",
        pattern=r"SW_CTX:[ \t]*\[[0-9A-Za-z_.:/-]*,[0-9A-Za-z_.:/@-]*,[ \t]*([0-9a-f]{32}[0-9.]*)",
    ),
    # W3C trace context.
    Kind(
        name="trace",
        hint="00-[0-9a-f]{8}",
        pattern=rf"(?:^|[^0-9A-Za-z])00-({_HEX}{{32}})-{_HEX}{{16}}-{_HEX}{{2}}",
    ),
    Kind(
        name="trace",
        hint="race|RACE",
        pattern=rf"(?i)trace[_.-]?id{_IS}({_UUID}|{_HEX}{{16,32}})",
    ),
    # Spring Cloud Sleuth: [service,trace,span] or [service,trace,span,exported].
    Kind(
        name="trace",
        hint=r",[0-9a-f]{16},|,[0-9a-f]{16}\]",
        pattern=r"\[[A-Za-z0-9_.-]*,([0-9a-f]{32}|[0-9a-f]{16}),[0-9a-f]{16}[,\]]",
    ),
    # OpenStack.
    Kind(name="request", hint="req-", pattern=f"(req-{_UUID})"),
    Kind(
        name="request",
        hint="equest|EQUEST|[Rr]eq[_.-]?[Ii]|orrelation|ORRELATION|ransaction|RANSACTION|txn|TXN|peration|xecution|[Jj]ob[_.-]?[Ii]|ession|ESSION",
        pattern=rf"(?i)(?:{_NAMES})[_.-]?id{_IS}([0-9A-Za-z][0-9A-Za-z._:/-]{{3,79}})",
    ),
    Kind(name="uuid", hint="-[0-9a-fA-F]{4}-[1-7][0-9a-fA-F]{3}-[89abAB]", pattern=f"({_UUID})"),
)
# Kinds that nearly every line holds in the logs that know them: they are asked for one by one.
_FIRST: Final = 2
_HINTS: Final = "|".join(kind.hint for kind in KINDS)


def own(patterns: Sequence[str]) -> tuple[Kind, ...]:
    """The user's patterns as kinds. Raises BadSetting for what is no Rust regular expression with one group."""
    return tuple(_checked(pattern) for pattern in patterns)


def extract(frame: pl.DataFrame, kinds: Sequence[Kind] = ()) -> pl.Series:
    """The session key of each record (String, "session"), null where it holds none; `kinds`, of `own`, come first.

    `frame` has `raw`, `message`, or both: what a header holds stands in `raw` alone.
    """
    columns = [pl.col(name) for name in ("raw", "message") if name in frame.columns]
    text = frame.select(pl.coalesce(columns).alias("text"))["text"]
    keys = pl.Series("session", [None], dtype=pl.String).new_from_index(0, len(text))
    rows = text.is_not_null().arg_true()  # without a key so far
    for kind in kinds:
        keys, rows = _taken(text, keys, rows, kind)
    rows = rows.filter(text.gather(rows).str.contains(_HINTS))
    for kind in KINDS[:_FIRST]:
        keys, rows = _taken(text, keys, rows, kind)
    if rows.is_empty():
        return keys
    # One query for all hints: most logs hold none of these, or one.
    asked = text.gather(rows).to_frame()
    rest = KINDS[_FIRST:]
    near = asked.select(
        kind.hinted(pl.col("text")).any().alias(str(place)) for place, kind in enumerate(rest)
    )
    for kind, any_near in zip(rest, near.row(0), strict=True):
        if any_near:
            keys, rows = _taken(text, keys, rows, kind)
    return keys


def _taken(text: pl.Series, keys: pl.Series, rows: pl.Series, kind: Kind) -> tuple[pl.Series, pl.Series]:
    """`keys` with those of this kind in these rows, and which rows have none still."""
    asked, near = text.gather(rows), rows
    if kind.hint:
        hinted = asked.to_frame().select(kind.hinted(pl.col(asked.name))).to_series()
        asked, near = asked.filter(hinted), rows.filter(hinted)
    if near.is_empty():
        return keys, rows
    found = asked.str.extract(kind.pattern, 1)
    # An id of zeros or dashes stands for none.
    hit = (found.str.strip_chars("0.-") != "").fill_null(value=False)
    if not hit.any():
        return keys, rows
    keys = keys.scatter(near.filter(hit), found.filter(hit).str.head(MAX_KEY))
    return keys, rows.filter(keys.gather(rows).is_null())


def _checked(pattern: str) -> Kind:
    shown = pattern if len(pattern) <= 120 else pattern[:120] + "..."
    if not pattern or len(pattern) > _MAX_PATTERN:
        raise BadSetting(f"session_keys {shown!r} is empty or longer than {_MAX_PATTERN:,} characters")
    if "," in pattern:  # settings travel to other processes as one text
        raise BadSetting(
            f"session_keys {shown!r} has a comma, which parts one pattern from the next; write \\x2c, and + for {{3,}}"
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
            f"session_keys {shown!r} has {number} groups; put the key, and nothing else, into one: order=([0-9]+)"
        )
    return Kind(name="own", pattern=pattern, hint="")
