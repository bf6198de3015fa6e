"""The workload of a record by the fields of its protocol."""

import msgspec
import pytest

from pipeline.producer import check_workload
from pipeline.sources.protocols import workloads
from pipeline.sources.protocols.document_fields import DocumentFields


def of_document(document: dict[str, object], index: str = "logs") -> str:
    return workloads.of_document(msgspec.convert(document, DocumentFields), index)


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"k8s.cluster.name": "eu", "k8s.namespace.name": "shop", "k8s.deployment.name": "cart", "service.name": "x"}, "eu/shop/cart"),
        ({"k8s.namespace.name": "shop", "k8s.statefulset.name": "db"}, "shop/db"),
        ({"k8s.namespace.name": "shop", "k8s.cronjob.name": "nightly"}, "shop/nightly"),
        ({"service.namespace": "shop", "service.name": "cart", "k8s.pod.name": "cart-5f-x"}, "shop/cart"),
        ({"service.name": "cart"}, "cart"),
        ({"k8s.namespace.name": "shop", "k8s.container.name": "cart"}, "shop/cart"),
        ({"service.name": 7, "host.name": "h"}, "unknown_service"),
        ({}, "unknown_service"),
    ],
)  # fmt: skip
def test_a_resource_names_its_controller_before_its_service(attributes: dict[str, object], name: str) -> None:
    assert workloads.of_resource(attributes) == name


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"cluster": "eu", "namespace": "shop", "app": "cart", "pod": "cart-5f-x"}, "eu/shop/cart"),
        ({"service_name": "cart", "job": "shop/cart"}, "cart"),
        ({"job": "varlogs"}, "varlogs"),
        ({"namespace": "shop", "container": "cart"}, "shop/cart"),
        ({"filename": "/var/log/x"}, "unknown"),
    ],
)
def test_labels_name_cluster_namespace_and_app(labels: dict[str, str], name: str) -> None:
    assert workloads.of_labels(labels) == name


DOCUMENTS = [
        # Fluent Bit, Vector, Filebeat.
        ({"kubernetes": {"namespace_name": "shop", "container_name": "c", "labels": {"app.kubernetes.io/name": "cart"}}}, "shop/cart"),
        ({"kubernetes": {"pod_namespace": "shop", "container_name": "cart", "pod_labels": {}}}, "shop/cart"),
        ({"kubernetes": {"namespace": "shop", "deployment": {"name": "cart"}, "container": {"name": "c"}},
          "orchestrator": {"cluster": {"name": "eu"}}}, "eu/shop/cart"),
        ({"kubernetes": {"pod_name": "cart-5f-x"}, "service": "cart"}, "cart"),
        ({"service": {"name": "cart", "namespace": "shop"}}, "shop/cart"),
        ({"service.name": "cart", "service.namespace": "shop"}, "shop/cart"),
        ({"host": "web-1", "programname": "sshd"}, "web-1/sshd"),
        ({"host": {"name": "web-1"}, "app-name": "sshd"}, "web-1/sshd"),
        ({"data_stream": {"dataset": "nginx.access", "namespace": "default"}}, "default/nginx.access"),
        ({"container_name": "/cart"}, "cart"),
        ({"kubernetes": [1], "service": None, "host": 7, "app": {"a": 1}}, "logs"),
    ]  # fmt: skip


@pytest.mark.parametrize(("document", "name"), DOCUMENTS)
def test_a_document_names_its_workload_or_leaves_it_to_the_index(
    document: dict[str, object], name: str
) -> None:
    assert of_document(document) == name


def test_documents_of_one_request_are_named_as_each_alone() -> None:
    pods: list[dict[str, object]] = [
        {"container_name": name, "namespace_name": space, **more}
        for name in ("cart", 1, True, 1.0, None)
        for space in ("shop", 1, True)
        for more in (
            {},
            {"labels": {"app": True}},
            {"labels": {"app": 1}},
            {"labels": {"app": [1]}},
            {"pod": {"name": 1}},
        )
    ]
    documents: list[dict[str, object]] = [document for document, _ in DOCUMENTS]
    documents += [{"kubernetes": pod, "service": "web"} for pod in pods]
    documents += [{"kubernetes": pods[0], "orchestrator": {"cluster": "eu"}}, {"kubernetes": pods[0]}]
    several = [msgspec.convert(document, DocumentFields) for document in documents * 2]
    indices = [f"logs-{number % 3}" for number in range(len(several))]
    alone = [workloads.of_document(one, index) for one, index in zip(several, indices, strict=True)]
    assert workloads.of_documents(several, indices) == alone
    assert {"eu/shop/cart", "shop/cart", "shop/1", "web"} <= set(alone)


@pytest.mark.parametrize(
    ("index", "name"),
    [
        ("logstash-2026.11.25", "logstash"),
        ("app_2026-11-25", "app"),
        (".ds-logs-nginx-default-2026.11.25-000007", "logs-nginx-default"),
        ("audit-000007", "audit"),
        ("logs-nginx-default", "logs-nginx-default"),
        ("", "unknown"),
    ],
)
def test_the_index_of_a_day_names_the_same_workload_every_day(index: str, name: str) -> None:
    assert workloads.of_index(index) == name


@pytest.mark.parametrize(
    "part", ["a\nb\0c", "*", "a?/b*", "\ud800", "x" * 100_000, " ", "\u202e\u00a0", "/", "café"]
)
def test_every_name_is_one_that_the_producer_takes(part: str) -> None:
    check_workload(workloads.joined_name(part, part))
    check_workload(workloads.of_index(part))


def test_long_names_that_begin_alike_stay_apart() -> None:
    assert workloads.joined_name("x" * 300 + "a") != workloads.joined_name("x" * 300 + "b")
