"""The PATTERN of `logweir mark`: digits are a pattern id, `T` and digits a template, all else is a text.

The text is a line, with or without its header, a masked line, or a template with its `<*>`.
"""

import functools
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import polars as pl
import redis

from pipeline.drain.learner import read_templates
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Template, unpack_template
from pipeline.drain.tree import WILDCARD
from pipeline.drain.verdicts import WARMING_VERSION, Verdicts
from pipeline.errors import BadBundle, BadInput, BadPayload, SourceUnavailable, StoreUnavailable, TooNew
from pipeline.marks.marks import Target
from pipeline.models.registry import Registry
from pipeline.records.batch import utc_now
from pipeline.records.schema import RESULT_SCHEMA, raw_frame
from pipeline.records.verdict import UNCLASSIFIED, pattern_ids
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sources import formats
from pipeline.sources.framing import MAX_RECORD_BYTES
from pipeline.sources.lines import decode

_PATTERN_ID: Final = re.compile(r"[0-9]{1,20}")
_TEMPLATE_ID: Final = re.compile(r"[Tt](-?[0-9]{1,19})")  # up to 63 bits
_PAGE_FILES: Final = 256
_ENOUGH_S: Final = 2.0  # spent on counting; whether a line was seen at all is looked for to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecords:
    """Stored records of a pattern or a template, newest first."""

    records: int = 0
    message: str = ""  # of the newest
    template_id: int = UNCLASSIFIED
    complete: bool = True  # False: there may be more


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The lines that a PATTERN means."""

    target: Target
    text: str  # masked line or template
    stored: StoredRecords
    template: int | None = None  # of a pattern, where it is known
    remarks: tuple[str, ...] = ()


class Finder:
    """Looks PATTERNs up in what the running stack knows and has stored. Methods raise RedisUnavailable."""

    def __init__(
        self,
        client: "redis.Redis",
        settings: Settings,
        looking: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`looking`: around a search through the stored lines, which may take seconds."""
        self.client = client
        self.settings = settings
        self.looking = looking
        self.keys = Keys(settings.redis.key_prefix)

    @functools.cached_property
    def masks(self) -> MaskSet:
        return MaskSet.load(extra=self.settings.intake.masks)

    def find(self, pattern: str) -> Named:
        """Raises BadInput for what can be nothing, and for ids that nobody has seen."""
        if _PATTERN_ID.fullmatch(pattern.strip()):
            return self._pattern(int(pattern))
        if match := _TEMPLATE_ID.fullmatch(pattern.strip()):
            return self._template(int(match[1]))
        text = _text(pattern)
        if WILDCARD in text:
            return self._template_text(text)
        return self._line(text)

    def find_line(self, text: str) -> Named:
        """The pattern of a line, whatever it looks like. Raises BadInput."""
        return self._line(_checked(text))

    def targets_of_line(self, text: str) -> tuple[list[Target], str]:
        """The possible targets of a line, and its text. Raises BadInput."""
        text = _checked(text)
        return [Target.pattern(number) for _, number in self._readings(text)[0]], text

    def targets(self, pattern: str) -> tuple[list[Target], str]:
        """The possible targets of a PATTERN, stored or not, and its text ("" for an id)."""
        if _PATTERN_ID.fullmatch(pattern.strip()):
            return [Target.pattern(int(pattern))], ""
        if match := _TEMPLATE_ID.fullmatch(pattern.strip()):
            return [Target.template(int(match[1]))], ""
        return self.targets_of_line(_text(pattern))

    def _pattern(self, number: int) -> Named:
        if number >= 2**64:
            raise BadInput(f"{number} is no pattern id; `logweir results --json` shows them")
        cached, stored = self._cached(number), self._stored("pattern_id", number)
        if cached is None and not stored.records and stored.complete:
            template = self._known_template(number) if number < 2**63 else None
            instead = (
                f"template T{number} is written with its T" if template else "a line's text does as well"
            )
            raise BadInput(
                f"no line with pattern id {number} was seen; `logweir results --json` shows the ids, and "
                f"{instead}"
            )
        template_id = cached or stored.template_id
        masked = self.masks.mask_one(stored.message) if stored.records else ""
        if pattern_ids([masked]) != [number]:  # stored under other masks, or not to be read now
            template_known = self._known_template(template_id)
            masked = template_known.text if template_known else stored.message
        return Named(
            target=Target.pattern(number),
            text=masked,
            stored=stored,
            template=template_id or None,
            remarks=self._doubts(stored),
        )

    def _template(self, number: int) -> Named:
        if number == UNCLASSIFIED:
            raise BadInput(
                "T0 stands for lines past the template limit of their workload; mark their text instead"
            )
        if number < 0:
            return self._finding(number)
        template = self._known_template(number)
        if template is None:
            raise BadInput(f"there is no template T{number}; `logweir results --json` shows template_id")
        return Named(
            target=Target.template(number), text=template.text, stored=self._stored("template_id", number)
        )

    def _finding(self, number: int) -> Named:
        """A finding in sessions or rates, with the text of its newest row."""
        stored = self._stored("template_id", number)
        if not stored.records and stored.complete:
            raise BadInput(
                f"nothing that was found in sessions or rates has the id T{number}; `logweir incidents ID` "
                "shows the ids"
            )
        return Named(
            target=Target.template(number), text=stored.message, stored=stored, remarks=self._doubts(stored)
        )

    def _template_text(self, text: str) -> Named:
        words = " ".join(text.split())
        with answering():
            found = [t for t in read_templates(self.client, self.keys) if t.text == words]
        if not found:
            raise BadInput(
                f"no template reads {_short(words)!r}; give the text of a line, or pipe this one in with "
                "`logweir mark -` "
                f"when {WILDCARD} really stands in it"
            )
        if len(found) > 1:
            names = ", ".join(f"T{t.template_id}" for t in found)
            raise BadInput(f"{names} all read {_short(words)!r}; name the one that is meant")
        return self._template(found[0].template_id)

    def _line(self, text: str) -> Named:
        readings, sure = self._readings(text)
        found: list[tuple[str, int, int | None, StoredRecords]] = []
        for masked, number in readings:
            cached, stored = self._cached(number), self._stored("pattern_id", number, patient=False)
            found.append((masked, number, cached, stored))
            if cached is not None or stored.records:
                break
        else:
            # Neither was stored: only an unambiguous header counts as one.
            found = found[:1] if sure else found[-1:]
        masked, number, cached, stored = found[-1]
        return Named(
            target=Target.pattern(number),
            text=masked,
            stored=stored,
            template=(cached or stored.template_id) or None,
            remarks=self._other_masks(),
        )

    def _readings(self, text: str) -> tuple[list[tuple[str, int]], bool]:
        """`(masked, pattern id)` of the text without and with its header; whether the header is beyond
        doubt."""
        names = formats.detect([text])
        parsed = formats.parse(raw_frame([text]), names, arrived=utc_now())["message"][0] or ""
        messages = pl.Series("message", [parsed, text], dtype=pl.String)
        rows = self.masks.mask(messages).unique(maintain_order=True)
        sure = bool({*names} - {"level"})
        return list(zip(rows["masked"].to_list(), rows["pattern_id"].to_list(), strict=True)), sure

    def _cached(self, number: int) -> int | None:
        """The template id of a pattern that the verdict cache knows, None for one it does not."""
        versions = [live.version for live in Registry(self.client, self.settings).live()]
        cache = Verdicts(self.client, self.settings)
        for version in (*versions, WARMING_VERSION):
            for verdict in cache.lookup(version, [number, number ^ 1]).values():
                return verdict.template_id
        return None

    def _known_template(self, number: int) -> Template | None:
        with answering():
            blob = self.client.hget(self.keys.templates, str(number))
        if blob is None:
            return None
        try:
            return unpack_template(number, blob)  # type: ignore[arg-type] # of redis-py
        except (BadPayload, TooNew):
            return Template(template_id=number, text="", severe=False, workload="")

    def _stored(self, column: str, number: int, *, patient: bool = True) -> StoredRecords:
        """`patient`: look on until one is found, however long that takes."""
        with self.looking():
            if "parquet" in self.settings.data.sinks:
                return _in_files(self.settings, column, number, patient=patient)
            from pipeline.opensearch.client import opensearch_client
            from pipeline.opensearch.newest import with_number

            try:
                count, newest = with_number(opensearch_client(self.settings), self.settings, column, number)
            except SourceUnavailable:
                return StoredRecords(complete=False)
            found = newest or {}
            return StoredRecords(
                records=count,
                message=str(found.get("message") or ""),
                template_id=int(found.get("template_id") or UNCLASSIFIED),
            )

    def _doubts(self, stored: StoredRecords) -> tuple[str, ...]:
        if stored.records or stored.complete:
            return ()
        return ("the stored lines cannot be read now, so nobody knows whether any has this id",)

    def _other_masks(self) -> tuple[str, ...]:
        """A text is masked here: where the workers mask otherwise, its mark would be about nothing."""
        registry = Registry(self.client, self.settings)
        live = registry.current()
        try:
            if live is None or registry.stored.manifest(live.version).mask_version == self.masks.version:
                return ()
        except (BadBundle, StoreUnavailable):
            return ()
        return (
            "the live model was trained under other masks than these; if the workers have masks of their "
            "own, set masks "
            "(LOGWEIR_MASKS) here as there, or mark the pattern id",
        )


def _in_files(settings: Settings, column: str, number: int, *, patient: bool) -> StoredRecords:
    sink = parquet_of(settings)
    parts = sink.parts()[::-1]  # newest first
    began, records, complete = time.monotonic(), 0, True
    newest: dict[str, Any] = {}
    wanted = pl.col(column) == pl.lit(number, dtype=RESULT_SCHEMA[column])
    for at in range(0, len(parts), _PAGE_FILES):
        if time.monotonic() - began > _ENOUGH_S and (records or not patient):
            return _stored_records(records, newest, complete=False)
        page = parts[at : at + _PAGE_FILES]
        try:
            (row,) = (
                sink.lazy(page)
                .filter(wanted)
                .select(pl.len().alias("n"), pl.col("message", "template_id").first())
                .collect()
                .to_dicts()
            )
        except (pl.exceptions.PolarsError, OSError):  # damaged, or taken back at this moment
            complete = False
            continue
        if row["n"] and not records:
            newest = row
        records += row["n"]
    return _stored_records(records, newest, complete=complete)


def _stored_records(records: int, newest: dict[str, Any], *, complete: bool) -> StoredRecords:
    return StoredRecords(
        records=records,
        message=newest.get("message") or "",
        template_id=newest.get("template_id") or UNCLASSIFIED,
        complete=complete,
    )


def _text(pattern: str) -> str:
    """The text of a record on the command line, which may hold any bytes, read as a log file would be."""
    return _checked(decode(os.fsencode(pattern)).rstrip("\r\n"))


def _checked(text: str) -> str:
    if not text.strip():
        raise BadInput("PATTERN is empty; give a pattern id, a template such as T17, or the text of a line")
    if len(text.encode()) > MAX_RECORD_BYTES:
        raise BadInput(
            f"a record has at most {MAX_RECORD_BYTES // 1024} KiB, longer lines are stored in pieces; give "
            "the pattern id of "
            "one, which `logweir results --json` shows"
        )
    return text


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
