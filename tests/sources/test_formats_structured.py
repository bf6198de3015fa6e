"""Records of known programs as JSON and XML: time, level, service and message, without book-keeping keys."""

import json
from datetime import UTC, datetime

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipeline.records.schema import raw_frame
from pipeline.sources import formats_json
from pipeline.sources.formats import detect, parse
from pipeline.sources.wrappers import unwrap

ARRIVED = datetime(2026, 11, 20, 15, 0, tzinfo=UTC)
JOURNAL = '{"__CURSOR":"s=ab;i=1","__REALTIME_TIMESTAMP":"1795075750000123","__MONOTONIC_TIMESTAMP":"77","_BOOT_ID":"aa","PRIORITY":"%s","_HOSTNAME":"box","_TRANSPORT":"stdout",%s,"_CAP_EFFECTIVE":"0"}'
GCP = '{"insertId":"1k2j","logName":"projects/shop/logs/run","receiveTimestamp":"2026-11-19T08:09:11Z","resource":{"type":"k8s_container","labels":{"project_id":"shop","container_name":"cart","pod_name":"cart-5f"}},"severity":"%s","timestamp":"2026-11-19T08:09:10.123456789Z",%s}'
TRAIL = '{"eventVersion":"1.08","userIdentity":{"type":"IAMUser","principalId":"AIDA","userName":"ann","accountId":"1"},"eventTime":"2026-11-19T08:09:10Z","eventSource":"%s","eventName":"%s","awsRegion":"eu-west-1","sourceIPAddress":"10.0.0.7",%s"requestID":"r-1","eventID":"e-1","eventType":"AwsApiCall"}'
XML = "<Event xmlns='http://schemas.microsoft.com/win/2004/08/events/event'><System><Provider Name='%s' Guid='{5}'/><EventID>%s</EventID><Version>2</Version><Level>%s</Level><TimeCreated SystemTime='2026-11-19T08:09:10.1234567Z'/><EventRecordID>9</EventRecordID><Execution ProcessID='628' ThreadID='1'/><Channel>System</Channel><Computer>WIN1</Computer><Security/></System>%s</Event>"

# shape, line, time, level, host, process, service, message
CASES: list[tuple[str, str, str, str | None, str | None, str | None, str | None, str]] = [
    ("journald", JOURNAL % (3, '"SYSLOG_IDENTIFIER":"sshd","_PID":"812","_COMM":"sshd","MESSAGE":"error: kex failed"'), "2026-11-19T08:09:10.000123", "error", "box", "812", "sshd", "error: kex failed"),
    ("journald", JOURNAL % (6, '"_COMM":"cron","_SYSTEMD_UNIT":"cron.service","_PID":"9","MESSAGE":[114,117,110,32,195,188]'), "2026-11-19T08:09:10.000123", "info", "box", "9", "cron", "run ü"),
    ("journald", JOURNAL % (4, '"_SYSTEMD_UNIT":"disk.service","MESSAGE":"low"'), "2026-11-19T08:09:10.000123", "warning", "box", None, "disk.service", "low"),
    ("gcp", GCP % ("ERROR", '"jsonPayload":{"message":"payment failed","order":7}'), "2026-11-19T08:09:10.123456", "error", "cart-5f", None, "cart", "payment failed jsonPayload.order=7"),
    ("gcp", GCP % ("DEFAULT", '"textPayload":"listening on 80"'), "2026-11-19T08:09:10.123456", None, "cart-5f", None, "cart", "listening on 80"),
    ("gcp", GCP % ("DEFAULT", '"textPayload":"2026-11-19 08:09:09,978 WARN [main] shop.Cart: slow"'), "2026-11-19T08:09:10.123456", "warning", "cart-5f", "main", "shop.Cart", "slow"),
    ("fluent-bit", '{"date":1795075750.25,"log":"2026-11-19 08:09:10,978 ERROR [main] shop.Cart: no stock","stream":"stderr","kubernetes":{"pod_name":"cart-5f","container_name":"cart","host":"node-1"}}', "2026-11-19T08:09:10.250000", "error", "node-1", "main", "shop.Cart", "no stock"),
    ("fluent-bit", '{"date":1795075750.5,"log":"plain text\\n"}', "2026-11-19T08:09:10.500000", None, None, None, None, "plain text"),
    ("fluent-bit", '{"log":"{\\"level\\":\\"warn\\",\\"msg\\":\\"j\\"}","date":1795075750}', "2026-11-19T08:09:10", "warning", None, None, None, "j"),
    ("kubernetes", '{"time":"2026-11-19T08:09:10Z","level":"info","message":"up","user":3,"kubernetes":{"pod_name":"a-1","container_name":"a","labels":{"x":"y"}}}', "2026-11-19T08:09:10", "info", None, None, "a", "up user=3"),
    ("cloudtrail", TRAIL % ("ec2.amazonaws.com", "RunInstances", '"errorCode":"Client.UnauthorizedOperation","errorMessage":"not allowed",'), "2026-11-19T08:09:10", "error", None, None, "ec2.amazonaws.com", "RunInstances awsRegion=eu-west-1 errorCode=Client.UnauthorizedOperation errorMessage=not allowed sourceIPAddress=10.0.0.7 userIdentity.type=IAMUser userIdentity.userName=ann"),
    ("cloudtrail", TRAIL % ("s3.amazonaws.com", "ListBuckets", ""), "2026-11-19T08:09:10", "info", None, None, "s3.amazonaws.com", "ListBuckets awsRegion=eu-west-1 sourceIPAddress=10.0.0.7 userIdentity.type=IAMUser userIdentity.userName=ann"),
    ("cloudtrail", TRAIL % ("iam.amazonaws.com", "CreateUser", '"requestParameters":{"userName":"bob"},'), "2026-11-19T08:09:10", "info", None, None, "iam.amazonaws.com", "CreateUser awsRegion=eu-west-1 sourceIPAddress=10.0.0.7 userIdentity.type=IAMUser userIdentity.userName=ann"),
    ("cloudwatch", '{"timestamp":1795075750001,"message":"2026-11-19T08:09:10Z [error] lambda died","ingestionTime":1795075751000}', "2026-11-19T08:09:10.001000", "error", None, None, None, "lambda died"),
    ("cloudwatch", '{"logStreamName":"shop/cart/1","timestamp":1795075750002,"message":"START RequestId: 7","ingestionTime":1795075751000,"eventId":"5"}', "2026-11-19T08:09:10.002000", None, None, None, "shop/cart/1", "START RequestId: 7"),
    ("cloudwatch", '{"ingestionTime":1795075751000,"timestamp":1795075750003,"message":"{\\"level\\":\\"error\\",\\"msg\\":\\"x\\"}\\n"}', "2026-11-19T08:09:10.003000", "error", None, None, None, "x"),
    ("windows", r'{"Id":7031,"LevelDisplayName":"Error","Level":2,"ProviderName":"Service Control Manager","MachineName":"WIN1","ProcessId":628,"TimeCreated":"\/Date(1795075750123)\/","Message":"The Spooler service terminated","RecordId":5,"Keywords":-9}', "2026-11-19T08:09:10.123000", "error", "WIN1", "628", "Service Control Manager", "The Spooler service terminated Id=7031"),
    ("windows", '{"TimeCreated":"2026-11-19T09:09:10.1234567+01:00","Level":3,"Id":36,"ProviderName":"Time-Service","MachineName":"WIN2","Message":"not synchronized"}', "2026-11-19T08:09:10.123456", "warning", "WIN2", None, "Time-Service", "not synchronized Id=36"),
    ("winlogbeat", '{"@timestamp":"2026-11-19T08:09:10.123Z","agent":{"hostname":"WIN3","version":"8"},"ecs":{"version":"8.0"},"log":{"level":"information"},"message":"An account was logged on","winlog":{"provider_name":"Security-Auditing","event_id":"4624","computer_name":"WIN3","process":{"pid":700},"channel":"Security"}}', "2026-11-19T08:09:10.123000", "info", "WIN3", "700", "Security-Auditing", "An account was logged on winlog.event_id=4624"),
    ("mongodb", '{"t":{"$date":"2026-11-19T08:09:10.001+00:00"},"s":"E","c":"STORAGE","id":20557,"ctx":"initandlisten","msg":"DBException in initAndListen","attr":{"error":"in use"}}', "2026-11-19T08:09:10.001000", "error", None, "initandlisten", "STORAGE", "DBException in initAndListen attr.error=in use id=20557"),
    ("mongodb", '{"t":{"$date":"2026-11-19T08:09:10.002+00:00"},"s":"I","c":"NETWORK","id":22943,"ctx":"listener","msg":"Connection accepted"}', "2026-11-19T08:09:10.002000", "info", None, "listener", "NETWORK", "Connection accepted id=22943"),
    ("mongodb", '{"t":{"$date":"2026-11-19T09:09:10.003+01:00"},"s":"D2","c":"QUERY","ctx":"conn9","msg":"plan"}', "2026-11-19T08:09:10.003000", "debug", None, "conn9", "QUERY", "plan"),
    ("postgresql", '{"timestamp":"2026-11-19 09:09:10.123 CET","user":"app","dbname":"shop","pid":77,"remote_host":"10.0.0.9","session_id":"6.4d","line_num":3,"error_severity":"ERROR","state_code":"42703","message":"column \\"a\\" is unknown","statement":"select a","backend_type":"client backend","query_id":0}', "2026-11-19T08:09:10.123000", "error", None, "77", "client backend", 'column "a" is unknown dbname=shop remote_host=10.0.0.9 state_code=42703 statement=select a user=app'),
    ("postgresql", '{"timestamp":"2026-11-19 08:09:10.124 UTC","pid":5,"error_severity":"LOG","message":"checkpoint starting: time","backend_type":"checkpointer"}', "2026-11-19T08:09:10.124000", "info", None, "5", "checkpointer", "checkpoint starting: time"),
    ("postgresql", '{"timestamp":"2026-11-19 08:09:10.125 UTC","pid":6,"error_severity":"PANIC","message":"could not write","backend_type":"walwriter"}', "2026-11-19T08:09:10.125000", "fatal", None, "6", "walwriter", "could not write"),
    ("bunyan", '{"name":"api","hostname":"h1","pid":12,"level":50,"msg":"boom","time":"2026-11-19T08:09:10.001Z","v":0}', "2026-11-19T08:09:10.001000", "error", "h1", "12", "api", "boom v=0"),
    ("pino", '{"level":30,"time":1795075750001,"pid":12,"hostname":"h1","msg":"up"}', "2026-11-19T08:09:10.001000", "info", "h1", "12", None, "up"),
    ("logrus", '{"level":"warning","msg":"disk low","time":"2026-11-19T09:09:10+01:00","free":3}', "2026-11-19T08:09:10", "warning", None, None, None, "disk low free=3"),
    ("zap", '{"level":"error","ts":1795075750.125,"logger":"cart","caller":"a/b.go:7","msg":"no stock"}', "2026-11-19T08:09:10.125000", "error", None, None, "cart", "no stock caller=a/b.go:7"),
    ("zerolog", '{"level":"debug","time":1795075750,"message":"tick"}', "2026-11-19T08:09:10", "debug", None, None, None, "tick"),
    ("serilog", '{"@t":"2026-11-19T08:09:10.1234567Z","@mt":"Order {Id} failed","@l":"Error","Id":7,"SourceContext":"Shop.Cart"}', "2026-11-19T08:09:10.123456", "error", None, None, "Shop.Cart", "Order {Id} failed Id=7"),
    ("serilog", '{"@t":"2026-11-19T08:09:10Z","@mt":"Order {Id} paid","Id":8}', "2026-11-19T08:09:10", "info", None, None, None, "Order {Id} paid Id=8"),
    ("serilog", '{"@t":"2026-11-19T08:09:10Z","@m":"Order 9 late","@i":"ab","@l":"Warning"}', "2026-11-19T08:09:10", "warning", None, None, None, "Order 9 late"),
    ("ecs", '{"@timestamp":"2026-11-19T08:09:10.5Z","log.level":"ERROR","message":"x","ecs.version":"1.2.0","service.name":"shop","log.logger":"a.B"}', "2026-11-19T08:09:10.500000", "error", None, None, "shop", "x log.logger=a.B"),
    ("ecs", '{"@timestamp":"2026-11-19T08:09:10Z","log":{"level":"warn"},"message":"y","ecs":{"version":"8"},"service":{"name":"shop"},"host":{"name":"h1","os":{"name":"x"}},"process":{"pid":3}}', "2026-11-19T08:09:10", "warning", "h1", "3", "shop", "y"),
    ("ecs", '{"@timestamp":"2026-11-19T08:09:10Z","message":"z","ecs":{"version":"8"},"log":{"level":"info","offset":7,"file":{"path":"/a"}},"agent":{"id":"1"}}', "2026-11-19T08:09:10", "info", None, None, None, "z"),
    ("otel", '{"timeUnixNano":"1795075750123456789","severityText":"ERROR","severityNumber":17,"body":"broken","resource":{"service.name":"cart"}}', "2026-11-19T08:09:10.123456", "error", None, None, "cart", "broken severityNumber=17"),
    ("otel", '{"Timestamp":"2026-11-19T08:09:10Z","SeverityNumber":13,"Body":"slow","Resource":{"service.name":"pay","host.name":"h"}}', "2026-11-19T08:09:10", "warning", None, None, "pay", "slow Resource.host.name=h"),
    ("otel", '{"timeUnixNano":"1795075750000000000","severityNumber":9,"body":{"stringValue":"ok"}}', "2026-11-19T08:09:10", "info", None, None, None, "ok"),
    ("gelf", '{"version":"1.1","host":"h1","short_message":"no route","timestamp":1795075750.125,"level":3,"_app":"edge","_zone":"b"}', "2026-11-19T08:09:10.125000", "error", "h1", None, "edge", "no route _zone=b"),
    ("gelf", '{"version":"1.1","host":"h2","short_message":"up","timestamp":1795075750,"level":6,"facility":"core"}', "2026-11-19T08:09:10", "info", "h2", None, "core", "up"),
    ("gelf", '{"host":"h3","short_message":"odd","level":1}', "", "critical", "h3", None, None, "odd"),
    ("log4j", '{"timeMillis":1795075750123,"level":"WARN","loggerName":"shop.Cart","message":"low","thread":"main"}', "2026-11-19T08:09:10.123000", "warning", None, "main", "shop.Cart", "low"),
    ("log4j", '{"instant":{"epochSecond":1795075750,"nanoOfSecond":5000000},"level":"INFO","loggerName":"shop.Cart","message":"up"}', "2026-11-19T08:09:10.005000", "info", None, None, "shop.Cart", "up"),
    ("osquery", '{"name":"pack_x","hostIdentifier":"h1","calendarTime":"Thu Nov 19 08:09:10 2026 UTC","unixTime":1795075750,"action":"added"}', "2026-11-19T08:09:10", None, None, None, "pack_x", "action=added calendarTime=Thu Nov 19 08:09:10 2026 UTC hostIdentifier=h1"),
    ("cloudflare", '{"EdgeEndTimestamp":"2026-11-19T08:09:11Z","EdgeStartTimestamp":"2026-11-19T08:09:10Z","EdgeResponseStatus":503,"ClientRequestURI":"/a"}', "2026-11-19T08:09:10", "error", None, None, None, "ClientRequestURI=/a EdgeEndTimestamp=2026-11-19T08:09:11Z EdgeResponseStatus=503"),
    ("cloudflare", '{"EdgeStartTimestamp":1795075750123456789,"EdgeResponseStatus":200,"ClientRequestURI":"/a"}', "2026-11-19T08:09:10.123456", "info", None, None, None, "ClientRequestURI=/a EdgeResponseStatus=200"),
    ("a date of RFC 850", '{"time":"Thursday, 19-Nov-26 08:09:10 GMT","level":"info","msg":"x"}', "2026-11-19T08:09:10", "info", None, None, None, "x"),
    ("date and time", '{"date":"2026-11-19","time":"09:09:10.25","tz":"+0100","level":"info","msg":"x"}', "2026-11-19T08:09:10.250000", "info", None, None, None, "x"),
    ("date and time", '{"log_date":"2026/11/19","log_time":"08:09:10","severity":"ERROR","msg":"x"}', "2026-11-19T08:09:10", "error", None, None, None, "x"),
    ("mail", '{"ts":"Thu, 19 Nov 2026 09:09:10 +0100","level":"warn","msg":"x"}', "2026-11-19T08:09:10", "warning", None, None, None, "x"),
    ("crowdstrike", '{"metadata":{"eventCreationTime":1795075750001,"eventType":"Login"},"event":{"UserId":"ann"}}', "2026-11-19T08:09:10.001000", None, None, None, None, "event.UserId=ann metadata.eventType=Login"),
    ("access", '{"time_local":"19/Nov/2026:09:09:10 +0100","request":"GET / HTTP/1.1","status":"404"}', "2026-11-19T08:09:10", "warning", None, None, None, "request=GET / HTTP/1.1 status=404"),
    ("ecs access", '{"@timestamp":"2026-11-19T08:09:10Z","http":{"request":{"method":"GET"},"response":{"status_code":500}}}', "2026-11-19T08:09:10", "error", None, None, None, "http.request.method=GET http.response.status_code=500"),
    ("no request", '{"time":"2026-11-19T08:09:10Z","job":"nightly","status":500}', "2026-11-19T08:09:10", None, None, None, None, "job=nightly status=500"),
    ("java double", '{"timestamp":1.79507575025E9,"msg":"x"}', "2026-11-19T08:09:10.250000", None, None, None, None, "x"),
    ("not the time", '{"created_at":"2026-11-19T08:09:10Z","expires_at":"2030-01-01T00:00:00Z","response_time":1795075750,"msg":"x"}', "2026-11-19T08:09:10", None, None, None, None, "x expires_at=2030-01-01T00:00:00Z response_time=1795075750"),
    ("no time", '{"request_time":1795075750,"uptime":1795075750,"msg":"x"}', "", None, None, None, None, "x request_time=1795075750 uptime=1795075750"),
    ("coloured", '{"ts":1795075750,"level":"\\u001b[31mERROR\\u001b[0m","msg":"\\u001b[1mdisk\\u001b[0m full"}', "2026-11-19T08:09:10", "error", None, None, None, "disk full"),
    ("fractions", '{"level":30.0,"pid":1.0,"hostname":"h1","msg":"x","time":1795075750}', "2026-11-19T08:09:10", "info", "h1", "1.0", None, "x"),
    ("a battery", '{"time":1795075750,"battery":{"level":10},"msg":"x"}', "2026-11-19T08:09:10", None, None, None, None, "x battery.level=10"),
    ("windows-xml", XML % ("Service Control Manager", 7031, 2, "<EventData><Data Name='param1'>Print &amp; Spool</Data><Data>2</Data></EventData>"), "2026-11-19T08:09:10.123456", "error", "WIN1", "628", "Service Control Manager", "EventID=7031 data.param1=Print & Spool data.2=2"),
    ("windows-xml", XML % ("Kernel-General", 16, 4, '<RenderingInfo Culture="en-US"><Message>The hive was cleared</Message></RenderingInfo>'), "2026-11-19T08:09:10.123456", "info", "WIN1", "628", "Kernel-General", "The hive was cleared EventID=16"),
    ("windows-xml", (XML % ("Disk", 7, 1, "<EventData>\n  <Data Name=\"device\">\\Device\\Harddisk0</Data>\n</EventData>")).replace("<System>", "\n  <System>\n"), "2026-11-19T08:09:10.123456", "critical", "WIN1", "628", "Disk", "EventID=7 data.device=\\Device\\Harddisk0"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_a_record_of_a_known_program_is_read(case: tuple[str, ...]) -> None:
    _, line, time, level, host, process, service, message = case
    row = parse(raw_frame([line]), detect([line]), arrived=ARRIVED).row(0, named=True)
    expected = datetime.fromisoformat(time).replace(tzinfo=UTC) if time else ARRIVED
    got = {name: row[name] for name in ("level", "host", "process", "service", "message", "timestamp")}
    assert got == {
        "level": level,
        "host": host,
        "process": process,
        "service": service,
        "message": message,
        "timestamp": expected,
    }


def test_records_of_many_programs_in_one_batch_do_not_touch_each_other() -> None:
    lines = [case[1] for case in CASES]
    out = parse(raw_frame(lines), detect(lines * 3), arrived=ARRIVED)
    assert out["message"].to_list() == [case[7] for case in CASES]
    assert out["level"].to_list() == [case[3] for case in CASES]
    assert out["service"].to_list() == [case[6] for case in CASES]


@pytest.mark.parametrize("cut", [20_000, 20_001, 20_007])
@pytest.mark.parametrize("end", ['","a":1}', '"]}', '"}}', "\\", "\\u00e", '","b', '","b":', '","b":tru'])
def test_the_beginning_of_a_line_longer_than_a_record_keeps_its_time_and_level(cut: int, end: str) -> None:
    whole = '{"ts":"2026-11-19T08:09:10Z","level":"error","msg":"import failed","rows":["' + "row " * 9_000
    line = whole[:cut] + end
    row = parse(raw_frame([line]), ("json",), arrived=ARRIVED).row(0, named=True)
    assert (row["level"], row["timestamp"]) == ("error", datetime(2026, 11, 19, 8, 9, 10, tzinfo=UTC))
    assert row["message"].startswith("import failed rows=")


@pytest.mark.parametrize(
    "line",
    [
        '{"textPayload":7,"log":"x","date":1}',
        '{"__REALTIME_TIMESTAMP":"never","MESSAGE":[1,2,999]}',
        '{"__REALTIME_TIMESTAMP":"1795075750000123"}',
        '{"eventVersion":"1.08"}',
        '{"log":"","date":1795075750}',
        "<Event xmlns='x'></Event>",
        "<Event><System></System>",
        '{"date":1,"log":"a","log":"b"}',
    ],
)
def test_an_odd_record_loses_no_row(line: str) -> None:
    out = parse(raw_frame([line]), detect([line]), arrived=ARRIVED)
    assert out.height == 1
    assert out["raw"].item() == line
    assert out["message"].null_count() == 0


_PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4))
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def flattened(value: object, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in flattened(item, f"{path}.{key}")]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return [] if value is None else [(path[1:], text)]


@given(
    document=st.dictionaries(st.sampled_from(["log", "kubernetes", "a", ""]), _VALUES, max_size=3),
    is_ascii=st.booleans(),
    cut=st.integers(0, 40),
    put=st.sampled_from(["", '"', "}", "\\", "\x01", "NaN", ",", "[", " "]),
)
def test_the_pairs_of_an_object_are_those_that_the_parser_of_python_finds(
    document: dict[str, object], *, is_ascii: bool, cut: int, put: str
) -> None:
    whole = json.dumps(document, ensure_ascii=is_ascii)
    text = whole[:cut] + put + whole[cut:]
    try:
        loaded = json.loads(text, parse_constant=float.fromhex)  # raises ValueError but for Infinity
        json.dumps(loaded, ensure_ascii=False).encode()  # half a pair of surrogates is no text
        wanted = flattened(loaded, "") if isinstance(loaded, dict) and loaded else []
    except ValueError:
        wanted = []
    keys, values = formats_json._JsonReader().pairs(text) or ((), ())
    assert list(zip(keys, values, strict=True)) == wanted


_OUTER_KEYS = (
    "level", "lvl", "severityNumber", "MessageTemplate", "eventVersion", "errorCode", "t", "t.$date", "time",
    "date", "@timestamp", "host", "hostname", "kubernetes", "service", "service.name", "pid",
    "__REALTIME_TIMESTAMP", "other",
)  # fmt: skip
_OUTER_TEXTS = (
    "info", " ERROR", "30", "9", "", "2026-11-20T10:00:00Z", "1763539200", "/Date(1763539200123)/", "é😀",
    "\x1b[1m",
)  # fmt: skip
_OUTER_VALUES = st.recursive(
    st.sampled_from([*_OUTER_TEXTS, None, True, 3, 1763539200.25]),
    lambda inner: st.dictionaries(
        st.sampled_from(["name", "host", "container_name", "$date"]), inner, max_size=2
    ),
    max_leaves=3,
)


@settings(max_examples=25)
@given(
    documents=st.lists(
        st.dictionaries(st.sampled_from(_OUTER_KEYS), _OUTER_VALUES, max_size=5), min_size=1, max_size=20
    ),
    line=st.sampled_from(["", "a", "b\n", '"{', "\u2028"]),
    is_ascii=st.booleans(),
)
def test_an_envelope_has_the_header_of_its_object_without_the_line(
    documents: list[dict[str, object]], line: str, *, is_ascii: bool
) -> None:
    around = [{**document, "stream": "stdout", "object": {}} for document in documents]
    texts = [json.dumps({**one, "log": line}, ensure_ascii=is_ascii) for one in around]
    whole = pl.Series("raw", [*texts, "no object", '{"log":"half","stream":"stdout"'])
    plain = pl.Series("raw", list(map(json.dumps, around)))
    unwrapped = unwrap(whole, "envelope", arrived=ARRIVED)
    assert unwrapped["inner"].to_list() == [line.removesuffix("\n")] * len(texts) + [None] * 2
    expected = formats_json.parse_pairs(plain, "json", arrived=ARRIVED, zone="UTC").drop("message")
    assert_frame_equal(unwrapped.drop("inner", "extra").head(len(texts)), expected)


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ('{"textPayload":"b","log":"a","stream":"stdout"}', "a"),
        ('{"log":5,"textPayload":"b"}', "b"),
        ('{"log":5,"stream":"stdout"}', "5"),
        ('{"log":{"level":"info"},"textPayload":"b"}', "b"),
        ('{"log":"\\ud83d\\ude00","stream":"stdout"}', "😀"),
        ('{"log":"a","stream":"stdout","other":"\\ud83d"}', None),
        ('{"log":"a","log":"b","stream":"stdout"}', "b"),
    ],
)
def test_the_line_of_an_envelope_is_the_first_of_its_keys(document: str, line: str | None) -> None:
    found = unwrap(pl.Series("raw", [document]), "envelope", arrived=ARRIVED)
    assert found["inner"].to_list() == [line]
