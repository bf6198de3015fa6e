"""The templates as an index of their own, so that a dashboard can name what a template id stands for."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from opensearchpy import OpenSearch

from pipeline.errors import SinkUnavailable
from pipeline.opensearch import bulk
from pipeline.opensearch.client import translate_errors
from pipeline.opensearch.documents import TEMPLATE_PROPERTIES, Document, ensure_template, index_template
from pipeline.settings import Settings

if TYPE_CHECKING:  # drain3 is heavy, and only the type is needed
    from pipeline.drain.templates import Template


def templates_index(settings: Settings) -> str:
    """The name of the index; one, not daily: a template lives as long as its id."""
    return f"{settings.opensearch.prefix}-templates"


def write_templates(client: OpenSearch, settings: Settings, templates: "Iterable[Template]") -> int:
    """Stores templates under their ids; returns their number. Raises SinkUnavailable, Rejected."""
    index = templates_index(settings)
    task = f"templates cannot be written to {index}"
    ready = [
        Document(
            index=index,
            id=str(template.template_id),
            body=json.dumps(
                {
                    "template_id": template.template_id,
                    "text": template.text,
                    "severe": template.severe,
                    "workload": template.workload,
                }
            ).encode(),
        )
        for template in templates
    ]
    with translate_errors(task, SinkUnavailable):
        ensure_template(client, index, index_template(index, TEMPLATE_PROPERTIES))
    bulk.write_documents(client, ready, task)
    return len(ready)
