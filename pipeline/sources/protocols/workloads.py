"""The workload of a record, from what its protocol says about its origin.

A name joins the parts that are known by "/", from the widest to the narrowest. It is printable, has 1 to 200
characters, and depends on nothing that changes from pod to pod or from day to day.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pipeline.records.batch import MAX_NAME, as_workload_name, digest
from pipeline.records.remembered import remembered
from pipeline.sources.protocols.document_fields import (
    DataStream,
    DocumentFields,
    Kubernetes,
    Labels,
    NamedObject,
    Orchestrator,
    name_of,
)

UNKNOWN: Final = "unknown"
UNKNOWN_SERVICE: Final = "unknown_service"  # the name that SDKs of OpenTelemetry give
CONTROLLERS: Final = tuple(
    f"k8s.{kind}.name" for kind in ("deployment", "statefulset", "daemonset", "cronjob")
)
_APPS: Final = ("app", "service_name", "job", "container")  # labels of Loki
_LONGEST_PART: Final = 1_000  # characters; the rest is cut
_REMEMBERED: Final = 4_096
_LONGEST: Final = 500  # OpenSearch allows 255 bytes of an index
# Indices of one day or month, of a rollover, and the indices behind a data stream.
_DATED: Final = re.compile(r"[-._][0-9]{4}(?:[-._][0-9]{2}){1,2}(?=$|-)|-[0-9]{6}$|^\.ds-")


def joined_name(*parts: str) -> str:
    """The name of these parts, without those that are empty; UNKNOWN for none."""
    return _joined(*[part[:_LONGEST_PART] for part in parts if part])


@remembered(_REMEMBERED, _LONGEST)
def _joined(*parts: str) -> str:
    name = as_workload_name("/".join(parts)).strip()
    if len(name) > MAX_NAME:
        return f"{name[: MAX_NAME - 17]}~{digest(name)}"
    return name or UNKNOWN


def of_resource(attributes: Mapping[str, object]) -> str:
    """Of the attributes of an OTLP resource."""
    at = {key: value for key, value in attributes.items() if isinstance(value, str)}
    namespace = at.get("k8s.namespace.name", "")
    controller = next((at[key] for key in CONTROLLERS if at.get(key)), "")
    if controller:
        return joined_name(at.get("k8s.cluster.name", ""), namespace, controller)
    service = at.get("service.name", "")
    if service:
        return joined_name(at.get("service.namespace", ""), service)
    container = at.get("k8s.container.name", "")
    if namespace and container:
        return joined_name(at.get("k8s.cluster.name", ""), namespace, container)
    return UNKNOWN_SERVICE


def of_labels(labels: Mapping[str, str]) -> str:
    """Of the labels of a Loki stream."""
    app = next((labels[key] for key in _APPS if labels.get(key)), "")
    return joined_name(labels.get("cluster", ""), labels.get("namespace", ""), app)


def of_program(host: str, program: str) -> str:
    """Of a line that names its host and its program, as syslog and the journal do."""
    return joined_name(host, program)


def of_event(*, index: str, sourcetype: str, source: str, host: str) -> str:
    """Of an event of Splunk."""
    return joined_name(index, sourcetype or source or host)


def of_document(fields: DocumentFields, index: str) -> str:
    """Of a JSON document; the index where no field tells."""
    if isinstance(fields.kubernetes, Kubernetes) and (name := _of_pod(fields.kubernetes, fields)):
        return name
    if service := name_of(fields.service, fields.service_name):
        inner = (
            fields.service.namespace if isinstance(fields.service, NamedObject) else fields.service_namespace
        )
        return joined_name(name_of(inner), service)
    if app := name_of(fields.app, fields.application):
        return joined_name(app)
    if program := name_of(fields.appname, fields.app_name, fields.programname, fields.program):
        return of_program(name_of(fields.host, fields.hostname), program)
    if isinstance(fields.data_stream, DataStream) and (dataset := name_of(fields.data_stream.dataset)):
        return joined_name(name_of(fields.data_stream.namespace), dataset)
    container = name_of(fields.container_name).lstrip("/")
    return joined_name(container) if container else of_index(index)


def of_documents(documents: Sequence[DocumentFields], indices: Sequence[str]) -> list[str]:
    """`of_document` of each. Many documents of a request name the same pod, which is looked at once."""
    known: dict[Kubernetes, str] = {}
    names: list[str] = []
    for fields, index in zip(documents, indices, strict=True):
        pod, name = fields.kubernetes, ""
        if isinstance(pod, Kubernetes) and fields.orchestrator is None:
            try:
                name = known.get(pod, "")
            except TypeError:  # it holds a list or an object
                pass
            else:
                if not name and _is_of_texts(pod):
                    name = known[pod] = _of_pod(pod, fields)
        names.append(name or of_document(fields, index))
    return names


def _is_of_texts(value: object) -> bool:
    """Whether equal values have equal names: 1 and true are equal as well."""
    if isinstance(value, msgspec.Struct):
        return all(map(_is_of_texts, msgspec.structs.astuple(value)))
    return value is None or isinstance(value, str)


@remembered(_REMEMBERED, _LONGEST)
def of_index(index: str) -> str:
    """Of an index without its date: every day has an index of its own."""
    return joined_name(without_date(index))


def without_date(index: str) -> str:
    """An index without day, month, and number of a rollover."""
    return _DATED.sub("", index[:_LONGEST_PART])


def owner_of(pod: Kubernetes) -> str:
    """The controller of a pod, or the app that its labels name; "" for neither."""
    owner = name_of(pod.deployment, pod.statefulset, pod.daemonset, pod.cronjob)
    for labels in (pod.labels, pod.pod_labels):
        if not owner and isinstance(labels, Labels):
            owner = name_of(labels.app_name, labels.app_name_dedotted, labels.app, labels.k8s_app)
    return owner


def cluster_of(pod: Kubernetes, fields: DocumentFields) -> str:
    cluster = name_of(pod.cluster_name, pod.cluster)
    if not cluster and isinstance(fields.orchestrator, Orchestrator):
        cluster = name_of(fields.orchestrator.cluster)
    return cluster


def _of_pod(pod: Kubernetes, fields: DocumentFields) -> str:
    """ "" where the pod does not say what it belongs to."""
    owner = owner_of(pod) or name_of(pod.container_name, pod.container)
    if not owner:
        return ""
    namespace = name_of(pod.namespace_name, pod.pod_namespace, pod.namespace)
    return joined_name(cluster_of(pod, fields), namespace, owner)
