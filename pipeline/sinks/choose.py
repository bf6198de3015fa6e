"""The sinks that the settings name. A new sink is one line here."""

from collections.abc import Callable, Mapping
from typing import Final

from pipeline.records.batch import Purpose
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.several import Several
from pipeline.sinks.sink import Sink
from pipeline.sinks.usage import UsageTable
from pipeline.store.choose import open_store


def sinks_for(settings: Settings) -> dict[Purpose, Sink]:
    """A sink per purpose: scored and baseline records are stored apart. Nothing is opened yet."""
    return {purpose: _all(settings, purpose) for purpose in Purpose}


def _all(settings: Settings, purpose: Purpose) -> Sink:
    sinks = [_KINDS[name](settings, purpose) for name in settings.data.sinks]
    if settings.nats.source and purpose is Purpose.SCORE:
        sinks.append(_nats(settings))
    return sinks[0] if len(sinks) == 1 else Several(sinks)


def parquet_of(settings: Settings, purpose: Purpose = Purpose.SCORE) -> ParquetSink:
    """The Parquet files of a purpose; nothing is opened yet."""
    url = settings.data.results_url if purpose is Purpose.SCORE else settings.data.baseline_url
    return ParquetSink(open_store(url), settings.data.dir / "cache")


def usage_of(settings: Settings) -> UsageTable:
    """The records of GPU use, whatever the sinks are; nothing is opened yet."""
    return UsageTable(open_store(settings.data.results_url), settings.data.dir / "cache")


def kind_of(purpose: Purpose) -> str:
    """The kind of OpenSearch index that a purpose has."""
    return "results" if purpose is Purpose.SCORE else "baseline"


def _opensearch(settings: Settings, purpose: Purpose) -> Sink:
    from pipeline.sinks.opensearch import OpenSearchSink  # the client takes 0.1 s to import

    return OpenSearchSink(settings, kind=kind_of(purpose))


def _nats(settings: Settings) -> Sink:
    """Where answers to Opni's services go, beside the stores of results."""
    from pipeline.sinks.nats import NatsSink  # the client is of the extra `nats`

    return NatsSink(settings)


_KINDS: Final[Mapping[str, Callable[[Settings, Purpose], Sink]]] = {
    "parquet": parquet_of,
    "opensearch": _opensearch,
}
