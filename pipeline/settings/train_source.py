"""The source of trainings: stored results, or log documents that lie in OpenSearch.

results | parquet | opensearch                       results, by the sink that has them
opensearch:logs-*?level_not=error,fatal&query=F.json  documents of other programs
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qsl

STORES: Final = ("results", "parquet", "opensearch")
PREFIX: Final = "opensearch:"
MAX_QUERY: Final = 64 << 10  # bytes of a query file
_OPTIONS: Final = ("level_not", "query")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSource:
    """`index` is "" for results. `level_not`: levels that are left out. `query`: a file with a clause."""

    store: str
    index: str = ""
    level_not: tuple[str, ...] = ()
    query: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError with a sentence."""
        if text in STORES:
            return cls(store=text)
        rest, _, options = text.removeprefix(PREFIX).partition("?")
        if not text.startswith(PREFIX) or not rest:
            raise ValueError(
                f"train_source {text!r} is none; write {', '.join(STORES)}, or opensearch:logs-*"
            )
        found = dict(parse_qsl(options, keep_blank_values=True))
        if unknown := [name for name in found if name not in _OPTIONS]:
            raise ValueError(f"train_source has no option {unknown[0]!r}; it takes {' and '.join(_OPTIONS)}")
        return cls(
            store="opensearch",
            index=checked_index(rest),
            level_not=level_words(found.get("level_not", "")),
            query=Path(found["query"]) if found.get("query") else None,
        )


def checked_index(text: str) -> str:
    """A name or pattern of indices, several with commas. Raises ValueError."""
    if not text or any(c in ' "\\/<>|#?' or not c.isprintable() for c in text) or text[0] in "_-+":
        raise ValueError(f"{text!r} names no index; write a name or pattern such as logs-*")
    return text


def level_words(text: str) -> tuple[str, ...]:
    """Words with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def query_clause(file: Path) -> str:
    """The clause of a file as JSON: the object itself, or what stands under `query`. Raises ValueError."""
    try:
        data = file.read_bytes()
        found = json.loads(data[: MAX_QUERY + 1])
    except (OSError, ValueError) as exc:
        raise ValueError(
            f"the query {file} cannot be read as JSON of at most {MAX_QUERY >> 10} KiB ({exc}); "
            'write a clause such as {"term": {"log_type": "workload"}}'
        ) from exc
    if isinstance(found, dict) and "query" in found:
        found = found["query"]
    if not isinstance(found, dict) or len(found) != 1:
        raise ValueError(
            f'the query {file} is no clause; write one such as {{"term": {{"log_type": "workload"}}}}'
        )
    return json.dumps(found, sort_keys=True)
