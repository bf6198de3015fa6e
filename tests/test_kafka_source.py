"""The setting kafka_source: addresses of topics, and one sentence for each mistake."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.errors import BadSetting
from pipeline.settings import Settings
from pipeline.settings.kafka import KafkaSource, kafka_sources, with_absolute_files


def test_an_address_has_brokers_topics_and_options() -> None:
    found = KafkaSource.parse(
        "kafkas://me:p%40ss@b1,b2:9093/app,web-*?start=2026-11-20T00:00:00Z&format=otlp&mechanism=SCRAM-SHA-256"
        "&ca=/etc/ca.pem&group=lw&workload={topic}/{header.team}"
    )
    assert found.servers == "b1:9092,b2:9093" and found.topics == ("app", "web-*") and found.tls
    assert (found.user, found.password, found.mechanism) == ("me", "p@ss", "SCRAM-SHA-256")
    assert found.start == datetime(2026, 11, 20, tzinfo=UTC) and found.format == "otlp"
    assert (found.ca, found.group) == (Path("/etc/ca.pem"), "lw")
    assert found.workload_of({"topic": "app", "header.team": "red"}) == "app/red"
    assert KafkaSource.parse("kafka://[::1]:9092/a").servers == "[::1]:9092"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("redis://b/app", "is not usable; write it like kafka://"),
        ("broker:9092/app", "is not usable"),
        ("kafka://b1", "no usable topic"),
        ("kafka://b1/", "no usable topic"),
        ("kafka://b1/app logs", "no usable topic"),
        ("kafka://b1/app/x", "no usable topic"),
        ("kafka://b1:70000/app", "a broker that is not HOST or HOST:PORT"),
        ("kafka://b1,/app", "a broker that is not HOST or HOST:PORT"),
        ("kafka://b1/app?from=earliest", "unknown option 'from'; known are start,"),
        ("kafka://b1/app?start", "options that are not NAME=VALUE"),
        ("kafka://b1/app?start=yesterday", "start=yesterday is not usable; use earliest, latest or a time"),
        ("kafka://b1/app?start=2026-11-20T00:00:00", "is not usable; use earliest"),
        ("kafka://b1/app?format=avro", "format=avro is unknown; use record, lines"),
        ("kafka://b1/app?mechanism=PLAIN", "a mechanism, and no user:password@"),
        ("kafka://u:p@b1/app?mechanism=GSSAPI", "mechanism=GSSAPI is unknown; use PLAIN"),
        ("kafka://u@b1/app", "needs both a user and a password"),
        ("kafka://b1/app?ca=/x", "files for TLS, which only kafkas:// has"),
        ("kafkas://b1/app?cert=/x", "needs both cert=FILE and key=FILE"),
        ("kafka://b1/app?workload={host}", "unknown field {host}; use {topic}"),
    ],
)
def test_a_mistake_is_one_sentence(address: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        KafkaSource.parse(address)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_is_never_shown() -> None:
    address = "kafka://me:geheim@b1/app kafkas://you:geheim@b2/web"
    settings = Settings(kafka_source=address)
    assert "geheim" not in repr(settings) and "b2/web" in repr(settings)
    assert "geheim" not in repr(kafka_sources(address)) + "".join(map(str, kafka_sources(address)))
    for wrong in (
        "kafka://me:geheim@b1",
        "kafka://me:geheim@b1:x/a",
        "me:geheim@b1/app",
        "kafka://me:geheim@b1/a?x=1",
    ):
        with pytest.raises(BadSetting) as caught:
            Settings(kafka_source=wrong)
        assert "geheim" not in str(caught.value)


def test_a_child_process_gets_the_same_addresses() -> None:
    settings = Settings(kafka_source="kafka://me:p%40ss@b1,b2/app,web?start=latest")
    again = Settings.load(environ=settings.to_environ())
    assert again.kafka == settings.kafka
    assert Settings.load(environ={"LOGWEIR_KAFKA_SOURCE": ""}).kafka.source is None


def test_files_are_found_from_any_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = with_absolute_files("kafkas://u:p%40@b1/app?ca=ca.pem&workload={topic} kafka://b2/x")
    first, second = kafka_sources(text)
    assert first.ca == tmp_path / "ca.pem" and first.workload == "{topic}" and first.password == "p@"
    assert second == KafkaSource.parse("kafka://b2/x")
