"""Where the fuzzer begins: what honest senders write, of every kind that is read, and pieces that are put
in."""

import base64
import json
import random
from datetime import UTC, datetime
from typing import Any

import msgpack
import polars as pl

from pipeline.records.batch import Batch, Purpose
from pipeline.records.declared import shipped_formats
from pipeline.records.delivery import Meta
from pipeline.records.payload import pack
from pipeline.records.pushed import pushed
from pipeline.records.schema import UTC_US, pack_frame, raw_frame
from pipeline.records.verdict import Verdict
from pipeline.sources.chunks import Cursor

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)

# Lines with more in them than the examples of the formats in RECORDS.
LINES = (
    *(form.example for form in shipped_formats()),
    "- 1117838570 2005.06.03 R02-M1-N0 2005-06-03-15.42.50.363779 R02-M1-N0 RAS KERNEL INFO instruction "
    "cache parity error corrected",
    "- 1131566461 2005.11.09 dn228 Nov 9 12:01:01 dn228/dn228 crond(pam_unix)[2915]: session closed for user "
    "root",
    "081109 203615 148 INFO dfs.DataNode: Receiving block blk_-1608999687919862906 src: /10.250.19.102:54106",
    "134681 node-246 unix.hw state_change.unavailable 1077804742 1 Component State Change: Component is "
    "unavailable (HWID=1973)",
    '<165>1 2026-11-20T10:00:00.003Z web-1.example api 8710 ID47 [meta seq="4"] \ufeffready',
    "<34>Nov 20 10:00:00.25 host-1 sshd[4711]: Failed password for root from 10.0.0.7 port 22 ssh2",
    "<187>Nov 20 2026 10:00:00 sw1 : %LINK-3-UPDOWN: Interface Gi0/1, changed state to down",
    "2026-11-20T10:00:00.123456+01:00 host-1 systemd[1]: Started Session 12 of user bob.",
    "E1120 10:00:00.123456   1234 file.go:12] panic: index out of range [5] with length 3",
    'shop:443 10.0.0.7 - bob [20/Nov/2026:10:00:00 +0100] "GET /a?b=1&c=%2e%2e HTTP/1.1" 500 12 "-" "curl/8.1"',
    '2026/11/20 10:00:00 [error] 31#32: *5 open() "/srv/x" failed (2: No such file or directory), client: 10.0.0.7',
    "[Fri Nov 20 10:00:00.123456 2026] [core:error] [pid 7:tid 9] [client 10.0.0.1:80] AH00124: Request "
    "exceeded the limit",
    "2026-11-20 10:00:00.123 CET [77-1] app@shop ERROR:  duplicate key value violates unique constraint",
    "2026-11-20 10:00:00 UTC:10.0.0.9(5511):app@shop:[31]:FATAL:  too many connections",
    "2026-11-20T10:00:00.123456Z 0 [Warning] [MY-010068] [Server] CA certificate ca.pem is self signed.",
    "11:M 20 Nov 2026 10:00:00.123 # Can't save in background: fork: Cannot allocate memory",
    "20171223-22:15:29:606|Step_LSC|30002312|onStandStepChanged 3579",
    "2026-03-17 16:13:38.811  1702  2395 D WindowManager: printFreezingDisplayLogsopening app wtoken = "
    "AppWindowToken{9f4ef63}",
    "2026-11-20 10:00:00, Info                  CBS    Loaded Servicing Stack v6.1.7601.23505",
    "2026-11-20 10:00:00,123 - WARN  [SendWorker:188978561024:QuorumCnxManager$SendWorker@688] - Send worker "
    "leaving thread",
    "2026-11-20 10:00:00.123 [SW_CTX:[pay,ab12@10.0.0.7,t.1.2,s.1.2,0]] [http-1] INFO  p.Pay -paid 3",
    "2026-11-20 10:00:00.123  INFO [cart,5f,6a,true] 1 --- [nio-8080-exec-1] c.s.CartController : added 3 "
    "items",
    "2026-11-20 10:00:00.008 2931 INFO nova.compute.manager [req-3ea4052c-895d - - -] [instance: b9000564] "
    "VM Started",
    "2026-11-20 10:00:00,123 - shop.cart - MainThread - WARNING - low - stock",
    "[2026-11-20 10:00:00 +0100] [12] [CRITICAL] WORKER TIMEOUT (pid:12)",
    "[2026-11-20 10:00:00,123: ERROR/ForkPoolWorker-1] Task a.b[5f3a-77] raised unexpected: ValueError(7)",
    "[2026-11-20T10:00:00,123][WARN ][o.e.m.j.JvmGcMonitorService] [es-1] [gc][12] overhead, spent [700ms]",
    "[2026-11-20T10:00:00.5Z ERROR shop::cart] thread 'main' panicked",
    "2026-11-20 10:00:00,978 FATAL [IPC Server handler 5 on 8020] org.apache.hadoop.ipc.Server$Handler: "
    "caught",
    "2026-11-20T10:00:00Z  WARN org.shop.cart.Checkout:42 - retry 3 of 5 in 1.5s",
    "2026-11-20 10:00:00.123 [main] DEBUG o.h.SQL - select * from t where id=?",
    "23:59:59.999 [http 1] ERROR Foo: yesterday",
    "17/06/09 20:10:40 ERROR executor.Executor: Exception in task 0.0 in stage 1.0 (TID 3)",
    "CRITICAL:py.warnings:disk at 97%",
    "2026/11/20 10:00:00.000123 [ERR] raft: Failed to make RequestVote RPC to {Voter 10.0.0.2:8300}",
    "2026-11-20T10:00:00.123+0530\tinfo\tserved user 7 from 10.0.0.7 in 12 ms",
    "[2026-11-20 10:00:00,123] WARN [Broker 0] Unable to connect (kafka.Log)",
    "1763539200.123456789    12 10.0.0.1 TCP_MISS/200",
    "[99999.123456] usb 1-1: new high-speed USB device number 4 using xhci_hcd",
    'INFO:     10.0.0.1:5 - "GET / HTTP/1.1" 200 OK',
    'time=2026-11-20T10:00:00Z level=warn ts=1700000000.5 msg="slow \\"query\\"" took=12.5ms empty= a.b/c=d',
    '{"time":"2026-11-20T10:00:00Z","level":"error","msg":"disk full","nested":{"a":[1,2,{"b":null}]},"pid":7}',
    '{"ts":1763539200250,"severity":50,"message":"x","app":"shop","host":"h1","thread":"t","n":-1.5e3,"ok":true}',
    '{"t":{"$date":"2026-11-20T10:00:00.001+00:00"},"s":"W","c":"NETWORK","ctx":"conn1","msg":"slow \\u00e9","attr":{"ms":9}}',
    '{"log":"2026-11-20 10:00:00,978 INFO [main] a.B: in\\u003e\\n","stream":"stderr","time":"2026-11-20T10:00:00.1Z"}',
    '{"log":"{\\"level\\":\\"warn\\",\\"msg\\":\\"j\\"}\\n","stream":"stdout","attrs":{"tag":"x"},"time":"2026-11-20T10:00:00.5Z"}',
    "2026-11-20T10:00:00.123456789Z stderr F E1120 10:00:00.120000       1 a.go:5] bad",
    '2026-11-20T09:09:10.5+01:00 stdout F {"level":"error","msg":"x"}',
    "\x1b[1;31mERROR\x1b[0m caf\u00e9 \U0001f600 /var/log/x.log a@b.example C:\\Temp\\a 0xff 12:30:00 "
    "https://a.example/b?c=d#e",
    "user 5f3a9c1e-77aa-4d10-9e11-0123456789ab fe80::1%eth0 00:1a:2b:3c:4d:5e $1,234.50 99.9% 3.2GiB "
    "v1.2.3-rc1 sha256:deadbeef",
)  # fmt: skip
# With LINES, every format and both kinds of tables (tests/tasks/test_hostile_payloads.py).
RECORDS = (
    *(form.example for form in shipped_formats()),
    'Timestamp,Level,Service,Message,User\n2026-11-20T10:00:00.5Z,ERROR,cart,"no ""stock"", at\nall",ann\n'
    "2026-11-20T10:00:01+01:00,info,pay,,bob\n2026-11-20T10:00:02Z,Warn,cart,low\n",
    "date\ttime\thost\tseverity\tmsg\n2026-11-20\t10:00:00\th1\tINFO\tup\n2026-11-20\t10:00:01\th2\tFATAL\tdead\n",
    "#Version: 1.0\n#Fields: date time s-ip cs-method cs-uri-stem cs-uri-query sc-status time-taken\n"
    "2026-11-20 10:00:00 10.0.0.1 GET /a - 200 15\n2026-11-20 10:00:01 10.0.0.1 POST /b q=1 503 2000\n",
    'Traceback (most recent call last):\n  File "/srv/app.py", line 12, in run\n    go()\nValueError: 7 is wrong\n\n'
    'During handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n  File "a.py", line 1\n'
    "shop.errors.Broken: [Errno 5]\nnext",
    "2026-11-20 10:00:00,978 ERROR [main] a.B: boom\njava.lang.IllegalStateException: x\n\tat "
    "a.b.C.d(C.java:12)\n\tat a.b.C$1.run(C.java)\n"
    "Caused by: java.io.IOException: y\n\t... 12 more\nSuppressed: z",
    "panic: runtime error: index out of range [5]\n\ngoroutine 1 [running]:\nmain.(*T).f(0xc000010000, {0x1, "
    "0x2})\n\t/srv/main.go:7 +0x1d\n"
    "created by main.main in goroutine 1\nexit status 2",
    'TypeError: Cannot read properties of undefined (reading "a")\n    at f (/srv/a.js:1:2)\n    at async g (node:internal/b:3:4)\n}\n])',
    "System.NullReferenceException: no object\r\n   at A.B.C(String d) in C:\\src\\C.cs:line 12\r\n--- End "
    "of inner exception stack trace ---\r\n",
    "2026-11-20T10:00:00.1Z stderr P first \n2026-11-20T10:00:00.2Z stderr P \n2026-11-20T10:00:00.3Z stderr "
    "F last\n2026-11-20T10:00:00.4Z stdout F ",
    '{"log":"half of ","stream":"stdout","time":"2026-11-20T10:00:00.1Z"}\n{"log":"a line\\n","stream":"stdout","time":"2026-11-20T10:00:00.2Z"}\n',
    '{\n  "level": "error",\n  "msg": "over\\nmany lines",\n  "at": [\n    1\n  ]\n}\n',
    "\ufeffINFO begins with a mark\r\n\r\n   \n\t\n\ufeff\nERROR the end",
    "\n".join(LINES[:24]),
    "\n".join(LINES[24:]) + "\n",
    "\n".join(LINES[5:6] * 30),
    "INFO " + "long word" * 700 + "\nERROR " + "\u00e9" * 3000,
)  # fmt: skip
TIMES = (
    "2026-11-20T10:00:00Z", "2026-11-20 10:00:00,123 +0100", "1700000000", "1700000000123", "1700000000.5", "1e400",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-02-30T25:61:61", "2011-12-30T10:00:00", "99999999999999999999",
    "2026-11-20T10:00:00.123456789123Z", "-1", "262143-01-01T00:00:00Z", "20261120T100000Z", "1763539200123456789", "9223372036854775807",
    "[2026-11-20 10:00:00.5 CEST]", "2026-03-29 02:30:00", "2026-10-25 02:30:00", "2026-11-20T10:00:00+99:99", "2024-02-29 23:59:60 Z",
    "1969-12-31 23:59:59Z", "2261-01-01T00:00:00Z", "2026-11-20 1:00:00 EST", "253402300799", "0000-00-00T00:00:00Z",
)  # fmt: skip
DOCUMENTS = (
    {"@timestamp": "2026-11-20T10:00:00Z", "message": "disk full", "level": "error", "service": "shop"},
    {"@timestamp": 1700000000123, "message": ["a"], "level": None, "kubernetes": {"labels": {"app": ["x", "y"]}}},
    {"@timestamp": {"a": [1.5]}, "message": {"deep": [[[{}]]]}, "kubernetes.labels.app": "\ud800", "service": 7},
    {"message": "x" * 300, "pattern_id": "18446744073709551616", "template_id": -1, "anomalous": "yes"},
    {"timestamp": "2026-11-20T10:00:00.123456Z", "message": "a <NUM>", "workload": "shop/cart", "pattern_id": "7", "template_id": 3,
     "anomalous": True, "level": "warning", "lines": 2},
    {"timestamp": "1700000000123", "message": None, "workload": "", "pattern_id": 7, "template_id": "3", "anomalous": None},
    {"@timestamp": ["2026-11-20"], "message": "two\nlines \n", "level": " WARN ", "kubernetes": {"labels.app": "a"}},
    {"message": "\u0000 \u202e caf\u00e9 \U0001f600" + "\n" * 50, "service": "s" * 500},
    {"timestamp": 1e300, "message": 12345678901234567890, "pattern_id": 1.5, "template_id": [1], "anomalous": {}},
)  # fmt: skip

# Pieces for text of any kind: ends of lines, half characters, what looks like a digit or changes its length,
# long runs.
TEXT_WORDS = (
    b"\n", b"\r\n", b"\r", b"\n\n", b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82",
    b"\xc2\x85", b"\x0b", b"\x0c", b"\x1c", b"\x7f", b"\x08", b"\t", b"\x1b[31m", b"\x1b]0;", b"\x1b",
    *(text.encode() for text in (
        "\u2028", "\u202e", "\u200b", "\u200d", "\u00a0", "\u3000", "e\u0301\u0302\u0303", "\u0663\u0664", "\uff11\uff12", "\U0001d7d9", "\u0130",
        "\u00df", "\ufdd0", "\ufdda", "\ufddb", "_\ufdd5_", "\ufffe", "\U0010ffff", "\U0001f468\u200d\U0001f469", "\u00e9" * 70,
    )),
    b"9" * 25, b"1" * 400, b"18446744073709551616", b"-9223372036854775809", b"1e999", b"-0", b"0x" + b"f" * 40, b"00000", b"NaN", b"4294967296",
    b"((((", b"[" * 60, b"{" * 60, b"a." * 80, b"::" * 40, b"/a" * 100, b'\\"' * 60, b"\\" * 61, b"<NUM>", b"${1}", b"%s", b"\\x00", b"\\ud800", b"\\u0000",
    b" " * 300, b"a=" * 90, b'k="v" ' * 40, b"1." * 60, b"@" * 70, b"aaaaaaaaaaaaaaaa", b'"', b"'", b"\\", b"=", b"]", b"}", b" - ", b": ", b"|",
    b"Traceback (most recent call last):\n", b"Caused by: ", b"\n\tat a.b(C.java:1)\n", b"\n... 7 more\n", b"goroutine 1 [", b'{"log":"',
    b'\\n","stream":"stderr","time":"2026-11-20T10:00:00Z"}\n', b" stderr P ", b" stdout F ", b"2026-11-20T10:00:00.1Z stdout P \n", b"\n}\n",
    b"Feb 29 23:59:60", b"00:00:00", b"+23:59", b"-99:99", b" IST", b"24:00:00", b"2026-02-30", b"9999-12-31", b"0000-00-00", b"31/Dec/9999",
)  # fmt: skip
# What JSON can say in place of a text; and what it can no longer say.
JSON_VALUES = (
    b"null", b"{}", b"[]", b"[[]]", b"[null]", b'[""]', b"true", b"false", b"0", b"7", b"-0", b"1.5", b"1e300", b"-1e-400", b"9" * 40,
    b"18446744073709551616", b"-9223372036854775809", b'""', b'" "', b'"a"', b'["a"]', b'["a","b"]', b'{"a":{"b":[1,null]}}', b'"\\ud800"', b'"\\udc00\\ud800"',
    b'"\\u0000"', b'"a\\nb\\r\\n"', b'"\\ud83d\\ude00"', b'"2026-11-20T10:00:00Z"', b'"2026-11-20T10:00:00.123456789+23:59"', b'"+262143-01-01T00:00:00Z"',
    b'"1700000000123"', b"1700000000123", b'"-9223372036854775808"', b'"999999999999999"', b'"18446744073709551615"', b'" 7"', b'"yes"', b'"ERROR"', b'" Warn "',
    b'{"labels":{"app":"shop"}}', b'{"labels":{"app":[["a"]]}}', b'{"labels.app":["a"]}', b'{"labels":["app"]}', b"[" * 60 + b"]" * 60,
    b'{"a":' * 50 + b"1" + b"}" * 50, b'"' + b"x" * 2_000 + b'"', '"caf\u00e9 \u2028\u202e\U0001f600"'.encode(), b'"\xff\xed\xa0\x80"', '"\ufdd0\ufeff"'.encode(),
)  # fmt: skip
JSON_WORDS = (
    *JSON_VALUES, b"1e400", b"NaN", b"-Infinity", b"9" * 5000, b"[" * 990 + b"]" * 990, b"\\ud800", b',"message":1', b"\xed\xa0\x80", b"\xe2\x80\xa8",
    b"\xf0\x9f\x98\x80", b"\xef\xbb\xbf",
)  # fmt: skip
REQUEST_WORDS = (
    *JSON_WORDS, b"\n", b"\n\n", b"}{", b'{"index":{}}\n', b'{"update":{"_id":"1"}}\n', b"MESSAGE\n\xff\xff\xff\xff\xff\xff\xff\xff", b"\n\tat a.b(C.java:1)",
    b"Traceback (most recent call last):", b"\xff" * 10, b"\x0a\x00", b"\x12\x00", b"\x80" * 9 + b"\x01", b'"fields":{"log":1}', b"[" * 100_000,
)  # fmt: skip
_FIELDS = (
    b"@timestamp", b"message", b"level", b"service", b"kubernetes", b"kubernetes.labels", b"kubernetes.labels.app", b"timestamp", b"workload",
    b"pattern_id", b"template_id", b"anomalous", b"lines", b"", b"a.b", b"_id", b"sort",
)  # fmt: skip


def document(rng: random.Random) -> bytes:
    """JSON that is valid, whatever its fields hold; one may come twice."""
    names = rng.choices(_FIELDS, k=rng.randrange(9))
    return b"{" + b",".join(b'"%s":%s' % (name, rng.choice(JSON_VALUES)) for name in names) + b"}"


def lines() -> list[bytes]:
    return [text.encode() for text in (*LINES, *RECORDS)]


def framing() -> list[bytes]:
    """The first byte says where the bytes arrive in two blocks."""
    return [bytes([at]) + text for text in lines() for at in (0, 32, 255)]


def times() -> list[bytes]:
    """The first byte says which zone."""
    return [bytes([zone]) + text.encode() for text in TIMES for zone in range(4)]


def documents() -> list[bytes]:
    # What is no UTF-8 becomes three bytes for one: a message longer than a record.
    long = b'{"message":"' + b"\xff" * 24_000 + b'"}'
    return [*(json.dumps(document).encode() for document in DOCUMENTS), long]


def messages() -> list[bytes]:
    def made(args: object, **other: object) -> bytes:
        body = base64.b64encode(
            json.dumps([args, {}, dict.fromkeys(("callbacks", "chain"))]).encode()
        ).decode()
        headers = {
            "lang": "py",
            "task": "logweir.ingest",
            "id": "5f3a",
            "retries": 0,
            "timelimit": [None, None],
        }
        return json.dumps(
            {
                "body": body,
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "headers": headers | other,
                "properties": {
                    "correlation_id": "5f3a",
                    "delivery_info": {"exchange": "", "routing_key": "ingest"},
                    "body_encoding": "base64",
                    "delivery_tag": "7c",
                },
            }
        ).encode()

    return [made(["b-1"]), made([]), made(["b"], expires="2026-11-20T10:00:00+00:00"), made(["b"], eta="x")]


def _batch(items: list[Any]) -> Batch:
    return Batch(
        batch_id="b", workload="w", source="push", source_key="k", purpose=Purpose.SCORE, arrived=NOW, formats=(),
        zone="UTC", records=pushed(items),
    )  # fmt: skip


def payloads() -> list[bytes]:
    lists = pl.DataFrame({"words": [["a"], ["bb", "a text of more than twelve"]], "score": [0.5, None]})
    known = raw_frame(["a line of text that is long", "b"]).with_columns(
        pl.lit(NOW).cast(UTC_US).alias("timestamp")
    )
    return [
        pack_frame(raw_frame(["a", "bb"])),
        pack_frame(known),
        pack_frame(lists),
        pack_frame(lists.clear()),
        *(
            pack(_batch(items), zstd=zstd).blob
            for items in (["a", "\tat b"], [{"message": "a", "timestamp": NOW, "host": "h"}])
            for zstd in (False, True)
        ),
    ]


def manifests() -> list[bytes]:
    calibration = {
        "mode": "baseline", "method": "conformal", "median": 1.0, "threshold": 2.0, "held_out": 20, "total": 30, "quantiles": [1.0, 2.0],
    }  # fmt: skip
    numbers = ("lines", "distinct", "fitted", "templates", "held_out_templates", "left_out", "seconds", "epochs", "steps", "loss",
               "held_out_above", "parameters")  # fmt: skip
    return [
        json.dumps(
            {
                "format": 1, "version": "v1", "created": "2026-01-02T03:04:05+00:00", "mode": "baseline", "mask_version": "abc",
                "tokens": ["<IP>"], "config": {"model": {"hidden": 8}}, "calibration": calibration,
                "stats": dict.fromkeys(numbers, 1) | {"device": "cpu"}, "seed": 1,
                "parent": None, "held_out": [1], "files": {"model.safetensors": {"size": 7, "sha256": "0" * 64}},
            }
        ).encode()
    ]  # fmt: skip


def stored() -> list[bytes]:
    verdict = Verdict(template_id=1, score=0.5, anomalous=True, reasons=("rare:1/2",))
    meta = Meta(
        source="a.log", source_key="ab", purpose=Purpose.SCORE, arrived=NOW, formats=("json",), zone="UTC"
    )
    cursor = Cursor(path="/a", identity="x")
    template = bytes(msgpack.packb([1, "a <NUM>", False, "shop"]))
    return [
        b"t" + template,
        b"v" + verdict.pack(),
        b"m" + meta.dump().encode(),
        b"c" + cursor.pack().encode(),
    ]
