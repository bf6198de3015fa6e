"""Results on a real nats-server: each record once, in the words of Opni's services."""

import struct
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats_server import Heard, NatsServer, payload
from polling import wait_until
from power_cut import power
from sink_contract import rows

from pipeline.drain.templates import Template, pack_template
from pipeline.errors import ClaimLost, SinkUnavailable
from pipeline.nats.payloads import Payload, payload_bytes, wrapped_json
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.nats import NatsSink, confidence
from pipeline.sources.nats.values import NatsMessage, read_messages
from pipeline.sources.pushed import framed

SUBJECTS = ("inferenced_logs", "templates_index", "model_inferenced_workload_logs")


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer.running("max_payload: 262144") as one:
        yield one


@pytest.fixture
def heard(server: NatsServer) -> Iterator[Heard]:
    one = Heard(server, *SUBJECTS)
    yield one
    one.close()


@pytest.fixture
def own(settings: Settings, server: NatsServer, request: pytest.FixtureRequest) -> Settings:
    """Streams of this test alone would share a subject, so all tests share one stream."""
    return settings.replace(nats_source=server.url("raw_logs,opnilog_workload_logs"))


def results(
    documents: list[Payload], *, first: int, source: str = "nats:raw_logs", **columns: Any
) -> pl.DataFrame:
    """Rows as stage store has them, of messages from `first` on."""
    given: dict[str, Any] = {"template_id": 7, "score": 0.1, "anomalous": False, "source": source, **columns}
    frame = rows(len(documents), key=f"k{first}", **given)
    return frame.with_columns(
        line=pl.Series(range(first, first + len(documents)), dtype=pl.UInt64),
        raw=pl.Series([wrapped_json(d) for d in documents]),
        message=pl.Series([d.log for d in documents]),
    )


def test_a_result_carries_what_came_and_its_verdict(own: Settings, heard: Heard) -> None:
    calm, bad = payload(1, pod_name="web-7"), payload(2, masked_log="as it came")
    frame = pl.concat(
        [
            results([calm], first=100),
            results([bad], first=101, score=0.9, anomalous=True),
        ]
    )
    template = Template(template_id=7, text="GET <NUM> took", severe=False, workload="c1/shop/web")
    connect(own).hset(Keys(own.redis.key_prefix).templates, "7", pack_template(template))  # type: ignore[arg-type]
    NatsSink(own).write("b1", frame)
    assert wait_until(lambda: len(heard.messages) == 2, timeout_s=10), heard.messages
    first, second = heard.payloads("inferenced_logs")
    assert (first.id, first.log, first.pod_name, first.deployment) == ("id1", calm.log, "web-7", "web")
    assert (first.anomaly_level, first.inference_model) == ("Normal", "opnilog")
    assert (first.template_cluster_id, first.template_matched) == (7, "GET <NUM> took")
    assert first.opnilog_confidence == pytest.approx(0.94)
    assert first.masked_log.startswith("GET <") and second.masked_log == "as it came"
    assert (second.anomaly_level, second.opnilog_confidence) == ("Anomaly", pytest.approx(0.14))
    (told,) = heard.payloads("templates_index")
    assert (told.id, told.template_cluster_id, told.template_matched) == ("07", 7, "GET <NUM> took")
    assert told.log in (calm.log, bad.log)


def test_each_payload_of_a_joined_record_is_answered_with_its_verdict(own: Settings, heard: Heard) -> None:
    # The server drops a message whose id it has seen, so these places are those of no other test.
    lines = ["ERROR boom", "\tat a.B(C.java:1)", "\tat a.D(E.java:2)"]
    messages = [NatsMessage(n, payload_bytes(payload(n, log=line)), n) for n, line in enumerate(lines, 7_000)]
    read = read_messages("raw_logs", messages).records
    assert read is not None
    joined = framed(read)[0]
    frame = results([payload(7_000)], first=7_000, score=0.9, anomalous=True)
    frame = frame.with_columns(joined["raw"], joined["raw"].alias("message"))
    NatsSink(own).write("b1", frame)
    assert wait_until(lambda: len(heard.payloads("inferenced_logs")) == 3, timeout_s=10), heard.messages
    found = heard.payloads("inferenced_logs")
    assert [(one.id, one.log, one.anomaly_level) for one in found] == [
        (f"id{n}", line, "Anomaly") for n, line in enumerate(lines, 7_000)
    ]


def test_a_result_of_a_model_service_goes_back_to_the_drain_service(own: Settings, heard: Heard) -> None:
    came = payload(3, masked_log="get <path>", template_matched="theirs")
    NatsSink(own).write("b1", results([came], first=300_000, source="nats:opnilog_workload_logs"))
    assert wait_until(lambda: bool(heard.messages), timeout_s=10)
    ((subject, _),) = heard.messages
    assert subject == "model_inferenced_workload_logs"
    (one,) = heard.payloads(subject)
    assert (one.masked_log, one.template_matched, one.template_cluster_id) == ("get <path>", "theirs", 0)


def test_a_result_that_is_written_again_is_heard_once(own: Settings, heard: Heard) -> None:
    frame = results([payload(n) for n in range(10, 20)], first=400)
    NatsSink(own).write("b1", frame)
    again = NatsSink(own)  # another process, after a kill
    again.write("b1", frame)
    again.write("b2", results([payload(20)], first=410))
    assert wait_until(lambda: "id20" in heard.ids("inferenced_logs"), timeout_s=10)
    assert set(heard.ids("inferenced_logs").values()) == {1}
    assert len(heard.ids("inferenced_logs")) == 11


def test_a_result_without_a_verdict_waits_for_its_model(own: Settings, heard: Heard) -> None:
    documents = [payload(n) for n in range(30, 33)]
    sink = NatsSink(own)
    sink.write("b1", results(documents, first=500, score=None, anomalous=None))
    sink.write("b1", results(documents, first=500))
    assert wait_until(lambda: len(heard.ids("inferenced_logs")) == 3, timeout_s=10)
    assert set(heard.ids("inferenced_logs").values()) == {1}


def test_records_of_other_sources_need_no_server(settings: Settings) -> None:
    sink = NatsSink(settings.replace(nats_source="nats://127.0.0.1:9/raw_logs"))
    sink.write("b1", results([payload(1)], first=1, source="kafka:app/0"))
    assert sink.read("b1", "c1/shop/web") is None


def test_a_dead_letter_that_is_retried_is_not_published(settings: Settings) -> None:
    sink = NatsSink(settings.replace(nats_source="nats://127.0.0.1:9/raw_logs"))
    unreadable = results([payload(1)], first=1).with_columns(raw=pl.lit("Cv8="), message=pl.lit("Cv8="))
    sink.write("b1", unreadable)  # no server is asked


def test_a_server_that_is_away_is_tried_again(settings: Settings) -> None:
    with NatsServer.running() as server:
        own = settings.replace(nats_source=server.url())
        sink = NatsSink(own)
        sink.write("b1", results([payload(1)], first=1))
        server.kill()
        with pytest.raises(SinkUnavailable, match="results cannot be published"):
            sink.write("b2", results([payload(2)], first=2))
        server.start()

        def written() -> bool:
            try:
                sink.write("b2", results([payload(2)], first=2))
            except SinkUnavailable:
                return False
            return True

        assert wait_until(written, timeout_s=20)
        assert server.stored_ids() == {"id1": 1, "id2": 1}


def test_a_lost_claim_publishes_nothing(own: Settings, heard: Heard) -> None:
    def lost() -> None:
        raise ClaimLost("another worker owns it")

    sink = NatsSink(own)
    with pytest.raises(ClaimLost):
        sink.write("b1", results([payload(40)], first=600), last=lost)
    sink.write("b2", results([payload(41)], first=601))
    assert wait_until(lambda: bool(heard.messages), timeout_s=10)
    assert heard.ids("inferenced_logs") == {"id41": 1}


def test_messages_keep_to_what_the_server_takes(own: Settings, heard: Heard) -> None:
    documents = [payload(n, log=f"{n} " + "x" * 20_000) for n in range(50, 80)]
    NatsSink(own).write("b1", results(documents, first=700))
    assert wait_until(lambda: len(heard.ids("inferenced_logs")) == 30, timeout_s=10)
    assert len(heard.of("inferenced_logs")) > 2
    assert max(map(len, heard.of("inferenced_logs"))) <= 262_144 - 65_536


def test_a_redis_that_went_back_publishes_no_record_again(server: NatsServer, heard: Heard) -> None:
    """The batches of the second time are others: cut elsewhere, and with one record more."""
    with power() as current:
        own = current.settings.replace(nats_source=server.url("raw_logs,opnilog_workload_logs"))
        NatsSink(own).write("b1", results([payload(n) for n in range(100, 110)], first=900))
        current.cut()
        sink = NatsSink(own)
        sink.write("b2", results([payload(n) for n in range(105, 112)], first=905))
        sink.write("b3", results([payload(n) for n in range(100, 105)], first=900))
        assert wait_until(lambda: "id111" in heard.ids("inferenced_logs"), timeout_s=10)
    assert heard.ids("inferenced_logs") == {f"id{n}": 1 for n in range(100, 112)}


@given(st.floats(0, 1), st.booleans())
def test_the_confidence_is_below_the_threshold_of_opni_exactly_for_anomalies(
    score: float, anomalous: bool
) -> None:
    (told,) = struct.unpack("f", struct.pack("f", confidence(score, anomalous=anomalous)))
    assert (told < 0.7) == anomalous
    assert 0.0 <= told <= 1.0


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_confidence_falls_as_the_score_rises(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert confidence(low, anomalous=low >= 0.5) >= confidence(high, anomalous=high >= 0.5)


def test_remembered_lines_have_a_bound_of_characters_and_are_masked_all_the_same(
    own: Settings, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sinks.nats._REMEMBERED", 500)
    sink = NatsSink(own)
    many = [payload(n) for n in range(20)]
    sink.write("b1", results(many, first=50_000))
    assert wait_until(lambda: len(heard.payloads("inferenced_logs")) == len(many), timeout_s=10)
    assert all(one.masked_log.startswith("GET <") for one in heard.payloads("inferenced_logs"))
    assert sink._masked.currsize <= 500
