"""The hints of rules.py in the words of each protocol, and the workloads that rules give by them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pipeline.sources.protocols.contract import Hints
from pipeline.sources.protocols.document_fields import DocumentFields, Kubernetes, NamedObject, name_of
from pipeline.sources.protocols.json_text import at_path, read_or_none
from pipeline.sources.protocols.rules import LABEL, HintsOf
from pipeline.sources.protocols.tables import Names, tables
from pipeline.sources.protocols.workloads import cluster_of, owner_of

RESOURCE, STREAM, JOURNAL, PLAIN = (
    tables().origins[name] for name in ("resource", "stream", "journal", "plain")
)
# Where a shipper may have put the labels of a pod.
_ABOVE: Final = ("", "kubernetes.labels.", "kubernetes.pod_labels.", "k8s.pod.label.", "k8s.pod.labels.")
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_NO_POD: Final = Kubernetes()


def by_rules(hints: Hints, names: Names, facts: Mapping[str, object], default: str, *, peer: str = "") -> str:
    """The workload of a stream, or of a request, that says these facts. A chosen workload stays.

    `default`: the name without rules; `peer`: where that of the hints is not the sender's."""
    if hints.workload or not hints.rules:
        return default

    def of(hint: str) -> str:
        if hint.startswith(LABEL):
            label = hint.removeprefix(LABEL)
            return next(filter(None, (_text(facts.get(above + label)) for above in _ABOVE)), "")
        return next((text for name in names.get(hint, ()) if (text := _text(facts.get(name)))), "")

    return _named(hints, of, default, peer=peer or hints.peer)


def by_event(hints: Hints, facts: Mapping[str, object], event: bytes, default: str) -> str:
    """Of an event of Splunk. A label is one of the facts, or a field of an event that is an object."""
    if hints.workload or not hints.rules:
        return default
    document: list[dict[str, Any]] = []

    def of(hint: str) -> str:
        name = hint.removeprefix(LABEL)
        if name == hint:
            return _text(facts.get(name)) if name in PLAIN else ""
        if (text := _text(facts.get(name))) or event[:1] != b"{":
            return text
        if not document:
            document.append(read_or_none(_OBJECT, event.decode("utf-8", "replace")) or {})
        return _text(at_path(document[0], name))

    return _named(hints, of, default, peer=hints.peer)


def by_documents(
    hints: Hints,
    documents: Sequence[DocumentFields],
    lines: Sequence[str],
    indices: Sequence[str],
    defaults: list[str],
) -> list[str]:
    """Of JSON documents. `lines`: their texts, which are read again where a rule asks for a label."""
    if hints.workload or not hints.rules:
        return defaults
    reads = any(hint.startswith(LABEL) for hint in hints.rules.needed)
    names: list[str] = []
    for fields, line, index, default in zip(documents, lines, indices, defaults, strict=True):
        document = (read_or_none(_OBJECT, line) or {}) if reads else {}

        def of(
            hint: str, fields: DocumentFields = fields, document: Any = document, index: str = index
        ) -> str:
            if hint.startswith(LABEL):
                label = hint.removeprefix(LABEL)
                return next(filter(None, (_text(at_path(document, above + label)) for above in _ABOVE)), "")
            return index if hint == "index" else _of_document(fields, hint)

        names.append(_named(hints, of, default, peer=hints.peer))
    return names


def _named(hints: Hints, of: HintsOf, default: str, *, peer: str) -> str:
    known = {"protocol": hints.protocol, "key": hints.key, "peer": peer, "workload": default}
    return hints.rules.named(lambda hint: known[hint] if hint in known else of(hint), default)


def _of_document(fields: DocumentFields, hint: str) -> str:
    pod = fields.kubernetes if isinstance(fields.kubernetes, Kubernetes) else _NO_POD
    match hint:
        case "cluster":
            return cluster_of(pod, fields)
        case "namespace":
            inner = fields.service.namespace if isinstance(fields.service, NamedObject) else None
            known = (pod.namespace_name, pod.pod_namespace, pod.namespace, inner, fields.service_namespace)
            return name_of(*known)
        case "app":
            return owner_of(pod) or name_of(fields.app, fields.application)
        case "pod":
            return name_of(pod.pod_name, pod.pod)
        case "container":
            return name_of(pod.container_name, pod.container, fields.container_name).lstrip("/")
        case "service":
            return name_of(fields.service, fields.service_name)
        case "host":
            return name_of(fields.host, fields.hostname)
        case "program":
            return name_of(fields.appname, fields.app_name, fields.programname, fields.program)
    return ""


def _text(value: object) -> str:
    """A text, a number or a truth value as text; "" for anything else."""
    match value:
        case str():
            return value
        case bytes():
            return value.decode("utf-8", "replace")
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
    return ""
