"""Messages of several lines: selects the lines that count, cleans them, and joins their masked forms to one
line.

The frames of a stack trace differ from call to call. So the head line counts and those following lines that
are no frames: the exception, its causes, a hint."""

from typing import Final

import numpy as np
import polars as pl

from pipeline.records.columns import FEW_ROWS, spread

EMPTY: Final = "<EMPTY>"
LINE_END: Final = "<NL>"
MAX_FOLLOWING: Final = 8  # lines after the head line: exception, its causes, a hint
MAX_MASKED_CHARS: Final = 4096  # longer than a person reads; bounds caches and tokens
MAX_LINE_CHARS: Final = 16384  # four times the result; bounds the work on a hostile line

# Escape sequences of terminals: colours and cursor moves, titles.
_ANSI: Final = r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])"
# Noncharacters are removed too: masking uses some of them as marks.
_BLANK: Final = r"[\s\x00-\x1f\x7f-\x9f\x{FDD0}-\x{FDEF}]"
_UNCLEAN: Final = r"[^\S ]|  |[\x00-\x1f\x7f-\x9f\x{FDD0}-\x{FDEF}]|^ | $"

# One line of a stack: Java, .NET, Node, Rust (at ...), PHP and gdb (#0), Ruby (from), kernels
# (symbol+0x1/0x2), Rust (3: core::panicking::panic), Java's counts of omitted frames.
_FRAME: Final = (
    r"^\s*(?:at (?:[^ ]*\(.*|.*\(.*\).*|[^ ]+:[0-9]+.*|[^ ]+\.[^ ]+)"
    r"|\.\.\. [0-9]+ (?:more|common frames omitted).*"
    r"|#[0-9]+:? .*"
    r"|from [^ ]+:[0-9]+:in .*"
    r"|(?:\[<[0-9a-f]+>\] )?\??\s*[^ ]+\+0x[0-9a-f]+/0x[0-9a-f]+.*"
    r"|[0-9]+:\s+(?:0x[0-9a-f]+ - )?[^ ]*::.*"
    r'|File ".*", line [0-9]+.*'
    r"|[\^~ ]+"
    r"|created by [^ ]+(?: in goroutine [0-9]+)?"
    r")$"
)
_PYTHON_FRAME: Final = r'^\s*File ".*", line [0-9]+'
_GO_PLACE: Final = r"^\s+[^ ]+\.(?:go|s):[0-9]+(?: \+0x[0-9a-f]+)?\s*$"
_GO_CALL: Final = r"^[^ ]+\(.*\)\s*$"


def lines_of(messages: pl.DataFrame) -> pl.DataFrame:
    """The lines that count of distinct messages: columns `message`, `at` (0: head line) and `line`, in
    order."""
    many = pl.col("message").str.contains("\n", literal=True)
    at = pl.lit(0, dtype=pl.UInt32).alias("at")
    single = messages.filter(~many).select("message", at, pl.col("message").alias("line"))
    several = messages.filter(many)
    if several.is_empty():
        return single
    # A blank first line is not the head line.
    # A number for each message: hashing a message once for each of its lines would be quadratic.
    split = several.with_row_index("of").with_columns(
        pl.col("message").str.strip_chars().str.split("\n").alias("line")
    )
    rows = split.explode("line").with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).over("of").alias("at"))
    text = pl.col("line")
    before, after = text.shift(1).over("of"), text.shift(-1).over("of")
    # The source line below a Python frame and the call above a Go position belong to the frame.
    source = before.str.contains(_PYTHON_FRAME).fill_null(False) & text.str.contains(r"^\s")
    call = text.str.contains(_GO_CALL) & after.str.contains(_GO_PLACE).fill_null(False)
    frame = text.str.contains(_FRAME) | text.str.contains(_GO_PLACE) | source | call
    blank = text.str.strip_chars() == ""
    counting = rows.filter((pl.col("at") == 0) | ~(frame | blank))
    counting = counting.filter(pl.int_range(pl.len()).over("of") <= MAX_FOLLOWING)
    return pl.concat([single, counting.select("message", "at", "line")])


def cleaned(lines: pl.Series) -> pl.Series:
    """Lines without terminal escapes and control characters; blanks collapsed to one space, trimmed, cut."""
    if lines.is_empty():
        return lines
    text = pl.col(lines.name)
    if (lines.str.len_bytes() > MAX_LINE_CHARS).any():
        long = text.str.len_bytes() > MAX_LINE_CHARS
        lines = spread(lines, pl.when(long).then(text.str.head(MAX_LINE_CHARS)).otherwise(text))
    rows = _doubtful(lines)
    if rows is not None:
        if not rows.size:
            return lines
        some = lines.gather(rows)
        unclean = pl.Series(rows).filter(spread(some, text.str.contains(_UNCLEAN)))
    else:
        unclean = spread(lines, text.str.contains(_UNCLEAN)).arg_true()
    if unclean.is_empty():
        return lines
    tidy = text.str.replace_all(_ANSI, "").str.replace_all(rf"{_BLANK}+", " ").str.strip_chars(" ")
    return lines.clone().scatter(unclean, spread(lines.gather(unclean), tidy))


def _doubtful(lines: pl.Series) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """The rows that `_UNCLEAN` may match, told by their bytes; None for few lines.

    These are lines with a character that is not printable ASCII, with two blanks together, or with a blank at
    an end. A regular expression takes several times as long for that."""
    if lines.len() < FEW_ROWS:
        return None
    sizes = lines.str.len_bytes().to_numpy().astype(np.int64)
    data = np.frombuffer(lines.str.join("\n").cast(pl.Binary).item(), dtype=np.uint8)
    ends = np.cumsum(sizes + 1) - 1  # of the newline behind each line but the last
    odd = (data < 0x20) | (data > 0x7E)
    odd[ends[:-1]] = False
    blank = data == 0x20
    odd[1:] |= blank[1:] & blank[:-1]
    odd[(ends - sizes)[sizes > 0]] |= blank[(ends - sizes)[sizes > 0]]
    odd[(ends - 1)[sizes > 0]] |= blank[(ends - 1)[sizes > 0]]
    found = np.searchsorted(ends, np.flatnonzero(odd))
    return found[np.diff(found, prepend=-1) > 0]


def fold(parts: pl.DataFrame) -> pl.DataFrame:
    """Columns `message` and `masked`, joined from the masked lines of messages (columns `message`, `at`,
    `part`)."""
    many = pl.col("message").str.contains("\n", literal=True)
    single = parts.filter(~many).select("message", pl.col("part").alias("masked"))
    several = parts.filter(many & (pl.col("part") != EMPTY))
    if parts.height == single.height:
        return single
    joined = (
        several.sort("at")
        .group_by("message", maintain_order=True)
        .agg(pl.col("part").str.join(f" {LINE_END} "))
    )
    lost = parts.filter(many).select(pl.col("message").unique()).join(joined, on="message", how="left")
    folded = lost.select("message", pl.col("part").fill_null(EMPTY).alias("masked"))
    return pl.concat([single, folded.with_columns(limit(folded["masked"]))])


def limit(masked: pl.Series) -> pl.Series:
    """Masked lines of at most MAX_MASKED_CHARS, never empty; cut at a space if possible, so that no token is
    halved."""
    if masked.is_empty():
        return masked
    if masked.len() < FEW_ROWS:
        texts = masked.to_list()
        if max(map(len, texts)) <= MAX_MASKED_CHARS // 4:  # a character has four bytes at most
            return pl.Series(masked.name, [short.strip(" ") or EMPTY for short in texts], dtype=pl.String)
    text = pl.col(masked.name)
    if not (masked.str.len_bytes() > MAX_MASKED_CHARS).any():
        short = masked.str.strip_chars(" ")
        return short.replace("", EMPTY) if (short == "").any() else short
    head = text.str.head(MAX_MASKED_CHARS).str.replace(r" [^ ]{0,200}$", "")
    cut = pl.when(text.str.len_chars() > MAX_MASKED_CHARS).then(head).otherwise(text).str.strip_chars(" ")
    return (
        masked.to_frame()
        .select(pl.when(cut == "").then(pl.lit(EMPTY)).otherwise(cut).alias(masked.name))
        .to_series()
    )
