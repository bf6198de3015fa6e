"""Routes of the notes that people write on incidents."""

from typing import Annotated, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pipeline.service.handover.notes import add_note, notes_of
from pipeline.service.handover.values import IncidentNote
from pipeline.workers.api.acting import Body, MarkingSome, Name
from pipeline.workers.api.answering import StrictRoute, answers_with, as_json
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.stored import Seeing

router: Final = APIRouter(tags=["incidents"], route_class=StrictRoute)


class NoteBody(Body):
    """`text`: at most 2,000 characters, shown as text wherever it stands."""

    text: Annotated[str, Field(min_length=1, max_length=20_000)]


@router.get("/incidents/{incident}/notes", responses=answers_with(list[IncidentNote], "The oldest first."))
async def get_notes(request: Request, asker: Seeing, incident: Name) -> Response:
    """Notes on an incident: people write there what they saw, tried and agreed on."""
    api = api_of(request)
    return as_json(request, await api.facts(notes_of, api.client, api.settings, incident, asker.only))


@router.post(
    "/incidents/{incident}/notes",
    responses=answers_with(IncidentNote, "The note.", status=201),
    status_code=201,
)
async def post_incident_note(
    request: Request, asker: MarkingSome, incident: Name, body: NoteBody
) -> Response:
    """Writes a note on an incident. A note is never changed, and goes 90 days after the last one."""
    api = api_of(request)
    note = await api.facts(
        add_note, api.client, api.settings, incident, body.text, by=asker.name, only=asker.only
    )
    return as_json(request, note, status=201)
