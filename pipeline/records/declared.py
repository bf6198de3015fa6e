"""Text formats as data: those of `config/formats.toml`, of a user's file, and of the form of a time alone.

A user's declaration travels with the batches that it was used on, as their format's name. So workers need no
file, and every worker reads a batch in the same way. `sources.formats` reads lines by them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from pipeline.errors import BadInput
from pipeline.settings.toml import read_toml, shipped_value

# The head of config/formats.toml says what they are.
GROUPS: Final = (
    "time", "fraction", "millis", "half", "year", "zone", "zone_2", "level", "level_2", "level_3", "pri", "status", "service",
    "logger", "host", "process", "before", "message",
)  # fmt: skip
_TIME_PARTS: Final = ("fraction", "millis", "half", "year", "zone", "zone_2")
NUMBERS: Final = ("iso", "epoch", "tai64n")  # a time that needs no form
MARK: Final = "{"  # a declaration begins so, and no name of a format does
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_GROUP: Final = re.compile(r"\(\?P?<([A-Za-z_][A-Za-z0-9_]*)>")
_FRAGMENT: Final = re.compile(r"\{([A-Z][A-Z_0-9]*)\}")
_FOLDED: Final = re.compile(r"(?:\A|\n)\s+")
_NESTED: Final = 8  # fragments within fragments
# The digits and letters of each strptime directive; those of `_SEPARATE` are captured by themselves.
_DIRECTIVES: Final = {
    "Y": "[0-9]{4}", "y": "[0-9]{2}", "m": "[0-9]{1,2}", "d": " ?[0-9]{1,2}", "e": " ?[0-9]{1,2}",
    "H": "[0-9]{1,2}", "I": " ?[0-9]{1,2}", "M": "[0-9]{1,2}", "S": "[0-9]{1,2}", "j": "[0-9]{3}",
    "b": "[A-Za-z]{3}", "B": "[A-Za-z]{3,9}", "a": "[A-Za-z]{3}", "A": "[A-Za-z]{6,9}", "p": "[AaPp][Mm]",
    "T": "[0-9]{1,2}:[0-9]{2}:[0-9]{2}", "F": "[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}", "%": "%",
}  # fmt: skip
_SEPARATE: Final = re.compile(r"([.,]?%f| ?%[zZ])")
_FRACTION: Final = "[.,]?(?P<fraction>[0-9]{1,9})"
_NUMBER_PATTERNS: Final = {
    "tai64n": "[0-9a-f]{24}",
    "epoch": r"[0-9]{9,19}(?:\.[0-9]+)?",
    "iso": r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{1,2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?"
    r"(?: ?(?:Z|(?:UTC|GMT)?[+-][0-9]{1,2}(?::?[0-9]{2})?|UTC|GMT))?",
}
_ZONE: Final = " ?(?P<zone>[A-Z]{1,5}|[+-][0-9]{2}:?[0-9]{2})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The time notation of a format.

    `form` is a chrono format of the `time` group, without the part that `missing` names. An empty `form`
    means seconds (or milli-, micro-, nanoseconds) since 1970. A `loose` one also reads dots and dashes for
    its slashes, a comma behind the date, and AM or PM."""

    form: str
    missing: Literal["", "year", "date"] = ""
    loose: bool = False


ISO_CLOCK: Final = Clock(form="%Y-%m-%d %H:%M:%S")
EPOCH_CLOCK: Final = Clock(form="")
TAI_CLOCK: Final = Clock(form="tai64n")


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One format; `config/formats.toml` says what the keys mean. One without `pattern` is read by code."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    pattern: str = ""  # a Rust regular expression with groups of GROUPS
    time: str = "iso"
    zone: str = ""
    levels: dict[str, list[str] | str] = {}
    unless: str = ""
    loose: bool = False
    whole: bool = False
    block: bool = False
    stray: bool = False
    example: str = ""
    expect: dict[str, str] = {}

    def pack(self) -> str:
        """The text that travels; the example stays."""
        said = msgspec.structs.replace(self, example="", expect={})
        filled = {name: value for name, value in msgspec.structs.asdict(said).items() if value}
        return msgspec.json.encode(filled).decode()

    @classmethod
    def unpack(cls, text: str) -> "Declaration":
        """Raises BadInput."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise BadInput(f"the format {text[:80]!r} of a batch cannot be read: {exc}") from exc
        if not found.pattern:
            raise BadInput(f"the format {text[:80]!r} of a batch has no pattern")
        return found

    @cached_property
    def head(self) -> str:
        """The pattern up to the message; a match begins a record."""
        return self.pattern.partition("(?P<message>")[0]

    @cached_property
    def words(self) -> Mapping[str, str]:
        """Level words as they are written, to levels; empty for those of `levels_by_word` in any case."""
        return {word: level for level, words in self.levels.items() for word in words}

    @cached_property
    def clock(self) -> Clock | None:
        """Of the group `time`; None without one."""
        if "(?P<time>" not in self.pattern:
            return None
        if self.time in NUMBERS:
            return {"iso": ISO_CLOCK, "epoch": EPOCH_CLOCK, "tai64n": TAI_CLOCK}[self.time]
        return Clock(form=self.time, missing=time_parts(self.time)[2], loose=self.loose)

    @cached_property
    def has_whole_time(self) -> bool:
        """Whether fraction and zone stand within the group `time`, if anywhere."""
        split = any(f"(?P<{part}>" in self.pattern for part in _TIME_PARTS)
        return not split and (self.time in ("iso", "epoch") or _SEPARATE.search(self.time) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """A sender's choice of formats for its input; by default formats are detected."""

    declared: tuple[str, ...] = ()  # packed declarations, tried before the known formats
    forced: str = ""  # this format alone


DETECTED: Final = FormatChoice()


def shown(name: str) -> str:
    """The name of a format for people."""
    return Declaration.unpack(name).name if name.startswith(MARK) else name


class _File(msgspec.Struct, frozen=True):
    """What a file declares. `zones`: only of the shipped one."""

    format: Annotated[list[Declaration], msgspec.Meta(min_length=1)]
    fragments: dict[str, str] = {}
    zones: dict[str, list[int] | dict[str, list[int]]] = {}


@cache
def _shipped() -> _File:
    return shipped_value("formats.toml", _File)


@cache
def shipped_formats() -> tuple[Declaration, ...]:
    """The formats of `config/formats.toml`, in the order in which they are tried. Raises BadInput."""
    return tuple(_complete(found, _fragments()) for found in _shipped().format)


def fragment(name: str) -> str:
    """The pattern of a shipped fragment."""
    return _whole(f"{{{name}}}", _fragments())


@cache
def _fragments() -> dict[str, str]:
    words = (word for word, minutes in _shipped().zones.items() if isinstance(minutes, list))
    return {"ABBREVIATION": "|".join(words), **_shipped().fragments}


@cache
def zone_words() -> Mapping[str, tuple[int, ...]]:
    """Minutes east of Greenwich by abbreviation. One that names several zones has the likeliest first."""
    found: dict[str, tuple[int, ...]] = {}
    for word, minutes in _shipped().zones.items():  # the table of seldom ones is among them
        several = minutes if isinstance(minutes, dict) else {word: minutes}
        found |= {one: tuple(offsets) for one, offsets in several.items()}
    return found


def read_formats(path: Path) -> list[Declaration]:
    """The declarations of a user's file, which may use the shipped fragments. Raises BadInput."""
    try:
        content = msgspec.convert(read_toml(path), _File)
    except OSError as exc:
        raise BadInput(f"{path} cannot be read ({exc.strerror}); check its name and permissions") from exc
    except msgspec.ValidationError as exc:
        raise BadInput(f"{path} is no file of formats: {exc}; see the head of config/formats.toml") from exc
    except ValueError as exc:  # TOML, UTF-8
        raise BadInput(f"{path} is no TOML file: {exc}") from exc
    if without := [n for n, one in enumerate(content.format, start=1) if not one.pattern]:
        raise BadInput(f"format {without[0]} of {path} has no 'pattern'; name and pattern are required")
    return [_complete(found, {**_fragments(), **content.fragments}) for found in content.format]


def _complete(found: Declaration, fragments: Mapping[str, str]) -> Declaration:
    """With whole patterns: those of a record begin where it does."""
    pattern = _GROUP.sub(r"(?P<\1>", _whole(found.pattern, fragments))
    if pattern and not pattern.startswith("^"):
        pattern = "^" + pattern
    return msgspec.structs.replace(found, pattern=pattern, unless=_whole(found.unless, fragments))


def _whole(pattern: str, fragments: Mapping[str, str]) -> str:
    """A pattern with its lines joined and its fragments in place. Other braces stay."""
    pattern = _FOLDED.sub("", pattern)
    for _ in range(_NESTED):
        longer = _FRAGMENT.sub(lambda found: _FOLDED.sub("", fragments.get(found[1], found[0])), pattern)
        if longer == pattern:
            break
        pattern = longer
    return pattern


def faults(found: Declaration) -> list[str]:
    """The faults of a declaration's words, a sentence each. Its pattern is not compiled here."""
    names = _GROUP.findall(found.pattern)
    wrong = []
    if not _NAME.fullmatch(found.name):
        wrong.append(f"the name {found.name!r} is not of lower-case letters, digits, and . _ - alone")
    if unknown := [name for name in names if name not in GROUPS]:
        wrong.append(f"the group {unknown[0]!r} is unknown; the groups are {', '.join(GROUPS)}")
    if "message" not in names:
        wrong.append("the pattern has no group (?P<message>...), which is required")
    if twice := [name for name in GROUPS if names.count(name) > 1]:
        wrong.append(f"the group {twice[0]!r} is there twice; name it once")
    try:
        time_parts(found.time)
    except BadInput as exc:
        wrong.append(str(exc))
    return wrong


def time_parts(form: str) -> tuple[str, str, Literal["", "year", "date"]]:
    """A pattern of the times of a strptime form, the form of its groups `p0`, `p1`, ... together, and the
    part that it lacks: "year", "date" or "". Fraction and zone are groups of their own.

    "iso" and "epoch" have a pattern alone. Raises BadInput for a directive that is not known here."""
    if form in NUMBERS:
        return _NUMBER_PATTERNS[form], "", ""
    pattern = plain = ""
    for place, piece in enumerate(_SEPARATE.split(form)):
        if place % 2:
            pattern += _FRACTION if piece.endswith("f") else _ZONE
        else:
            pattern += f"(?P<p{place // 2}>{_piece(piece, form)})"
            plain += piece
    directives = set(re.findall(r"%-?(.)", plain))
    if not directives & set("HIT"):
        raise BadInput(f"the time {form!r} has no hour; give a strptime form such as '%d.%m.%Y %H:%M:%S'")
    if not directives & set("deFj"):
        return pattern, plain, "date"
    return pattern, plain, "" if directives & set("YyF") else "year"


def _piece(text: str, form: str) -> str:
    out, at = "", 0
    for found in re.finditer(r"%-?(.?)", text):
        out += re.escape(text[at : found.start()])
        if found[1] not in _DIRECTIVES:
            directives = " ".join(f"%{name}" for name in (*_DIRECTIVES, "f", "z", "Z"))
            raise BadInput(f"the time {form!r} has the unknown part {found[0]!r}; known are {directives}")
        out += _DIRECTIVES[found[1]]
        at = found.end()
    return out + re.escape(text[at:])


def by_time(form: str) -> Declaration:
    """A format whose lines begin with a time of this form, in brackets or not. Raises BadInput."""
    pattern = _GROUP.sub("(?:", time_parts(form)[0])
    return Declaration(
        name="time",
        pattern=rf"^[\[(]?(?P<time>{pattern})[\])]?(?:[ \t]*[-|,;:]+)?(?:[ \t]+|$|\b)"
        rf"{_LEVEL}(?P<message>.*)$",
        time=form,
    )


USUAL_LEVELS: Final = (
    "TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|ERR|SEVERE|CRITICAL|CRIT|ALERT|EMERG|FATAL|PANIC"
)
_LEVEL: Final = (
    rf"(?:[\[<(]? *(?P<level>{USUAL_LEVELS}|(?i:{USUAL_LEVELS}))\b *[\]>)]?(?:[ \t]*[-|,;:]+)?(?:[ \t]+|$))?"
)


def choice(*, files: Sequence[Path] = (), forced: str | None = None, time: str | None = None) -> FormatChoice:
    """The choice of the flags --formats, --format and --time. Raises BadInput."""
    declarations = [found for path in files for found in read_formats(path)]
    if time is not None:
        declarations.insert(0, by_time(time))
    packed = {found.name: found.pack() for found in declarations}
    return FormatChoice(declared=tuple(packed.values()), forced=packed.get(forced or "", forced or ""))
