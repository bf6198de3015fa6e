"""Formats that a user declares, as data: entries of a TOML file, or the form of the time alone.

A declaration travels with the batches that it was used on, as their format's name: workers need no file, and
every worker reads a batch in the same way. `sources.formats` makes a format of it."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from pipeline.errors import BadInput

GROUPS: Final = ("time", "level", "service", "host", "process", "message")
NUMBERS: Final = ("iso", "epoch")  # a time that needs no form
MARK: Final = "{"  # a declaration begins so, and no name of a format does
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_GROUP: Final = re.compile(r"\(\?P?<([A-Za-z_][A-Za-z0-9_]*)>")
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
    "epoch": r"[0-9]{9,19}(?:\.[0-9]+)?",
    "iso": r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{1,2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?"
    r"(?: ?(?:Z|UTC|GMT|[+-][0-9]{2}:?[0-9]{2}))?",
}
_ZONE: Final = " ?(?P<zone>[A-Z]{1,5}|[+-][0-9]{2}:?[0-9]{2})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One entry. `time` is a strptime form, "iso" or "epoch"; `zone` "" is that of the settings."""

    name: str
    pattern: str  # a Rust regular expression with groups of GROUPS
    time: str = "iso"
    zone: str = ""
    example: str = ""

    def pack(self) -> str:
        """The text that travels; the example stays."""
        return json.dumps(asdict(self) | {"example": ""}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def unpack(cls, text: str) -> "Declaration":
        """Raises BadInput."""
        try:
            return _declaration(json.loads(text), "a batch")
        except ValueError as exc:
            raise BadInput(f"the format {text[:80]!r} of a batch cannot be read: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """A sender's choice of formats for its input; by default formats are detected."""

    declared: tuple[str, ...] = ()  # packed declarations, tried before the known formats
    forced: str = ""  # this format alone


DETECTED: Final = FormatChoice()


def shown(name: str) -> str:
    """The name of a format for people."""
    return Declaration.unpack(name).name if name.startswith(MARK) else name


def read_formats(path: Path) -> list[Declaration]:
    """The declarations of a file. Raises BadInput."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("format", [])
    except OSError as exc:
        raise BadInput(f"{path} cannot be read ({exc.strerror}); check its name and permissions") from exc
    except ValueError as exc:  # TOML, UTF-8
        raise BadInput(f"{path} is no TOML file: {exc}") from exc
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"{path} declares no format; begin each with a line [[format]]")
    return [_declaration(entry, f"format {n} of {path}") for n, entry in enumerate(entries, start=1)]


def _declaration(entry: Any, where: str) -> Declaration:
    names = [field.name for field in fields(Declaration)]
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise BadInput(f"{where} has a value that is no text; write each as text in quotes")
    if unknown := [name for name in entry if name not in names]:
        raise BadInput(f"{where} has the unknown key {unknown[0]!r}; the keys are {', '.join(names)}")
    if missing := [name for name in ("name", "pattern") if not entry.get(name)]:
        raise BadInput(f"{where} has no {missing[0]!r}; name and pattern are required")
    pattern = _GROUP.sub(r"(?P<\1>", entry["pattern"])
    pattern = pattern if pattern.startswith("^") else "^" + pattern
    return Declaration(**(entry | {"pattern": pattern}))


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


_LEVELS: Final = "TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|ERR|SEVERE|CRITICAL|CRIT|ALERT|EMERG|FATAL|PANIC"
_LEVEL: Final = (
    rf"(?:[\[<(]? *(?P<level>{_LEVELS}|(?i:{_LEVELS}))\b *[\]>)]?(?:[ \t]*[-|,;:]+)?(?:[ \t]+|$))?"
)


def choice(*, files: Sequence[Path] = (), forced: str | None = None, time: str | None = None) -> FormatChoice:
    """The choice of the flags --formats, --format and --time. Raises BadInput."""
    declarations = [found for path in files for found in read_formats(path)]
    if time is not None:
        declarations.insert(0, by_time(time))
    packed = {found.name: found.pack() for found in declarations}
    return FormatChoice(declared=tuple(packed.values()), forced=packed.get(forced or "", forced or ""))
