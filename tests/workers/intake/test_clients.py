"""Programs that people use send to the intake: all they sent is in, and they are content with the answer."""

import logging
import subprocess
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elasticsearch
import elasticsearch.helpers
import logging_loki
import opensearchpy
import opensearchpy.helpers
import pytest
import splunk_handler
from intake_process import Intake
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from polling import wait_until

pytestmark = pytest.mark.long  # starts processes


def messages(n: int) -> list[str]:
    return [f"order {i} was paid" for i in range(n)]


def documents(workload: str, n: int) -> Iterator[dict[str, Any]]:
    for text in messages(n):
        yield {
            "_index": workload,
            "_op_type": "create",
            "message": text,
            "@timestamp": "2026-11-20T10:00:00.123Z",
        }


def test_the_sdk_of_opentelemetry_exports_its_records(intake: Intake, workload: str) -> None:
    exporter = OTLPLogExporter(f"{intake.url}/v1/logs", compression=Compression.Gzip)
    provider = LoggerProvider(resource=Resource.create({"service.name": workload}))
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter, max_export_batch_size=10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the handler has moved to another package
        from opentelemetry.sdk._logs import LoggingHandler

        handler = LoggingHandler(logger_provider=provider)
    logger = logging.Logger(workload)
    logger.addHandler(handler)
    for text in messages(25):
        logger.warning(text)
    provider.shutdown()
    assert intake.accepted(workload) == 25


def test_bulk_of_opensearchs_client_is_content(intake: Intake, workload: str) -> None:
    client = opensearchpy.OpenSearch(intake.url)
    done, errors = opensearchpy.helpers.bulk(client, documents(workload, 25), chunk_size=10)
    client.close()
    assert (done, errors, intake.accepted(workload)) == (25, [], 25)


def test_bulk_of_elasticsearchs_client_is_content(intake: Intake, workload: str) -> None:
    with elasticsearch.Elasticsearch(f"{intake.url}/es", http_compress=True) as client:
        assert client.info()["version"]["number"]
        done, errors = elasticsearch.helpers.bulk(client, documents(workload, 25), chunk_size=10)
    assert (done, errors, intake.accepted(workload)) == (25, [], 25)


def test_the_handler_of_loki_is_content(intake: Intake, workload: str) -> None:
    handler = logging_loki.LokiHandler(f"{intake.url}/loki/api/v1/push", tags={"app": workload}, version="1")
    failed: list[logging.LogRecord] = []
    handler.handleError = failed.append  # it would print the error and go on
    logger = logging.Logger(workload)
    logger.addHandler(handler)
    for text in messages(5):
        logger.warning(text)
    handler.emitter.close()
    assert (failed, intake.accepted(workload)) == ([], 5)


def test_the_handler_of_splunk_is_content(intake: Intake, workload: str) -> None:
    handler = splunk_handler.SplunkHandler(
        host="127.0.0.1",
        port=intake.port,
        token="any",
        index=workload,
        protocol="http",
        verify=False,
        flush_interval=0.1,
    )
    logger = logging.Logger(workload)
    logger.addHandler(handler)
    for text in messages(25):
        logger.warning(text)
    assert wait_until(lambda: intake.accepted(f"{workload}/text") == 25, timeout_s=20)
    handler.shutdown()


def test_curl_sends_files_of_lines_and_of_documents(intake: Intake, workload: str, tmp_path: Path) -> None:
    plain, ndjson = tmp_path / "app.log", tmp_path / "app.ndjson"
    plain.write_text("\n".join(messages(5)))
    ndjson.write_text("\n".join(f'{{"message":"{text}"}}' for text in messages(5)))
    url = f"{intake.url}/api/v1/lines?workload={workload}"
    for path, kind in ((plain, "text/plain"), (ndjson, "application/x-ndjson")):
        key = f"Idempotency-Key: {uuid.uuid4()}"
        for _ in range(2):
            command = [
                "curl",
                "-fsS",
                "-H",
                key,
                "-H",
                f"Content-Type: {kind}",
                "--data-binary",
                f"@{path}",
                url,
            ]
            subprocess.run(command, check=True, capture_output=True)
    assert intake.accepted(workload) == 10
