"""The route that gives stored lines as tables: all columns of any number of lines, a page at a time."""

from functools import partial
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from pipeline.service.questions import TABLE_PAGE
from pipeline.service.stored.tables import table_page
from pipeline.workers.api.answering import StrictRoute, answers_with
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.stored import LinesFilters, Seeing

MEDIA: Final = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet"}
router: Final = APIRouter(tags=["stored"], route_class=StrictRoute)


class ExportQuery(LinesFilters):
    """Filters of lines, and the kind of table."""

    format: Literal["csv", "parquet"] = Field("csv", description="Delta tables are made of Parquet.")
    limit: int = Field(TABLE_PAGE, ge=1, le=TABLE_PAGE, description="Lines of a page.")


def _tables() -> dict[int | str, dict[str, Any]]:
    """The answers for the specification: files, with the next page in a header."""
    names = {
        "X-Lines": ("integer", "Lines of this page."),
        "X-Missing": ("integer", "On the first page: stored lines of the span whose files are gone."),
        "X-Next": ("string", "The cursor of the next page; absent at the end."),
        "Link": ("string", "The address of the next page, as rel=next; absent at the end."),
    }
    found: dict[str, Any] = {
        "description": "Lines, the newest first; the first page of a CSV has the header.",
        "content": {media: {"schema": {"type": "string"}} for media in MEDIA.values()},
        "headers": {
            name: {"schema": {"type": kind}, "description": text} for name, (kind, text) in names.items()
        },
    }
    return {200: found, "default": answers_with(None, "")["default"]}


@router.get("/export", responses=_tables(), response_class=Response)
async def get_export(request: Request, asker: Seeing, query: Annotated[ExportQuery, Query()]) -> Response:
    """Stored lines that match, with all columns. Pages follow each other by cursor: a download that was cut
    goes on with the page that is missing."""
    api, asked = api_of(request), query.asked(asker, limit=query.limit)
    page = await api.stored(request, partial(table_page, asked=asked, kind=query.format))
    headers = {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Lines": str(page.lines),
        **({"X-Missing": str(page.missing)} if asked.cursor is None else {}),
        "Content-Disposition": f'attachment; filename="lines.{query.format}"',
    }
    if page.next is not None:
        again = {**request.query_params, "cursor": page.next}
        headers |= {"X-Next": page.next, "Link": f'<{request.url.path}?{urlencode(again)}>; rel="next"'}
    return Response(page.body, headers=headers, media_type=MEDIA[query.format])
