"""The questions that clients ask before their first `_bulk`."""

import json

import pytest

from pipeline.sources.protocols.answers.preamble import preamble

QUESTIONS = [
    ("HEAD", "/"), ("GET", "/"), ("GET", "/_license"), ("GET", "/_nodes/http"), ("GET", "/_cluster/health"),
    ("GET", "/_cat/health"), ("HEAD", "/_index_template/logs"), ("PUT", "/_index_template/logs"),
    ("PUT", "/_ilm/policy/logs"), ("GET", "/_ilm/policy/logs?human=true"), ("GET", "/_ingest/pipeline/x"),
    ("GET", "/_template/logstash"), ("GET", "/_logstash/pipeline"), ("GET", "/_xpack"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), QUESTIONS)
def test_every_question_of_a_shipper_is_answered_with_the_header_of_the_product(
    method: str, path: str
) -> None:
    answer = preamble(method, path)
    assert answer is not None
    assert answer.status == 200
    assert answer.headers["X-Elastic-Product"] == "Elasticsearch"
    assert (answer.body == b"") is (method == "HEAD")


def test_the_version_is_one_that_clients_accept() -> None:
    answer = preamble("GET", "/")
    assert answer is not None
    about = json.loads(answer.body)
    assert (
        int(about["version"]["number"].partition(".")[0]) >= 8
    )  # Filebeat refuses a server older than itself
    assert about["tagline"] == "You Know, for Search"


def test_the_licence_is_active() -> None:
    answer = preamble("GET", "/_license")
    assert answer is not None
    assert json.loads(answer.body)["license"]["status"] == "active"


@pytest.mark.parametrize(("method", "path"), [("POST", "/_bulk"), ("GET", "/logs/_search"), ("DELETE", "/_ilm/policy/a"), ("PUT", "/logs"), ("POST", "/")])  # fmt: skip
def test_other_requests_have_no_fixed_answer(method: str, path: str) -> None:
    assert preamble(method, path) is None
