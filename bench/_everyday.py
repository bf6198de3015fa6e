"""Forty everyday log formats, written as the programs write them, with the time, level and service of each
line.

The layouts are those of the programs' documentation or output. Hosts, numbers and messages are made up. A
level is one of `records.levels.LEVELS`. None stands for a line without a level, for which `info` is right
too. A service that is None is not checked."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

Stamp = Callable[[datetime], str]
Row = tuple[
    str, str | None, str | None
]  # text with @t@ (the time), @c@ (as HAProxy writes it), @n@; level; service

EVERY_S: Final = 7
CET: Final = timezone(timedelta(hours=1))
PST: Final = timezone(timedelta(hours=-8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Everyday:
    """One format: how its time is written, and a few kinds of lines that take turns."""

    name: str
    stamp: Stamp
    rows: tuple[Row, ...]
    whole_seconds: bool = True  # the time is written without fractions
    head: str = ""  # lines before the first record
    foot: str = ""
    between: str = "\n"
    suffix: str = ".log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is right for one record. `line` is its first physical line, 1-based."""

    line: int
    time: datetime
    level: str | None
    service: str | None


def written(form: Everyday, *, first: datetime, records: int) -> tuple[str, list[Expected]]:
    """The text of a file of this format with so many records, and what is right for each."""
    text, expected = form.head, []
    for n in range(records):
        moment = first + timedelta(seconds=EVERY_S * n, milliseconds=0 if form.whole_seconds else 250)
        row, level, service = form.rows[n % len(form.rows)]
        line = text.count("\n") + 1
        expected.append(Expected(line=line, time=moment, level=level, service=service))
        last = n == records - 1
        record = row.replace("@t@", form.stamp(moment)).replace("@n@", str(1000 + 37 * n % 8999))
        record = record.replace("@c@", moment.strftime("%d/%b/%Y:%H:%M:%S.000"))
        text += record + ("" if last and form.foot else form.between)
    return text + form.foot, expected


def _form(pattern: str, zone: Any = UTC) -> Stamp:
    return lambda moment: moment.astimezone(zone).strftime(pattern)


def _millis(pattern: str, *, mark: str = ".", zone: Any = UTC, after: str = "") -> Stamp:
    def stamp(moment: datetime) -> str:
        local = moment.astimezone(zone)
        return f"{local.strftime(pattern)}{mark}{local.microsecond // 1000:03d}{after}"

    return stamp


def _epoch(factor: int) -> Stamp:
    return lambda moment: str(round(moment.timestamp() * factor))


def _unpadded(pattern: str, zone: Any = UTC) -> Stamp:
    """`%e`: the day padded with a blank, as syslog and ctime write it."""
    return lambda moment: moment.astimezone(zone).strftime(
        pattern.replace("%e", f"{moment.astimezone(zone).day:2d}")
    )


def _json(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


_ISO_Z: Final = _millis("%Y-%m-%dT%H:%M:%S", after="Z")
_CLF: Final = _form("%d/%b/%Y:%H:%M:%S +0000")
_RFC3164: Final = _unpadded("%b %e %H:%M:%S")

_TEXTS: Final = (
    Everyday(
        name="docker-compose",
        stamp=_millis("%Y-%m-%d %H:%M:%S", mark=","),
        whole_seconds=False,
        rows=(
            ("web-1    | @t@ INFO handled request @n@ in 12 ms", "info", None),
            ("worker-1 | @t@ WARNING queue is @n@ jobs long", "warning", None),
            ("web-1    | @t@ ERROR upstream did not answer request @n@", "error", None),
        ),
    ),
    Everyday(
        name="kubectl-prefix",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            ("[pod/cart-6d5f7c9b8d-x2x7p/cart] @t@ INFO cart @n@ was saved", "info", None),
            ("[pod/cart-6d5f7c9b8d-x2x7p/cart] @t@ ERROR cart @n@ could not be saved", "error", None),
        ),
    ),
    Everyday(
        name="docker-json",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            ('{"log":"level=info msg=\\"job @n@ done\\"\\n","stream":"stdout","time":"@t@"}', "info", None),
            (
                '{"log":"level=error msg=\\"job @n@ failed\\"\\n","stream":"stderr","time":"@t@"}',
                "error",
                None,
            ),
        ),
    ),
    Everyday(
        name="cri",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            ("@t@ stdout F INFO: served request @n@", "info", None),
            ("@t@ stderr F ERROR: could not serve request @n@", "error", None),
        ),
    ),
    Everyday(
        name="ansi",
        stamp=_form("%Y-%m-%d %H:%M:%S"),
        rows=(
            ("\x1b[2m@t@\x1b[0m \x1b[32mINFO\x1b[0m started job \x1b[1m@n@\x1b[0m", "info", None),
            ("\x1b[2m@t@\x1b[0m \x1b[31mERROR\x1b[0m job \x1b[1m@n@\x1b[0m failed", "error", None),
        ),
    ),
    Everyday(
        name="journald-json",
        stamp=_epoch(1_000_000),
        whole_seconds=False,
        rows=tuple(
            (
                _json(
                    __CURSOR="s=0f3e;i=@n@",
                    __REALTIME_TIMESTAMP="@t@",
                    __MONOTONIC_TIMESTAMP="88120@n@",
                    _BOOT_ID="a1b2c3",
                    PRIORITY=priority,
                    _HOSTNAME="web1",
                    SYSLOG_IDENTIFIER=service,
                    _PID="@n@",
                    _TRANSPORT="journal",
                    MESSAGE=message,
                ),
                level,
                service,
            )
            for priority, service, message, level in (
                ("6", "sshd", "Accepted publickey for deploy from 10.0.0.7 port @n@ ssh2", "info"),
                ("3", "kernel", "EXT4-fs error (device sda1): inode @n@", "error"),
                ("4", "systemd", "app.service: Watchdog timeout, @n@ ms", "warning"),
            )
        ),
        suffix=".json",
    ),
    Everyday(
        name="journalctl-short-full",
        stamp=_form("%a %Y-%m-%d %H:%M:%S UTC"),
        rows=(
            ("@t@ web1 sshd[@n@]: Connection closed by 10.0.0.9 port @n@", None, "sshd"),
            ("@t@ web1 systemd[1]: app.service: Main process exited, status=@n@", None, "systemd"),
        ),
    ),
    Everyday(
        name="gcp",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=tuple(
            (
                _json(
                    insertId="1a@n@",
                    timestamp="@t@",
                    severity=severity,
                    logName="projects/shop/logs/stdout",
                    resource={"type": "k8s_container", "labels": {"container_name": "cart"}},
                    textPayload=message,
                ),
                level,
                None,
            )
            for severity, message, level in (
                ("INFO", "cart @n@ opened", "info"),
                ("ERROR", "cart @n@ lost its session", "error"),
            )
        ),
        suffix=".json",
    ),
    Everyday(
        name="fluent-bit",
        stamp=lambda moment: f"{moment.timestamp():.6f}",
        whole_seconds=False,
        rows=(
            ('{"date":@t@,"log":"[info] request @n@ served","stream":"stdout"}', "info", None),
            ('{"date":@t@,"log":"[error] request @n@ refused","stream":"stderr"}', "error", None),
        ),
        suffix=".json",
    ),
    Everyday(
        name="syslog-3164",
        stamp=_RFC3164,
        rows=(
            ("@t@ db2 CRON[@n@]: pam_unix(cron:session): session opened for user root", None, "CRON"),
            ("@t@ db2 kernel: [88120.@n@] eth0: link up", None, "kernel"),
        ),
    ),
    Everyday(
        name="syslog-5424",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            ("<14>1 @t@ web1 api @n@ - - request served", "info", "api"),
            ("<11>1 @t@ web1 api @n@ - - request refused", "error", "api"),
        ),
    ),
    Everyday(
        name="nginx-access",
        stamp=_CLF,
        rows=(
            ('10.0.0.5 - - [@t@] "GET /cart/@n@ HTTP/1.1" 200 512 "-" "curl/8.5.0"', None, None),
            ('10.0.0.6 - - [@t@] "GET /img/@n@ HTTP/1.1" 404 153 "-" "curl/8.5.0"', "warning", None),
            ('10.0.0.7 - - [@t@] "POST /pay HTTP/1.1" 502 @n@ "-" "Mozilla/5.0"', "error", None),
        ),
    ),
    Everyday(
        name="nginx-error",
        stamp=_form("%Y/%m/%d %H:%M:%S"),
        rows=(
            ("@t@ [notice] 812#812: signal process started", "notice", None),
            ('@t@ [error] 812#812: *@n@ open() "/srv/@n@.png" failed (2: No such file)', "error", None),
        ),
    ),
    Everyday(
        name="apache-error",
        stamp=lambda m: f"{m:%a %b %d %H:%M:%S}.{m.microsecond:06d} {m:%Y}",
        whole_seconds=False,
        rows=(
            ("[@t@] [mpm_event:notice] [pid 71:tid 140] AH00489: Apache/2.4.58 configured", "notice", None),
            ("[@t@] [core:error] [pid 71:tid 141] [client 10.0.0.8:@n@] AH00126: Invalid URI", "error", None),
        ),
    ),
    Everyday(
        name="haproxy",
        stamp=_RFC3164,
        rows=(
            (
                "@t@ lb1 haproxy[2201]: 10.0.1.2:33317 [@c@] web app/s1 "
                '10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 "GET /i/@n@ HTTP/1.1"',
                None,
                "haproxy",
            ),
            (
                "@t@ lb1 haproxy[2201]: 10.0.1.2:33318 [@c@] web app/<NOSRV> "
                '0/-1/-1/-1/0 503 212 - - SC-- 0/0/0/0/0 0/0 "GET /i/@n@ HTTP/1.1"',
                "error",
                "haproxy",
            ),
        ),
    ),
    Everyday(
        name="envoy",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            (
                '[@t@] "GET /v1/items/@n@ HTTP/1.1" 200 - 0 154 22 20 "10.0.0.1" "curl/8" "a-@n@" "shop" '
                '"10.2.0.5:80"',
                None,
                None,
            ),
            (
                '[@t@] "POST /v1/pay HTTP/1.1" 503 UF 91 33 10 - "10.0.0.1" "curl/8" "b-@n@" "shop" '
                '"10.2.0.6:80"',
                "error",
                None,
            ),
        ),
    ),
    Everyday(
        name="aws-alb",
        stamp=_millis("%Y-%m-%dT%H:%M:%S", after="000Z"),
        whole_seconds=False,
        rows=(
            (
                "http @t@ app/shop/50dc6c495c0c9188 10.0.1.2:2817 10.0.2.5:80 0.000 0.001 0.000 200 200 34 "
                '366 "GET http://shop.example:80/i/@n@ HTTP/1.1" "curl/8.5.0" - -',
                None,
                None,
            ),
            (
                "https @t@ app/shop/50dc6c495c0c9188 10.0.1.2:2818 - -1 -1 -1 503 - 34 366 "
                '"GET https://shop.example:443/i/@n@ HTTP/1.1" "curl/8.5.0" ECDHE TLSv1.2',
                "error",
                None,
            ),
        ),
    ),
    Everyday(
        name="iis",
        stamp=_form("%Y-%m-%d %H:%M:%S"),
        head=(
            "#Software: Microsoft Internet Information Services 10.0\n#Version: 1.0\n"
            "#Fields: date time s-ip cs-method cs-uri-stem cs-uri-query s-port cs-username c-ip "
            "cs(User-Agent) sc-status sc-substatus sc-win32-status time-taken\n"
        ),
        rows=(
            ("@t@ 10.0.0.2 GET /shop/@n@ - 443 - 10.0.0.77 curl/8.5.0 200 0 0 15", None, None),
            ("@t@ 10.0.0.2 POST /pay/@n@ - 443 - 10.0.0.78 curl/8.5.0 500 0 64 9100", "error", None),
        ),
    ),
    Everyday(
        name="cloudfront",
        stamp=_form("%Y-%m-%d\t%H:%M:%S"),
        head=(
            "#Version: 1.0\n#Fields: date time x-edge-location sc-bytes c-ip cs-method cs(Host) cs-uri-stem "
            "sc-status cs(Referer) cs(User-Agent)\n"
        ),
        rows=(
            ("@t@\tFRA2-C1\t@n@\t10.0.3.1\tGET\td1.example\t/a.js\t200\t-\tMozilla/5.0", None, None),
            ("@t@\tFRA2-C1\t@n@\t10.0.3.1\tGET\td1.example\t/b.js\t504\t-\tMozilla/5.0", "error", None),
        ),
    ),
    Everyday(
        name="cloudtrail",
        stamp=_form("%Y-%m-%dT%H:%M:%SZ"),
        head='{"Records":[',
        rows=(
            (
                '{"eventVersion":"1.08","eventTime":"@t@","eventSource":"s3.amazonaws.com",'
                '"eventName":"GetObject","awsRegion":"eu-central-1","requestID":"@n@"}',
                None,
                None,
            ),
            (
                '{"eventVersion":"1.08","eventTime":"@t@","eventSource":"iam.amazonaws.com",'
                '"eventName":"CreateUser","errorCode":"AccessDenied","requestID":"@n@"}',
                "error",
                None,
            ),
        ),
        between=",\n",
        foot="]}\n",
        suffix=".json",
    ),
    Everyday(
        name="windows-events-json",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=tuple(
            (
                _json(
                    TimeCreated="@t@",
                    Id=ident,
                    LevelDisplayName=shown,
                    ProviderName=provider,
                    MachineName="FILE01",
                    Message=message,
                ),
                level,
                None,
            )
            for ident, shown, provider, message, level in (
                (
                    7036,
                    "Information",
                    "Service Control Manager",
                    "The Spooler service entered the running state (@n@).",
                    "info",
                ),
                (11, "Error", "disk", "The driver detected a controller error on Harddisk @n@.", "error"),
            )
        ),
        suffix=".json",
    ),
    Everyday(
        name="windows-events-xml",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=tuple(
            (
                "<Event xmlns='http://schemas.microsoft.com/win/2004/08/events/event'><System>"
                f"<Provider Name='{provider}'/><EventID>{ident}</EventID><Level>{number}</Level>"
                "<TimeCreated SystemTime='@t@'/><EventRecordID>@n@</EventRecordID>"
                "<Computer>FILE01</Computer></System>"
                f"<EventData><Data Name='param1'>{text}</Data></EventData></Event>",
                level,
                None,
            )
            for provider, ident, number, text, level in (
                ("Service Control Manager", 7036, 4, "Spooler", "info"),
                ("disk", 11, 2, "Harddisk1", "error"),
            )
        ),
        suffix=".xml",
    ),
    Everyday(
        name="klog",
        stamp=lambda m: f"{m:%m%d %H:%M:%S}.{m.microsecond:06d}",
        whole_seconds=False,
        rows=(
            ("I@t@       1 controller.go:129] Synced item @n@", "info", None),
            ("E@t@       1 reflector.go:138] Failed to watch item @n@", "error", None),
        ),
    ),
    Everyday(
        name="glog",
        stamp=lambda m: f"{m:%Y%m%d %H:%M:%S}.{m.microsecond:06d}",
        whole_seconds=False,
        rows=(
            ("I@t@ 4312 server.cc:77] Served request @n@", "info", None),
            ("W@t@ 4312 server.cc:91] Slow request @n@", "warning", None),
        ),
    ),
    Everyday(
        name="postgresql",
        stamp=_millis("%Y-%m-%d %H:%M:%S", after=" UTC"),
        whole_seconds=False,
        rows=(
            ("@t@ [@n@] LOG:  checkpoint complete: wrote @n@ buffers", "info", None),
            ('@t@ [@n@] app@shop ERROR:  relation "t@n@" does not exist', "error", None),
        ),
    ),
    Everyday(
        name="postgresql-csvlog",
        stamp=_millis("%Y-%m-%d %H:%M:%S", after=" UTC"),
        whole_seconds=False,
        rows=(
            (
                '@t@,"app","shop",@n@,"10.0.0.5:5000",655f.1,3,"SELECT",2026-11-20 09:00:00 UTC,3/12,0,LOG,'
                '00000,"duration: @n@ ms",,,,,,,,,"psql","client backend",,0',
                "info",
                None,
            ),
            (
                '@t@,"app","shop",@n@,"10.0.0.5:5000",655f.1,4,"INSERT",2026-11-20 09:00:00 UTC,3/13,0,ERROR,'
                '23505,"duplicate key value violates unique constraint ""k@n@""",,,,,,,,,"psql",'
                '"client backend",,0',
                "error",
                None,
            ),
        ),
        suffix=".csv",
    ),
    Everyday(
        name="postgresql-jsonlog",
        stamp=_millis("%Y-%m-%d %H:%M:%S", after=" UTC"),
        whole_seconds=False,
        rows=(
            (
                '{"timestamp":"@t@","pid":@n@,"session_id":"655f","line_num":1,"error_severity":"LOG",'
                '"message":"listening on port @n@","backend_type":"postmaster","query_id":0}',
                "info",
                None,
            ),
            (
                '{"timestamp":"@t@","user":"app","dbname":"shop","pid":@n@,"error_severity":"FATAL",'
                '"message":"too many connections","backend_type":"client backend","query_id":0}',
                "fatal",
                None,
            ),
        ),
        suffix=".json",
    ),
    Everyday(
        name="mysql",
        stamp=_millis("%Y-%m-%dT%H:%M:%S", after="000Z"),
        whole_seconds=False,
        rows=(
            ("@t@ 0 [System] [MY-010931] [Server] ready for connections. port: @n@", None, None),
            ("@t@ 8 [ERROR] [MY-013183] [InnoDB] Assertion failure: row @n@", "error", None),
        ),
    ),
    Everyday(
        name="mariadb",
        stamp=_form("%Y-%m-%d %H:%M:%S"),
        rows=(
            ("@t@ 0 [Note] InnoDB: Buffer pool(s) load completed, @n@ pages", "info", None),
            ("@t@ 0 [ERROR] mysqld: Table './shop/t@n@' is marked as crashed", "error", None),
        ),
    ),
    Everyday(
        name="mongodb",
        stamp=_millis("%Y-%m-%dT%H:%M:%S", after="+00:00"),
        whole_seconds=False,
        rows=(
            (
                '{"t":{"$date":"@t@"},"s":"I","c":"NETWORK","id":22943,"ctx":"listener",'
                '"msg":"Connection accepted","attr":{"connectionId":@n@}}',
                "info",
                "NETWORK",
            ),
            (
                '{"t":{"$date":"@t@"},"s":"E","c":"STORAGE","id":22435,"ctx":"thread1",'
                '"msg":"WiredTiger error","attr":{"error":@n@}}',
                "error",
                "STORAGE",
            ),
        ),
    ),
    Everyday(
        name="auditd",
        stamp=lambda m: f"{m.timestamp():.3f}",
        whole_seconds=False,
        rows=(
            (
                "type=USER_LOGIN msg=audit(@t@:@n@): pid=812 uid=0 auid=1000 ses=3 msg='op=login "
                'acct="deploy" exe="/usr/sbin/sshd" res=success\'',
                None,
                None,
            ),
            (
                "type=SYSCALL msg=audit(@t@:@n@): arch=c000003e syscall=2 success=yes exit=3 pid=@n@ "
                'comm="cat" exe="/bin/cat"',
                None,
                None,
            ),
        ),
    ),
    Everyday(
        name="cisco",
        stamp=_millis("*%b %d %H:%M:%S"),
        whole_seconds=False,
        rows=(
            (
                "@t@: %LINEPROTO-5-UPDOWN: Line protocol on Interface Gi0/1, changed state to up @n@",
                "notice",
                None,
            ),
            ("@t@: %SYS-2-MALLOCFAIL: Memory allocation of @n@ bytes failed", "critical", None),
        ),
    ),
    Everyday(
        name="rails",
        stamp=lambda m: f"{m:%Y-%m-%dT%H:%M:%S}.{m.microsecond:06d}",
        whole_seconds=False,
        rows=(
            ("I, [@t@ #4312]  INFO -- : Completed 200 OK in @n@ms", "info", None),
            ("E, [@t@ #4312] ERROR -- : ActiveRecord timed out after @n@ms", "error", None),
        ),
    ),
    Everyday(
        name="rfc-2822",
        stamp=_form("%a, %d %b %Y %H:%M:%S +0100", CET),
        rows=(
            ("@t@ INFO mail @n@ was queued", "info", None),
            ("@t@ ERROR mail @n@ bounced", "error", None),
        ),
    ),
    Everyday(
        name="ctime",
        stamp=_unpadded("%a %b %e %H:%M:%S %Y"),
        rows=(
            ("@t@ : login of user @n@ was accepted", None, None),
            ("@t@ : Warning: password of user @n@ expires", None, None),
        ),
    ),
    Everyday(
        name="epoch-seconds",
        stamp=_epoch(1),
        rows=(
            ("@t@ INFO sensor @n@ reports 21.5", "info", None),
            ("@t@ ERROR sensor @n@ is silent", "error", None),
        ),
    ),
    Everyday(
        name="epoch-millis",
        stamp=_epoch(1000),
        whole_seconds=False,
        rows=(
            ("@t@ INFO sensor @n@ reports 21.5", "info", None),
            ("@t@ WARN sensor @n@ is slow", "warning", None),
        ),
    ),
    Everyday(
        name="us-date",
        stamp=lambda m: f"{m:%m/%d/%Y} {int(f'{m:%I}')}:{m:%M:%S %p}",
        rows=(
            ("@t@ INFO Backup of volume @n@ finished", "info", None),
            ("@t@ ERROR Backup of volume @n@ failed", "error", None),
        ),
    ),
    Everyday(
        name="european-date",
        stamp=_form("%d.%m.%Y %H:%M:%S"),
        rows=(
            ("@t@ INFO Sicherung @n@ beendet", "info", None),
            ("@t@ ERROR Sicherung @n@ fehlgeschlagen", "error", None),
        ),
    ),
    Everyday(
        name="csv",
        stamp=_form("%Y-%m-%dT%H:%M:%SZ"),
        head="time,level,service,message\n",
        rows=(
            ('@t@,INFO,cart,"opened cart @n@, two items"', "info", "cart"),
            ('@t@,ERROR,pay,"card of order @n@ was ""declined"""', "error", "pay"),
        ),
        suffix=".csv",
    ),
    Everyday(
        name="csv-headless",
        stamp=_form("%Y-%m-%dT%H:%M:%SZ"),
        rows=(
            ("@t@,INFO,cart,opened cart number @n@ for a guest", "info", None),
            ("@t@,ERROR,pay,card of order @n@ was declined by bank", "error", None),
        ),
        suffix=".csv",
    ),
    Everyday(
        name="tsv",
        stamp=_form("%Y-%m-%d %H:%M:%S"),
        head="timestamp\tseverity\tcomponent\ttext\n",
        rows=(
            ("@t@\tINFO\tcart\topened cart @n@", "info", "cart"),
            ("@t@\tWARN\tpay\tslow bank for order @n@", "warning", "pay"),
        ),
        suffix=".tsv",
    ),
    Everyday(
        name="pipes",
        stamp=_millis("%Y-%m-%d %H:%M:%S"),
        whole_seconds=False,
        rows=(
            ("@t@|INFO|OrderService|main|order @n@ was placed", "info", None),
            ("@t@|ERROR|OrderService|main|order @n@ was lost", "error", None),
        ),
    ),
    Everyday(
        name="json-array",
        stamp=_ISO_Z,
        whole_seconds=False,
        head="[\n",
        rows=(
            ('{"time":"@t@","level":"info","service":"cart","msg":"opened cart @n@"}', "info", "cart"),
            ('{"time":"@t@","level":"error","service":"pay","msg":"lost order @n@"}', "error", "pay"),
        ),
        between=",\n",
        foot="\n]\n",
        suffix=".json",
    ),
    Everyday(
        name="json-pretty",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            ('{\n  "timestamp": "@t@",\n  "level": "info",\n  "message": "opened cart @n@"\n}', "info", None),
            (
                '{\n  "timestamp": "@t@",\n  "level": "error",\n  "message": "lost order @n@"\n}',
                "error",
                None,
            ),
        ),
        suffix=".json",
    ),
    Everyday(
        name="python-logging",
        stamp=_millis("%Y-%m-%d %H:%M:%S", mark=","),
        whole_seconds=False,
        rows=(
            ("@t@ - shop.cart - INFO - opened cart @n@", "info", "shop.cart"),
            ("@t@ - shop.pay - CRITICAL - lost order @n@", "critical", "shop.pay"),
        ),
    ),
    Everyday(
        name="spring-boot",
        stamp=_millis("%Y-%m-%dT%H:%M:%S", zone=CET, after="+01:00"),
        whole_seconds=False,
        rows=(
            ("@t@  INFO 4312 --- [           main] c.e.shop.Application : Started in @n@ ms", "info", None),
            (
                "@t@ ERROR 4312 --- [nio-8080-exec-1] o.a.c.c.C.[dispatcher] : Servlet threw, request @n@",
                "error",
                None,
            ),
        ),
    ),
    Everyday(
        name="kafka",
        stamp=_millis("%Y-%m-%d %H:%M:%S", mark=","),
        whole_seconds=False,
        rows=(
            ("[@t@] INFO [KafkaServer id=0] started (kafka.server.KafkaServer) @n@", "info", None),
            (
                "[@t@] WARN [Broker id=0] Offset @n@ is out of range (kafka.server.ReplicaManager)",
                "warning",
                None,
            ),
        ),
    ),
    Everyday(
        name="logfmt",
        stamp=_ISO_Z,
        whole_seconds=False,
        rows=(
            ('time=@t@ level=info component=api msg="served request" id=@n@', "info", None),
            ('time=@t@ level=error component=api msg="refused request" id=@n@', "error", None),
        ),
    ),
    Everyday(
        name="late-time",
        stamp=_form("%Y-%m-%d %H:%M:%S"),
        rows=(
            ("node-7 backup daemon (build 12) @t@ INFO volume @n@ was copied", None, None),
            ("node-7 backup daemon (build 12) @t@ INFO volume @n@ was checked", None, None),
        ),
    ),
    Everyday(
        name="mysql-slow",
        stamp=_millis("%Y-%m-%dT%H:%M:%S", after="000Z"),
        whole_seconds=False,
        rows=tuple(
            (
                "# Time: @t@\n# User@Host: shop[shop] @ localhost []  Id:    12\n# Query_time: 4.003882  Lock_time: 0.0"
                f"00168 Rows_sent: 1  Rows_examined: @n@\nSET timestamp=1795168801;\n{query}",
                None,
                "shop",
            )
            for query in ("SELECT * FROM orders\nWHERE id = @n@;", "UPDATE cart SET n = @n@;")
        ),
    ),
    Everyday(
        name="mariadb-slow",
        stamp=_form("%y%m%d %H:%M:%S"),
        head=(
            "mariadbd, Version: 11.8.2-MariaDB-log (mariadb.org binary distribution). started with:\n"
            "Tcp port: 0  Unix socket: /run/mysqld/mysqld.sock\nTime\t\t    Id Command\tArgument\n"
        ),
        rows=(
            (
                "# Time: @t@\n# User@Host: app[app] @  [172.18.0.1]\n# Thread_id: 3414  Schema: shop  QC_hit: No\n"
                "# Query_time: 0.577709  Lock_time: 0.017307  Rows_sent: 1  Rows_examined: @n@\n"
                "# Rows_affected: 0  Bytes_sent: 153\nuse `shop`;\nSET timestamp=1763128404;\nSELECT LotNew(@n@);",
                None,
                "app",
            ),
        ),
    ),
    Everyday(
        name="fortigate",
        stamp=_form("date=%Y-%m-%d time=%H:%M:%S", zone=CET),
        rows=(
            (
                '@t@ devname="fw1" devid="FGT60FTK2" eventtime=1795168801513555981 tz="+0100" logid="0000000013" '
                'type="traffic" subtype="forward" level="notice" vd="root" srcip=10.0.0.9 srcport=@n@ '
                'dstip=203.0.113.5 dstport=443 proto=6 action="close" service="HTTPS"',
                "notice",
                None,
            ),
            (
                '@t@ devname="fw1" devid="FGT60FTK2" eventtime=1795168801513555981 tz="+0100" logid="0100032002" '
                'type="event" subtype="system" level="alert" vd="root" logdesc="Admin login failed" user="admin" '
                'msg="Administrator admin login failed from https(203.0.113.5), try @n@"',
                "critical",
                None,
            ),
        ),
    ),
    Everyday(
        name="java-logging",
        stamp=_form("%b %d, %Y %-I:%M:%S %p"),
        rows=(
            ("@t@ org.shop.Cart add\nINFO: opened cart @n@", "info", "org.shop.Cart"),
            (
                "@t@ org.shop.Pay pay\nSEVERE: lost order @n@\njava.lang.Exception: gone\n\tat org.shop.Pay.pay(Pay.java:7)",
                "error",
                "org.shop.Pay",
            ),
        ),
    ),
    Everyday(
        name="aws-vpc-flow",
        stamp=_epoch(1),
        head="version account-id interface-id srcaddr dstaddr srcport dstport protocol packets bytes start end action log-status\n",
        rows=(
            (
                "2 123456789010 eni-1235b8ca123 172.31.16.139 172.31.16.21 @n@ 22 6 20 4249 @t@ @t@ ACCEPT OK",
                "info",
                None,
            ),
            (
                "2 123456789010 eni-1235b8ca123 172.31.9.69 172.31.9.12 @n@ 3389 6 20 4249 @t@ @t@ REJECT OK",
                "warning",
                None,
            ),
        ),
    ),
)
FORMATS: Final[tuple[Everyday, ...]] = _TEXTS


def files(*, first: datetime, records: int) -> Iterator[tuple[Everyday, str, list[Expected]]]:
    """Every format with the text of its file and what is right."""
    for form in FORMATS:
        text, expected = written(form, first=first, records=records)
        yield form, text, expected
