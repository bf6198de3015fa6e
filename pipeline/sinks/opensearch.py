"""Results in OpenSearch: one document per record, in daily indices.

`_id` is the record id, so writes are idempotent and delivery is exactly once in effect. The index is
`<prefix>-<kind>-YYYY.MM.DD` by the record's own time in UTC, without write alias or rollover. An index state
management policy on `<prefix>-results-*` deletes whole days (see deploy/opensearch). A batch id always has
the same records."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import polars as pl

from pipeline.errors import Rejected, SinkUnavailable
from pipeline.opensearch import bulk
from pipeline.opensearch.client import is_absence, opensearch_client, translate_errors
from pipeline.opensearch.documents import (
    NAME_LENGTH,
    RESULT_PROPERTIES,
    documents,
    ensure_template,
    frame_of,
    index_template,
    indices,
)
from pipeline.records.batch import SEVERAL, utc_now
from pipeline.settings import Settings
from pipeline.sinks.sink import Last, at_once

PAGE: Final = 5_000  # documents a search answers at once; the server's own limit is 10,000


class OpenSearchSink:
    """Writes to and reads back from the indices of one kind: "results" or "baseline"."""

    def __init__(
        self,
        settings: Settings,
        *,
        kind: str = "results",
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.indices = indices(settings, kind)  # the pattern of all of this sink
        self.prefix = self.indices.removesuffix("-*")
        self._client = opensearch_client(settings)
        self._sleep = sleep
        self._jitter = jitter

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Stores a batch's results (RESULT_SCHEMA), replacing documents of the same record ids.

        Raises SinkUnavailable for errors that can heal, and the errors of `last` before the first write.
        Raises Rejected with the records that the server refuses, after all others are stored."""
        timeless = frame.filter(pl.col("timestamp").is_null())
        if timeless.height:
            raise Rejected(
                f"the record {timeless['record_id'][0]} has no timestamp, so it has no daily index",
                timeless["record_id"].to_list(),
            )
        task = f"results cannot be written to {self.indices}"
        with translate_errors(task, SinkUnavailable):
            # Before every write, 2 ms: without its template, after an index was dropped or a server came back
            # empty, a new index would guess its mapping from the first document.
            ensure_template(self._client, self.prefix, index_template(self.indices, RESULT_PROPERTIES))
        last()
        bulk.write_documents(
            self._client,
            documents(frame, batch_id, self.prefix),
            task,
            sleep=self._sleep,
            jitter=self._jitter,
        )

    def write_all(self, batches: Sequence[tuple[str, pl.DataFrame]], *, last: Last = at_once) -> None:
        """`write` for each batch."""
        for batch_id, frame in batches:
            self.write(batch_id, frame, last=last)

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results in the order they were written, None when there are none.

        Sees every write that was acknowledged before. No point in time is needed: positions are unique in a
        batch and never change, so no page can miss or repeat one. Raises SinkUnavailable.
        """
        task = f"results of the batch {batch_id} ({workload}) cannot be read from {self.indices}"
        found = [hit["_source"] for hit in self._hits(batch_id, workload, task)]
        return frame_of(found) if found else None

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Removes the documents of this batch id; documents that another batch replaced stay.

        Raises SinkUnavailable, and the errors of `last` between search and removal.
        """
        task = f"results of the batch {batch_id} ({workload}) cannot be removed from {self.indices}"
        # Not a delete by query: it reads by a scroll, which a role without `scroll/clear` leaves open for
        # minutes, and the five-hundredth scroll blocks the server. A document that changes meanwhile stays.
        removals = [
            bulk.Removal(
                index=hit["_index"],
                id=hit["_id"],
                seq_no=hit["_seq_no"],
                primary_term=hit["_primary_term"],
            )
            for hit in self._hits(batch_id, workload, task, versions=True)
        ]
        last()
        bulk.remove_documents(self._client, removals, task, sleep=self._sleep, jitter=self._jitter)

    def probe(self) -> str:
        """Says whether results can be written today; changes nothing. Raises SinkUnavailable."""
        # Any user may ask for a pattern without a match; only a name shows the rights.
        day = f"{self.prefix}-{utc_now():%Y.%m.%d}"
        task = f"results cannot be written to {day}"
        try:
            with translate_errors(task, SinkUnavailable):
                self._client.count(index=day)
                self._client.indices.exists_index_template(name=self.prefix)
            answer = f"{day} can be read and written"
        except SinkUnavailable as exc:
            if not is_absence(exc.__cause__):
                raise
            answer = f"{day} will be made with the first result"
        # No document has this id and version: the server refuses the version, or the user.
        bulk.remove_documents(
            self._client, [bulk.Removal(index=day, id="probe", seq_no=2**53, primary_term=1)], task
        )
        return answer

    def _hits(
        self, batch_id: str, workload: str, task: str, *, versions: bool = False
    ) -> list[dict[str, Any]]:
        """The documents of a batch by position, with their sources or with their versions."""
        found: list[dict[str, Any]] = []
        with translate_errors(task, SinkUnavailable):
            self._client.indices.refresh(index=self.indices)
            after: list[Any] | None = None
            while True:
                hits = self._client.search(
                    index=self.indices,
                    body={
                        "size": PAGE,
                        "query": _of(batch_id, workload),
                        "sort": [{"position": {"order": "asc", "unmapped_type": "integer"}}],
                        "track_total_hits": False,
                        "_source": not versions,
                        "seq_no_primary_term": versions,
                        **({"search_after": after} if after else {}),
                    },
                    # Half an answer would look like a whole batch.
                    params={"allow_partial_search_results": "false"},
                )["hits"]["hits"]
                found += hits
                if len(hits) < PAGE:
                    return found
                after = hits[-1]["sort"]


def _of(batch_id: str, workload: str) -> dict[str, Any]:
    wanted = {"batch_id": batch_id, "workload": workload}
    # A name too long is not indexed, and documents of a batch of several workloads have theirs: the batch id
    # alone suffices.
    terms = [
        {"term": {name: value}}
        for name, value in wanted.items()
        if len(value) <= NAME_LENGTH and value != SEVERAL
    ]
    return {"bool": {"filter": terms}}
