"""The fields of a JSON document that tell its workload, its time, its stream and its text.

Any field may hold any JSON: a struct takes objects, its alternatives take the other kinds. All other fields
of the document are skipped unread, which is why a struct is faster than a dict. JSON has no cycles, so
that Python need not search these structs for garbage (`gc=False`).
"""

from typing import Any

import msgspec

Other = list[Any] | str | int | float | bool | None


class NamedObject(msgspec.Struct, frozen=True, gc=False):
    """An object that is known by its name."""

    name: dict[str, Any] | Other = None
    namespace: dict[str, Any] | Other = None
    path: dict[str, Any] | Other = None


class Labels(msgspec.Struct, frozen=True, gc=False):
    """Labels of a pod; Filebeat writes underscores for the dots of keys."""

    app: dict[str, Any] | Other = None
    app_name: dict[str, Any] | Other = msgspec.field(default=None, name="app.kubernetes.io/name")
    app_name_dedotted: dict[str, Any] | Other = msgspec.field(default=None, name="app_kubernetes_io/name")
    k8s_app: dict[str, Any] | Other = msgspec.field(default=None, name="k8s-app")


class Kubernetes(msgspec.Struct, frozen=True, gc=False):
    """Where a pod runs, as Fluent Bit, Vector and Filebeat name it."""

    cluster_name: dict[str, Any] | Other = None
    cluster: NamedObject | Other = None
    namespace_name: dict[str, Any] | Other = None
    pod_namespace: dict[str, Any] | Other = None
    namespace: NamedObject | Other = None
    pod_name: dict[str, Any] | Other = None
    pod: NamedObject | Other = None
    container_name: dict[str, Any] | Other = None
    container: NamedObject | Other = None
    deployment: NamedObject | Other = None
    statefulset: NamedObject | Other = None
    daemonset: NamedObject | Other = None
    cronjob: NamedObject | Other = None
    labels: Labels | Other = None
    pod_labels: Labels | Other = None


class Orchestrator(msgspec.Struct, frozen=True, gc=False):
    cluster: NamedObject | Other = None


class LogObject(msgspec.Struct, frozen=True, gc=False):
    """`log` of the Elastic Common Schema."""

    file: NamedObject | Other = None


class DataStream(msgspec.Struct, frozen=True, gc=False):
    dataset: dict[str, Any] | Other = None
    namespace: dict[str, Any] | Other = None


class DocumentFields(msgspec.Struct, frozen=True, gc=False):
    """A document. `log` is a line or an object, by its sender."""

    at_timestamp: dict[str, Any] | Other = msgspec.field(default=None, name="@timestamp")
    timestamp: dict[str, Any] | Other = None
    time: dict[str, Any] | Other = None
    ts: dict[str, Any] | Other = None
    date: dict[str, Any] | Other = None
    log: LogObject | Other = None
    message: dict[str, Any] | Other = None
    stream: dict[str, Any] | Other = None
    file: dict[str, Any] | Other = None
    kubernetes: Kubernetes | Other = None
    orchestrator: Orchestrator | Other = None
    service: NamedObject | Other = None
    service_name: dict[str, Any] | Other = msgspec.field(default=None, name="service.name")
    service_namespace: dict[str, Any] | Other = msgspec.field(default=None, name="service.namespace")
    app: dict[str, Any] | Other = None
    application: dict[str, Any] | Other = None
    appname: dict[str, Any] | Other = None
    app_name: dict[str, Any] | Other = msgspec.field(default=None, name="app-name")
    programname: dict[str, Any] | Other = None
    program: dict[str, Any] | Other = None
    host: NamedObject | Other = None
    hostname: dict[str, Any] | Other = None
    container_id: dict[str, Any] | Other = None
    container_name: dict[str, Any] | Other = None
    data_stream: DataStream | Other = None

    @property
    def moment(self) -> object:
        """The time as the sender wrote it, None without one."""
        for value in (self.at_timestamp, self.timestamp, self.time, self.ts, self.date):
            if value is not None:
                return value
        return None

    @property
    def text(self) -> str | None:
        """The line of the program, None where the document has none."""
        return next((value for value in (self.log, self.message) if isinstance(value, str)), None)


def name_of(*values: object) -> str:
    """The first that is a text, a number, or a NamedObject with such a name; "" for none."""
    for value in values:
        if value is None:
            continue
        name = value.name if isinstance(value, NamedObject) else value
        if isinstance(name, str) and name:
            return name
        if isinstance(name, int) and not isinstance(name, bool):
            return str(name)
    return ""
