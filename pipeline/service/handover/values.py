"""Values of answers about the handing over of an incident."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentNote:
    """What one person wrote, and when."""

    by: str
    at: datetime
    text: str
