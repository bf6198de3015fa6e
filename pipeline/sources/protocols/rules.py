"""Rules of a user that name the workload of records, by the hints that their protocol gives.

A file of TOML holds them (config/workloads.toml). The first rule that applies names the workload. A rule
applies if all its conditions hold and each hint of its template has a value. Where none applies, the name
that the protocol gives stays. A set of hints is looked at once, and its name is remembered.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from pipeline.errors import BadSetting
from pipeline.records.batch import MAX_NAME
from pipeline.records.remembered import remembered
from pipeline.settings.toml import read_toml
from pipeline.settings.values import nearest
from pipeline.sources.protocols.tables import tables
from pipeline.sources.protocols.workloads import joined_name, without_date

# The value of a hint of one record, "" where it has none.
HintsOf = Callable[[str], str]

HINTS: Final = tables().hints
LABEL: Final = "label."
_MAX_RULES: Final = 1_000
_MAX_TEXT: Final = 1_000  # characters of a glob, a template, and a value
_REMEMBERED, _LONGEST = 8_192, 500  # sets of hints, and characters of one
_PLACE: Final = re.compile(r"\{([^{}]*)\}")
# Kubernetes takes suffixes from this alphabet, so that they spell no word.
_LETTERS: Final = "[bcdfghjklmnpqrstvwxz2456789]"
_OF_POD: Final = re.compile(
    rf"(?<=.)(?:-(?:{_LETTERS}{{6,10}}|[0-9]{{6,10}})-{_LETTERS}{{5}}|-{_LETTERS}{{5}}|-[0-9]{{1,10}})$"
)
_ADDRESS: Final = re.compile(r"[0-9.]+|.*:.*")


def _short(host: str) -> str:
    return host if _ADDRESS.fullmatch(host) else host.partition(".")[0]


FILTERS: Final[Mapping[str, tuple[Callable[[str], str], str]]] = {
    "controller": (lambda pod: _OF_POD.sub("", pod), "cart-7f9c5d8b6-x2x8k and cart-0 become cart"),
    "undated": (without_date, "app-2026.11.20 becomes app"),
    "short": (_short, "web-17.shop.example becomes web-17"),
    "unnumbered": (lambda name: name.rstrip("0123456789").rstrip("-_."), "web-17 becomes web"),
}


class _Place(NamedTuple):
    """A hint in a template, and the filters that its value passes."""

    hint: str
    filters: tuple[str, ...]

    def value(self, of: HintsOf) -> str:
        value = of(self.hint)
        for name in self.filters:
            value = FILTERS[name][0](value)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `name`: for people. `when`: globs of each hint, of which one must match; "" is no value."""

    name: str
    when: Mapping[str, tuple[str, ...]]
    workload: str
    pieces: tuple[str | _Place, ...]  # of `workload`
    globs: Mapping[str, re.Pattern[str]]  # of `when`

    @property
    def needed(self) -> tuple[str, ...]:
        """The hints that it looks at."""
        return (*self.when, *(piece.hint for piece in self.pieces if isinstance(piece, _Place)))

    def apply(self, of: HintsOf) -> tuple[str, str]:
        """The workload and "", or "" and why the rule does not apply."""
        for hint, texts in self.when.items():
            value = of(hint)
            if not value and "" not in texts:
                return "", f"{hint} has no value"
            if value and self.globs[hint].fullmatch(value) is None:
                return "", f"{hint} is {value!r}, not {' or '.join(map(repr, texts))}"
        name = ""
        for piece in self.pieces:
            value = piece if isinstance(piece, str) else piece.value(of)
            if not value and isinstance(piece, _Place):
                return "", f"{piece.hint} has no value"
            name += value
        return joined_name(name), ""


class Ruling(NamedTuple):
    """The rule that names a workload, by its number from 1. `passed`: why each rule before it does not
    apply. 0 and "" where none does."""

    number: int
    workload: str
    passed: tuple[str, ...]


class WorkloadRules:
    """The rules of a file in their order. Safe for threads."""

    def __init__(self, rules: tuple[Rule, ...] = ()) -> None:
        self.rules = rules
        self.needed = tuple(dict.fromkeys(hint for rule in rules for hint in rule.needed))
        self._name_of = remembered(_REMEMBERED, _LONGEST)(self._ruled)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def named(self, of: HintsOf, default: str) -> str:
        """The workload of a record. `default`: the name without rules."""
        return self._name_of(*[of(hint)[:_MAX_TEXT] for hint in self.needed]) or default

    def _ruled(self, *values: str) -> str:
        return self.ruling(dict(zip(self.needed, values, strict=True)).__getitem__).workload

    def ruling(self, of: HintsOf) -> Ruling:
        """The first rule that applies."""
        passed: list[str] = []
        for number, rule in enumerate(self.rules, start=1):
            name, why = rule.apply(of)
            if name:
                return Ruling(number, name, tuple(passed))
            passed.append(why)
        return Ruling(0, "", tuple(passed))


NO_RULES: Final = WorkloadRules()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workload: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]
    name: str = ""
    when: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: Annotated[list[_Entry], msgspec.Meta(min_length=1, max_length=_MAX_RULES)]


def read_rules(path: Path | None) -> WorkloadRules:
    """The rules of a file, none for None. Raises BadSetting."""
    if path is None:
        return WorkloadRules()
    where = f"the rules of workloads in {path}"
    try:
        entries = msgspec.convert(read_toml(path), _File).rule
    except OSError as exc:
        raise BadSetting(f"{where} cannot be read ({exc.strerror}); correct workload_rules") from exc
    except msgspec.ValidationError as exc:
        raise BadSetting(f"{where} are wrong: {exc}; config/workloads.toml is an example") from exc
    except ValueError as exc:  # TOML, UTF-8
        raise BadSetting(f"{where} are no TOML: {exc}") from exc
    rules: list[Rule] = []
    for number, entry in enumerate(entries, start=1):
        if rules and not rules[-1].needed:
            raise BadSetting(
                f"rule {number} of {path} is never asked, because rule {number - 1} names every line; move "
                f"rule {number - 1} to the end"
            )
        rules.append(_rule(entry, number, f"rule {number} of {path}"))
    return WorkloadRules(tuple(rules))


def check_hint(name: str, where: str) -> str:
    """Raises BadSetting for what is no hint."""
    if name in HINTS or (name.startswith(LABEL) and name != LABEL):
        return name
    guess = nearest(name, HINTS, limit=1)
    remedy = f"did you mean {guess[0]!r}?" if guess else f"known are {', '.join(HINTS)}, and label.NAME"
    raise BadSetting(f"{where} has the unknown hint {name!r}; {remedy}")


def _rule(entry: _Entry, number: int, where: str) -> Rule:
    globs = {hint: _globs(hint, value, where) for hint, value in _flat(entry.when)}
    pieces = tuple(_pieces(entry.workload, where))
    if all(isinstance(piece, str) for piece in pieces) and len(entry.workload) > MAX_NAME:
        raise BadSetting(
            f"{where} has a workload of {len(entry.workload)} characters; use at most {MAX_NAME}"
        )
    return Rule(
        name=entry.name or str(number),
        when=globs,
        workload=entry.workload,
        pieces=pieces,
        globs={hint: re.compile("|".join(map(fnmatch.translate, texts))) for hint, texts in globs.items()},
    )


def _flat(when: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Conditions by hint. TOML reads label.app without quotes as a table in a table."""
    found: list[tuple[str, Any]] = []
    for key, value in when.items():
        found += _flat(value, f"{above}{key}.") if isinstance(value, dict) else [(above + key, value)]
    return found


def _globs(hint: str, value: Any, where: str) -> tuple[str, ...]:
    check_hint(hint, where)
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise BadSetting(f"{where} wants {hint} to be {text!r}; write a text with * and ? in quotes")
    if not texts:
        raise BadSetting(f"{where} has no text for {hint}; write one, or leave the condition out")
    return tuple(texts)


def _pieces(template: str, where: str) -> list[str | _Place]:
    pieces: list[str | _Place] = []
    for place, piece in enumerate(_PLACE.split(template)):
        if place % 2 == 0:
            if "{" in piece or "}" in piece:
                raise BadSetting(
                    f"{where} has the workload {template!r} with a single brace; write hints as {{namespace}}"
                )
            pieces += [piece] if piece else []
            continue
        hint, *filters = (part.strip() for part in piece.split("|"))
        check_hint(hint, where)
        if unknown := [name for name in filters if name not in FILTERS]:
            known = ", ".join(FILTERS)
            raise BadSetting(f"{where} has the unknown filter {unknown[0]!r}; known are {known}")
        pieces.append(_Place(hint, tuple(filters)))
    return pieces
