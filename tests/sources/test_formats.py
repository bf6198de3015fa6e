"""Log formats: recognised by looking, parsed exactly, and not seen where they are not."""

import functools
import gzip
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from log_sets import DATA, needs_log_sets

from bench._log_files import read_file
from pipeline.errors import BadInput
from pipeline.records.levels import LEVELS
from pipeline.records.schema import RAW_SCHEMA, UTC_US, raw_frame
from pipeline.sources import formats
from pipeline.sources.formats import are_ordered, detect, head_mask, parse, parse_each
from pipeline.sources.formats_text import BY_NAME, NAMES, TEXT_FORMATS
from pipeline.sources.framing import Framer
from pipeline.sources.wrappers import WRAPPERS, inner_lines
from tests.sources import format_examples
from tests.sources.format_examples import Example

ARRIVED = datetime(2026, 11, 20, 15, 0, tzinfo=UTC)

EXAMPLES: list[Example] = [
    *format_examples.EXAMPLES,
    ("bgl", "- 1117900001 2005.06.04 R01-M0-N1 2005-06-04-08.46.41.250000 R01-M0-N1 RAS KERNEL INFO cache fixed", "2005-06-04T15:46:41.250000", "info", "R01-M0-N1", None, "RAS KERNEL", "cache fixed"),
    ("bgl", "APPREAD 1117900002 2005.06.04 R02 2005-06-04-08.46.42.000001 R02 RAS APP FATAL stream lost: x", "2005-06-04T15:46:42.000001", "fatal", "R02", None, "RAS APP", "stream lost: x"),
    ("bgl", "1117900003 2005.06.04 NULL 2005-06-04-08.46.43.5 NULL RAS BGLMASTER FAILURE server exited", "2005-06-04T15:46:43.500000", "critical", "NULL", None, "RAS BGLMASTER", "server exited"),
    ("bgl", "- 1117900004 2005.06.04 R03 2005-06-04-08.46.44.7 R03 RAS MMCS SEVERE", "2005-06-04T15:46:44.700000", "error", "R03", None, "RAS MMCS", ""),
    ("thunderbird", "- 1131500001 2005.11.09 dn1 Nov 9 01:33:21 dn1/dn1 crond[71]: job done", "2005-11-09T01:33:21", None, "dn1", "71", "crond", "job done"),
    ("thunderbird", "VAPI 1131500002 2005.11.09 tb2 Nov 9 01:33:22 tb2/tb2 kernel: VAPI error", "2005-11-09T01:33:22", None, "tb2", None, "kernel", "VAPI error"),
    ("thunderbird", "1131500003 2005.11.09 dn3 Nov 9 01:33:23 dn3/dn3 ntpd[9]: synced", "2005-11-09T01:33:23", None, "dn3", "9", "ntpd", "synced"),
    ("hdfs", "081110 010203 55 INFO dfs.Node$Sender: sent blk_1", "2008-11-10T01:02:03", "info", None, "55", "dfs.Node$Sender", "sent blk_1"),
    ("hdfs", "991231 235959 1 WARN dfs.Name: late", "1999-12-31T23:59:59", "warning", None, "1", "dfs.Name", "late"),
    ("hdfs", "081110 010204 7 ERROR dfs.Disk: a: b", "2008-11-10T01:02:04", "error", None, "7", "dfs.Disk", "a: b"),
    ("hpc", "11 node-3 unix.hw net.down 1090000000 1 link lost", "2004-07-16T17:46:40", None, "node-3", None, "unix.hw net.down", "link lost"),
    ("hpc", "12 full partition status 1090000001 -1 running", "2004-07-16T17:46:41", None, "full", None, "partition status", "running"),
    ("hpc", "13 fan-1 switch fan 1090000002 1 slow ( 12 )", "2004-07-16T17:46:42", None, "fan-1", None, "switch fan", "slow ( 12 )"),
    ("syslog-5424", "<165>1 2026-11-19T08:09:10.003Z web-1 api 812 ID7 - ready", "2026-11-19T08:09:10.003000", "notice", "web-1", "812", "api", "ready"),
    ("syslog-5424", '<11>1 2026-11-19T08:09:10.5+02:00 web-1 api - - [meta seq="4"] broken', "2026-11-19T06:09:10.500000", "error", "web-1", None, "api", '[meta seq="4"] broken'),
    ("syslog-5424", "<8>1 - - - - - -", None, "fatal", None, None, None, ""),
    ("syslog", "Jun  4 05:06:07 box sshd(pam_unix)[99]: check pass", "2026-06-04T05:06:07", None, "box", "99", "sshd(pam_unix)", "check pass"),
    ("syslog", "<34>Oct 11 22:14:15 box su: denied: x", "2026-10-11T22:14:15", "critical", "box", None, "su", "denied: x"),
    ("syslog", "Dec 24 23:59:59.25 box com.app.Sync[7] (com.app.Job): quit", "2025-12-24T23:59:59.250000", None, "box", "7", "com.app.Sync", "(com.app.Job): quit"),
    ("cisco-year", "Nov 20 2024 10:00:00 sw1 : %LINK-3-UPDOWN: port down", "2024-11-20T10:00:00", "error", "sw1", None, "%LINK-3-UPDOWN", "port down"),
    ("syslog-year", "<187>Nov  2 2024 10:00:00.5 fw app[3]: x", "2024-11-02T10:00:00.500000", "error", "fw", "3", "app", "x"),
    ("syslog-year", "Nov 20 2024 10:00:00 fw2 last message repeated", "2024-11-20T10:00:00", None, "fw2", None, None, "last message repeated"),
    ("syslog-year", "Jan 31 1999 23:59:59 fw free text", "1999-01-31T23:59:59", None, "fw", None, None, "free text"),
    ("syslog", "Nov 21 10:00:00 2024 box last message repeated 2 times", "2024-11-21T10:00:00", None, "box", None, None, "last message repeated 2 times"),
    ("syslog-iso", "2026-11-19T08:09:10.123456+01:00 box sshd[12]: bye", "2026-11-19T07:09:10.123456", None, "box", "12", "sshd", "bye"),
    ("syslog-iso", "2026-11-19T08:09:10+0000 box kernel: up", "2026-11-19T08:09:10", None, "box", None, "kernel", "up"),
    ("syslog-iso", "<13>2026-11-19T08:09:10-05:00 box app: hi", "2026-11-19T13:09:10", "notice", "box", None, "app", "hi"),
    ("klog", "I1119 08:09:10.123456   12345 server.go:12] started", "2026-11-19T08:09:10.123456", "info", None, "12345", "server.go", "started"),
    ("klog", 'E1231 23:59:59.000001       1 a_b.go:7] "failed" err="x"', "2025-12-31T23:59:59.000001", "error", None, "1", "a_b.go", '"failed" err="x"'),
    ("klog", "F0101 00:00:00.000000 1 main.go:1] dead", "2026-01-01T00:00:00", "fatal", None, "1", "main.go", "dead"),
    ("access", '10.1.2.3 - - [19/Nov/2026:10:00:00 +0100] "GET /a?b=1 HTTP/1.1" 200 512 "-" "curl/8"', "2026-11-19T09:00:00", "info", "10.1.2.3", None, None, '"GET /a?b=1 HTTP/1.1" 200 512 "-" "curl/8"'),
    ("access", '::1 - ann [19/Nov/2026:10:00:00 +0000] "POST /x HTTP/2.0" 404 0', "2026-11-19T10:00:00", "warning", "::1", None, None, '"POST /x HTTP/2.0" 404 0'),
    ("access", 'shop:443 h.example - - [01/Jan/2026:00:00:00 -0500] "\\x16\\"" 503 -', "2026-01-01T05:00:00", "error", "h.example", None, "shop:443", '"\\x16\\"" 503 -'),
    ("nginx-error", '2026/11/19 08:09:10 [error] 31#32: *5 open() "/x" failed', "2026-11-19T08:09:10", "error", None, "31", None, '*5 open() "/x" failed'),
    ("nginx-error", "2026/11/19 08:09:11 [notice] 1#1: start", "2026-11-19T08:09:11", "notice", None, "1", None, "start"),
    ("nginx-error", "2026/11/19 08:09:12 [emerg] 1#1: bind()", "2026-11-19T08:09:12", "fatal", None, "1", None, "bind()"),
    ("apache-error", "[Sun Dec 04 04:47:44 2005] [notice] ok", "2005-12-04T04:47:44", "notice", None, None, None, "ok"),
    ("apache-error", "[Thu Nov 19 08:09:10.123456 2026] [core:error] [pid 7:tid 9] [client 10.0.0.1:80] AH1: no", "2026-11-19T08:09:10.123456", "error", "10.0.0.1:80", "7", None, "AH1: no"),
    ("apache-error", "[Thu Nov 19 08:09:10 2026] [crit] [client 1.2.3.4] x", "2026-11-19T08:09:10", "critical", "1.2.3.4", None, None, "x"),
    ("postgresql", '2026-11-19 08:09:10.123 UTC [77] ERROR:  column "a" is unknown', "2026-11-19T08:09:10.123000", "error", None, "77", None, 'column "a" is unknown'),
    ("postgresql", "2026-11-19 08:09:10 CET [77-1] app@shop LOG:  checkpoint", "2026-11-19T07:09:10", "info", None, "77", "app@shop", "checkpoint"),
    ("postgresql", "2026-11-19 08:09:10.5 +02 [77] DETAIL:  more", "2026-11-19T06:09:10.500000", "info", None, "77", None, "more"),
    ("postgresql-rds", "2026-11-19 08:09:10 UTC:10.0.0.9(5511):app@shop:[31]:FATAL:  too many", "2026-11-19T08:09:10", "fatal", "10.0.0.9", "31", "app@shop", "too many"),
    ("postgresql-rds", "2026-11-19 08:09:10 UTC::@:[1]:LOG:  up", "2026-11-19T08:09:10", "info", None, "1", "@", "up"),
    ("postgresql-rds", "2026-11-19 08:09:10 EST:h(1):a@b:[2]:WARNING:  w", "2026-11-19T13:09:10", "warning", "h", "2", "a@b", "w"),
    ("mysql", "2026-11-19T08:09:10.123456Z 0 [Warning] [MY-1] [Server] old", "2026-11-19T08:09:10.123456", "warning", None, "0", None, "[MY-1] [Server] old"),
    ("mysql", "2026-11-19T08:09:10.000001+01:00 9 [Note] hi", "2026-11-19T07:09:10.000001", "info", None, "9", None, "hi"),
    ("mysql", "2026-11-19 08:09:10 12 [Error] gone", "2026-11-19T08:09:10", "error", None, "12", None, "gone"),
    ("redis", "11:M 19 Nov 2026 08:09:10.123 * Ready", "2026-11-19T08:09:10.123000", "notice", None, "11", None, "Ready"),
    ("redis", "12:C 19 Nov 2026 08:09:10.124 # oO0", "2026-11-19T08:09:10.124000", "warning", None, "12", None, "oO0"),
    ("redis", "13:S 01 Jan 2026 00:00:00.000 - idle", "2026-01-01T00:00:00", "info", None, "13", None, "idle"),
    ("healthapp", "20261119-8:9:10:4|Step|300|walk 3", "2026-11-19T08:09:10.004000", None, None, "300", "Step", "walk 3"),
    ("healthapp", "20261119-18:09:10:250|A_b|1|x|y", "2026-11-19T18:09:10.250000", None, None, "1", "A_b", "x|y"),
    ("healthapp", "20261119-0:0:0:0|S|1|", "2026-11-19T00:00:00", None, None, "1", "S", ""),
    ("android", "03-17 16:13:38.811  1702  2395 D WindowManager: redraw", "2026-03-17T16:13:38.811000", "debug", None, "1702", "WindowManager", "redraw"),
    ("android", "2024-12-31 23:59:59.999 1 2 W Net Stats : slow: 3", "2024-12-31T23:59:59.999000", "warning", None, "1", "Net Stats", "slow: 3"),
    ("android", "12-01 00:00:00.000 9 9 F libc: abort", "2025-12-01T00:00:00", "fatal", None, "9", "libc", "abort"),
    ("windows-cbs", "2026-11-19 08:09:10, Info                  CBS    Session ended", "2026-11-19T08:09:10", "info", None, None, "CBS", "Session ended"),
    ("windows-cbs", "2026-11-19 08:09:11, Error  CSI  0001 (F) bad", "2026-11-19T08:09:11", "error", None, None, "CSI", "0001 (F) bad"),
    ("windows-cbs", "2026-11-19 08:09:12, Warning DPX x", "2026-11-19T08:09:12", "warning", None, None, "DPX", "x"),
    ("zookeeper", "2026-11-19 08:09:10,123 - WARN  [Send:77:Cnx$Worker@68] - leaving", "2026-11-19T08:09:10.123000", "warning", None, "Send:77", "Cnx$Worker", "leaving"),
    ("zookeeper", "2026-11-19 08:09:10,124 [myid:2] - INFO  [Peer[myid=2]/0:0:Vote@1] - a - b", "2026-11-19T08:09:10.124000", "info", None, "Peer[myid=2]/0:0", "Vote", "a - b"),
    ("zookeeper", "2026-11-19 08:09:10,125 - ERROR [main:Q@9] - x", "2026-11-19T08:09:10.125000", "error", None, "main", "Q", "x"),
    ("skywalking", "2026-11-19 08:09:10.123 [SW_CTX:[ts-pay,ab12@10.0.0.7,t.1.2,s.1.2,0]] [http-1] INFO  p.Pay -paid 3", "2026-11-19T08:09:10.123000", "info", "10.0.0.7", "http-1", "ts-pay", "paid 3"),
    ("skywalking", "2026-11-19 08:09:10.124 [SW_CTX:[ts-x,i@h,a,b,1]] [o.Endpoint#0-1] ERROR o.a.C.[.[/] - boom", "2026-11-19T08:09:10.124000", "error", "h", "o.Endpoint#0-1", "ts-x", "boom"),
    ("skywalking", "2026-11-19 08:09:10.126 [SW_CTX: [ts-y,i@h,N/A,N/A,-1]] [main] WARN  a.B - y", "2026-11-19T08:09:10.126000", "warning", "h", "main", "ts-y", "y"),
    ("skywalking-any", "2026-11-19 08:09:10.123Z [TID:[ts-z,1,2]] [main] INFO a.B - z", "2026-11-19T08:09:10.123000", "info", None, "main", "ts-z", "z"),
    ("skywalking-any", "2026-11-19 08:09:10.124 [TID: 4.5.6] [t [1]] ERROR a.B -x", "2026-11-19T08:09:10.124000", "error", None, "t [1]", "a.B", "x"),
    ("skywalking-any", "2026-11-19 08:09:10.125 [TID: N/A] [main] WARN  a.B -x", "2026-11-19T08:09:10.125000", "warning", None, "main", "a.B", "x"),
    ("spring-boot", "2026-11-19 08:09:10.123  INFO [cart,5f,6a,true] 1 --- [nio-1] c.s.Cart : added", "2026-11-19T08:09:10.123000", "info", None, "1", "cart", "added"),
    ("spring-boot", "2026-11-19T08:09:10.123+01:00 ERROR 42 --- [app] [  main] o.s.boot.App    : failed: x", "2026-11-19T07:09:10.123000", "error", None, "42", "o.s.boot.App", "failed: x"),
    ("spring-boot", "2026-11-19 08:09:10.125  WARN 7 --- [main] a.B : ", "2026-11-19T08:09:10.125000", "warning", None, "7", "a.B", ""),
    ("openstack", "2026-11-19 08:09:10.008 2931 INFO nova.compute [req-1] [instance: 7] up", "2026-11-19T08:09:10.008000", "info", None, "2931", "nova.compute", "[req-1] [instance: 7] up"),
    ("openstack", "2026-11-19 08:09:10.009 1 ERROR oslo [-] lost", "2026-11-19T08:09:10.009000", "error", None, "1", "oslo", "[-] lost"),
    ("openstack", "2026-11-19 08:09:11 5 WARNING a.b [req-2] w", "2026-11-19T08:09:11", "warning", None, "5", "a.b", "[req-2] w"),
    ("python", "2026-11-19 08:09:10,123 - shop.cart - WARNING - low - stock", "2026-11-19T08:09:10.123000", "warning", None, None, "shop.cart", "low - stock"),
    ("python", "2026-11-19 08:09:10,124 - root - MainThread - ERROR - x", "2026-11-19T08:09:10.124000", "error", None, "MainThread", "root", "x"),
    ("python", "2026-11-19 08:09:10 - a - CRITICAL: y", "2026-11-19T08:09:10", "critical", None, None, "a", "y"),
    ("gunicorn", "[2026-11-19 08:09:10 +0100] [12] [INFO] Booting", "2026-11-19T07:09:10", "info", None, "12", None, "Booting"),
    ("gunicorn", "[2026-11-19 08:09:11 +0000] [13] [CRITICAL] TIMEOUT", "2026-11-19T08:09:11", "critical", None, "13", None, "TIMEOUT"),
    ("gunicorn", "[2026-11-19 08:09:12 -0500] [1] [ERROR] x", "2026-11-19T13:09:12", "error", None, "1", None, "x"),
    ("celery", "[2026-11-19 08:09:10,123: INFO/MainProcess] ready", "2026-11-19T08:09:10.123000", "info", None, "MainProcess", None, "ready"),
    ("celery", "[2026-11-19 08:09:10,124: WARNING/Fork-1] w: x", "2026-11-19T08:09:10.124000", "warning", None, "Fork-1", None, "w: x"),
    ("celery", "[2026-11-19 08:09:10,125: ERROR/Beat] y", "2026-11-19T08:09:10.125000", "error", None, "Beat", None, "y"),
    ("elasticsearch", "[2026-11-19T08:09:10,123][WARN ][o.e.Node          ] [es-1] slow", "2026-11-19T08:09:10.123000", "warning", "es-1", None, "o.e.Node", "slow"),
    ("elasticsearch", "[2026-11-19T08:09:10,124][INFO ][o.e.x] [n]started", "2026-11-19T08:09:10.124000", "info", "n", None, "o.e.x", "started"),
    ("elasticsearch", "[2026-11-19T08:09:10,125][ERROR][o.e.y] z", "2026-11-19T08:09:10.125000", "error", None, None, "o.e.y", "z"),
    ("env-logger", "[2026-11-19T08:09:10Z INFO  shop::cart] added", "2026-11-19T08:09:10", "info", None, None, "shop::cart", "added"),
    ("env-logger", "[2026-11-19T08:09:10.5Z ERROR a] b", "2026-11-19T08:09:10.500000", "error", None, None, "a", "b"),
    ("env-logger", "[2026-11-19T08:09:11Z DEBUG a::b::c] d] e", "2026-11-19T08:09:11", "debug", None, None, "a::b::c", "d] e"),
    ("log4j", "2026-11-19 08:09:10,978 INFO [main] org.shop.Cart: added 3", "2026-11-19T08:09:10.978000", "info", None, "main", "org.shop.Cart", "added 3"),
    ("log4j", "2026-11-19T08:09:10.979Z [WARN] [pool-1 t] Cart - x - y", "2026-11-19T08:09:10.979000", "warning", None, "pool-1 t", "Cart", "x - y"),
    ("log4j", "2026-11-19 08:09:10,980 FATAL [IPC #1] a.B$C: z", "2026-11-19T08:09:10.980000", "fatal", None, "IPC #1", "a.B$C", "z"),
    ("log4j-class", "2026-11-19 08:09:10,123 INFO org.shop.Cart: added", "2026-11-19T08:09:10.123000", "info", None, None, "org.shop.Cart", "added"),
    ("log4j-class", "2026-11-19 08:09:10 ERROR a.B:42 - x", "2026-11-19T08:09:10", "error", None, None, "a.B", "x"),
    ("log4j-class", "2026-11-19T08:09:10Z  WARN a.b.c - y", "2026-11-19T08:09:10", "warning", None, None, "a.b.c", "y"),
    ("logback", "2026-11-19 08:09:10.123 [main] DEBUG a.Foo - hi", "2026-11-19T08:09:10.123000", "debug", None, "main", "a.Foo", "hi"),
    ("logback", "2026-11-19 08:09:10,124 [http 1] ERROR Foo: x", "2026-11-19T08:09:10.124000", "error", None, "http 1", "Foo", "x"),
    ("logback", "2026-11-19T08:09:10.125+01:00 [t] INFO  a.B - y", "2026-11-19T07:09:10.125000", "info", None, "t", "a.B", "y"),
    ("logback-time", "08:09:10.123 [main] INFO a.Foo - hi", "2026-11-20T08:09:10.123000", "info", None, "main", "a.Foo", "hi"),
    ("logback-time", "23:59:59.999 [main] WARN a.Foo - yesterday", "2026-11-19T23:59:59.999000", "warning", None, "main", "a.Foo", "yesterday"),
    ("logback-time", "15:30:00,000 [x y] TRACE Foo - ahead", "2026-11-20T15:30:00", "trace", None, "x y", "Foo", "ahead"),
    ("spark", "26/11/19 08:09:10 INFO BlockManager: stored", "2026-11-19T08:09:10", "info", None, None, "BlockManager", "stored"),
    ("spark", "17/06/09 20:10:40 ERROR a.B$C: x: y", "2017-06-09T20:10:40", "error", None, None, "a.B$C", "x: y"),
    ("spark", "26/11/19 08:09:11 WARN T: z", "2026-11-19T08:09:11", "warning", None, None, "T", "z"),
    ("python-basic", "INFO:root:hello", None, "info", None, None, "root", "hello"),
    ("python-basic", "CRITICAL:a.b:x: y", None, "critical", None, None, "a.b", "x: y"),
    ("python-basic", "WARNING:py-w:", None, "warning", None, None, "py-w", ""),
    ("go", "2026/11/19 08:09:10 listening on :80", "2026-11-19T08:09:10", None, None, None, None, "listening on :80"),
    ("go", "2026/11/19 08:09:10.000123 main.go:7: up", "2026-11-19T08:09:10.000123", None, None, None, None, "main.go:7: up"),
    ("go", "2026/11/19 08:09:10 [ERR] raft: lost", "2026-11-19T08:09:10", "error", None, None, None, "raft: lost"),
    ("iso", "2026-11-19T08:09:10Z plain text", "2026-11-19T08:09:10", None, None, None, None, "plain text"),
    ("kafka", "[2026-11-19 08:09:10,123] WARN [Broker 0] x (kafka.Log)", "2026-11-19T08:09:10.123000", "warning", None, None, "kafka.Log", "[Broker 0] x (kafka.Log)"),
    ("iso", "2026-11-19 08:09:10 - ERROR - x", "2026-11-19T08:09:10", "error", None, None, None, "x"),
    ("iso", "2026-11-19T08:09:10.5+0530\tinfo\tserved", "2026-11-19T02:39:10.500000", "info", None, None, None, "served"),
    ("iso", "2026-11-19 08:09:10 error while reading", "2026-11-19T08:09:10", None, None, None, None, "error while reading"),
    ("iso", "2026-11-19 08:09:10 [warn] disk", "2026-11-19T08:09:10", "warning", None, None, None, "disk"),
    ("iso", "2026-02-30 08:09:10 INFO no such day", None, "info", None, None, None, "no such day"),
    ("epoch", "1763539200.5 hit", "2025-11-19T08:00:00.500000", None, None, None, None, "hit"),
    ("epoch", "1763539200    12 10.0.0.1 TCP_MISS/200", "2025-11-19T08:00:00", None, None, None, None, "12 10.0.0.1 TCP_MISS/200"),
    ("epoch", "1763539201.123456789 x", "2025-11-19T08:00:01.123456", None, None, None, None, "x"),
    ("dmesg", "[   12.345678] usb 1-1: new", None, None, None, None, None, "usb 1-1: new"),
    ("dmesg", "[    0.000000] Linux", None, None, None, None, None, "Linux"),
    ("dmesg", "[99999.123456] a [b] c", None, None, None, None, None, "a [b] c"),
    ("level", "ERROR: no disk", None, "error", None, None, None, "no disk"),
    ("level", "ERRO[0012] no such container  id=4f", None, "error", None, None, None, "no such container  id=4f"),
    ("level", "WARN[65123] low", None, "warning", None, None, None, "low"),
    ("level", "FEHLER: kein Platz", None, "error", None, None, None, "kein Platz"),
    ("iso", "2026-11-20 10:00:01 ERRO no disk", "2026-11-20T10:00:01", "error", None, None, None, "no disk"),
    ("iso", "2026-11-20 10:00:01 EROR no disk", "2026-11-20T10:00:01", "error", None, None, None, "no disk"),
    ("postgresql", '2026-11-19 08:09:10.123 UTC [77] FEHLER:  Spalte »a« existiert nicht', "2026-11-19T08:09:10.123000", "error", None, "77", None, "Spalte »a« existiert nicht"),
    ("level", "[warn] low", None, "warning", None, None, None, "low"),
    ("level", 'INFO:     10.0.0.1:5 - "GET / HTTP/1.1" 200 OK', None, "info", None, None, None, '10.0.0.1:5 - "GET / HTTP/1.1" 200 OK'),
    ("logfmt", 'time=2026-11-19T08:09:10Z level=warn msg="disk is low" free=3', "2026-11-19T08:09:10", "warning", None, None, None, "disk is low free=3"),
    ("logfmt", 'ts=1763539200.25 lvl=error service=cart host=h1 pid=7 msg="a \\"b\\" c"', "2025-11-19T08:00:00.250000", "error", "h1", "7", "cart", 'a "b" c'),
    ("counted", "58 <11>1 2026-11-19T08:09:10Z edge-4 backupd 812 - - no disk", "2026-11-19T08:09:10", "error", "edge-4", "812", "backupd", "no disk"),
    ("counted", "44 <30>Nov 19 08:09:10 h1 cron[7]: job started", "2026-11-19T08:09:10", "info", "h1", "7", "cron", "job started"),
    ("counted", "40 <28>2026-11-19T09:09:10+01:00 h1 app: low", "2026-11-19T08:09:10", "warning", "h1", None, "app", "low"),
    ("logfmt", "time=2026-11-19T08:09:10Z level=error message=no room for order 7 x=y; caller=store.go:7 n=3", "2026-11-19T08:09:10", "error", None, None, None, "no room for order 7 x=y; caller=store.go:7 n=3"),
    ("logfmt", "msg=disk is full level=warn", None, "warning", None, None, None, "disk is full"),
    ("logfmt", "level=odd msg=x empty= k=v", None, None, None, None, None, "x level=odd empty= k=v"),
    ("json", '{"time":"2026-11-19T08:09:10.5Z","level":"INFO","msg":"hi","n":1,"app":"shop"}', "2026-11-19T08:09:10.500000", "info", None, None, "shop", "hi n=1"),
    ("json", '{"ts":1763539200250,"level":50,"message":"x","pid":5,"err":{"code":7,"at":["a","b"]}}', "2025-11-19T08:00:00.250000", "error", None, "5", None, 'x err.at=["a","b"] err.code=7'),
    ("json", '{"t":{"$date":"2026-11-19T08:09:10.001+00:00"},"s":"W","c":"NETWORK","ctx":"conn1","msg":"slow","attr":{"ms":9}}', "2026-11-19T08:09:10.001000", "warning", None, "conn1", "NETWORK", "slow attr.ms=9"),
    ("json", '{"a":"b","c":null,"flag":true,"timestamp":"whenever"}', None, None, None, None, None, "a=b flag=true timestamp=whenever"),
    ("json", '{"severityText":"ERROR","body":"line\\none","timeUnixNano":"1763539200123456789"}', "2025-11-19T08:00:00.123456", "error", None, None, None, "line\none"),
    ("docker", '{"log":"2026-11-19 08:09:10,978 INFO [main] a.B: in\\u003e\\n","stream":"stdout","time":"2026-11-19T07:09:10.978123456Z"}', "2026-11-19T07:09:10.978123", "info", None, "main", "a.B", "in>"),
    ("docker", '{"log":"plain \\"text\\"\\n","stream":"stderr","time":"2026-11-19T07:09:11Z"}', "2026-11-19T07:09:11", None, None, None, None, 'plain "text"'),
    ("docker", '{"log":"{\\"level\\":\\"warn\\",\\"msg\\":\\"j\\"}\\n","stream":"stdout","attrs":{"tag":"x"},"time":"2026-11-19T07:09:12.5Z"}', "2026-11-19T07:09:12.500000", "warning", None, None, None, "j"),
    ("compose", "web-1  | 2026-11-19 08:09:10 WARN [main] shop.Cart: low", "2026-11-19T08:09:10", "warning", None, "main", "shop.Cart", "low"),
    ("compose", "\x1b[36mshop-db-1   |\x1b[0m 2026-11-19T08:09:10.123456789Z \x1b[31mE1119 08:09:10.120000       1 a.go:5] bad\x1b[0m", "2026-11-19T08:09:10.123456", "error", None, "1", "a.go", "bad"),
    ("compose", "cache_2 | ", None, None, None, None, "cache_2", ""),
    ("compose", "0|api  | 2026-11-19T08:09:10Z ERROR refused", "2026-11-19T08:09:10", "error", None, None, "api", "refused"),
    ("compose", "web.1.k3x@node7    | [2026-11-19 08:09:10 +0000] [9] [INFO] up", "2026-11-19T08:09:10", "info", None, "9", "web.1.k3x@node7", "up"),
    ("kubectl", "[pod/shop-7d9f-x2/api] 2026-11-19T08:09:10Z\tERROR\tno stock", "2026-11-19T08:09:10", "error", "shop-7d9f-x2", None, "api", "no stock"),
    ("kubectl", '[pod/shop-7d9f-x2/api] 2026-11-19T08:09:10.123456789Z {"level":"warn","msg":"slow","service":"cart"}', "2026-11-19T08:09:10.123456", "warning", "shop-7d9f-x2", None, "cart", "slow"),
    ("kubectl", "[pod/job-1/init] waiting for the database", None, None, "job-1", None, "init", "waiting for the database"),
    ("stamped", "2026-11-19T08:09:10.123456789Z 2026-11-19 08:09:09,978 INFO [main] a.B: in", "2026-11-19T08:09:10.123456", "info", None, "main", "a.B", "in"),
    ("stamped", '2026-11-19T08:09:10.1234567Z 10.1.2.3 - - [19/Nov/2026:10:00:00 +0100] "GET /a HTTP/1.1" 502 5', "2026-11-19T08:09:10.123456", "error", "10.1.2.3", None, None, '"GET /a HTTP/1.1" 502 5'),
    ("stamped", '2026-11-19T09:09:10.12345678+01:00 {"level":"error","msg":"x"}', "2026-11-19T08:09:10.123456", "error", None, None, None, "x"),
    ("envelope", '{"date":1763539200.25,"log":"ERROR: no disk","stream":"stderr"}', "2025-11-19T08:00:00.250000", "error", None, None, None, "no disk"),
    ("envelope", '{"insertId":"a","severity":"WARNING","textPayload":"2026-11-19T08:09:10Z slow","timestamp":"2026-11-19T08:09:11Z"}', "2026-11-19T08:09:11", "warning", None, None, None, "slow"),
    ("envelope", '{"timestamp":1763539200250,"message":"START 7","ingestionTime":1763539201000}', "2025-11-19T08:00:00.250000", None, None, None, None, "START 7"),
    ("windows-xml", "<Event><System><Provider Name='Disk'/><EventID>7</EventID><Level>2</Level><TimeCreated SystemTime='2026-11-19T08:09:10.5Z'/><Computer>w</Computer></System></Event>", "2026-11-19T08:09:10.500000", "error", "w", None, "Disk", "EventID=7"),
    ("windows-xml", "<Event xmlns='a'><System><Level>4</Level><Execution ProcessID='5'/></System><EventData><Data Name='a'>&lt;b&gt;</Data></EventData></Event>", None, "info", None, "5", None, "data.a=<b>"),
    ("windows-xml", "<Event><RenderingInfo Culture='en'><Message>gone</Message></RenderingInfo></Event>", None, None, None, None, None, "gone"),
    ("cri", "2026-11-19T08:09:10.123456789Z stderr F E1119 08:09:10.120000       1 a.go:5] bad", "2026-11-19T08:09:10.123456", "error", None, "1", "a.go", "bad"),
    ("cri", "2026-11-19T09:09:10.5+01:00 stdout F ", "2026-11-19T08:09:10.500000", None, None, None, None, ""),
    ("cri", '2026-11-19T08:09:10Z stdout F {"level":"error","msg":"x"}', "2026-11-19T08:09:10", "error", None, None, None, "x"),
]  # fmt: skip


def parsed(lines: list[str], formats: tuple[str, ...] | None = None, zone: str = "UTC") -> pl.DataFrame:
    names = detect(lines) if formats is None else formats
    return parse(raw_frame(lines), names, arrived=ARRIVED, zone=zone)


@functools.cache
def parsed_alone(line: str) -> pl.DataFrame:
    return parsed([line])


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e[0]}-{i}" for i, e in enumerate(EXAMPLES)])
def test_an_example_line_is_recognised_and_parsed_exactly(example: Example) -> None:
    name, line, time, level, host, process, service, message = example
    assert detect([line])[0] == name
    row = parsed_alone(line).row(0, named=True)
    expected = datetime.fromisoformat(time).replace(tzinfo=UTC) if time else ARRIVED
    assert row["timestamp"] == expected
    assert (row["level"], row["host"], row["process"], row["service"]) == (level, host, process, service)
    assert row["message"] == (line if message is None else message)
    assert head_mask(inner_lines(pl.Series([line]), ()), (name,)).item() or name in WRAPPERS
    assert level is None or level in LEVELS


def test_every_format_has_three_examples() -> None:
    """The shipped one is one of them."""
    counts = {name: sum(e[0] == name for e in EXAMPLES) + 1 for name in NAMES}
    assert {name: n for name, n in counts.items() if n < 3} == {}


@pytest.mark.long
def test_all_formats_in_one_file_each_find_their_lines() -> None:
    # a date without a number above 12 is what its sample says
    lines = [e[1] for e in EXAMPLES if not e[0].endswith("-dmy")]
    together = parsed(lines, NAMES)
    apart = pl.concat([parsed_alone(line) for line in lines])
    # a wrapper reads inside lines of whatever formats the file has, so the two ways agree
    alone = apart["timed"]
    assert together.drop("line", "timestamp", "timed").equals(apart.drop("line", "timestamp", "timed"))
    # lines that write their year settle it for lines that do not
    clocks = [BY_NAME[e[0]].clock if e[0] in BY_NAME else None for e in EXAMPLES if not e[0].endswith("-dmy")]
    alone &= pl.Series([clock is None or clock.missing != "year" for clock in clocks])
    assert together["timestamp"].filter(alone).equals(apart["timestamp"].filter(alone))


def test_lines_that_each_have_formats_of_their_own_are_read_as_each_alone() -> None:
    strays = [
        "2026-11-19 08:09:10 no table",
        "no format",
        '{"log":"2026-11-19 08:09:10 x","stream":"stdout"}',
    ]
    lines = [e[1] for e in EXAMPLES[::12]] + strays
    found = [names if are_ordered(names) else () for names in map(detect, lines)]
    found[-3:] = ("syslog",), ("iso", "hdfs"), ("envelope", "hdfs")
    plans = list(dict.fromkeys(found))
    which = np.array([plans.index(names) for names in found])
    together = parse_each(raw_frame(lines), plans, which, arrived=ARRIVED, zone="UTC")
    apart = pl.concat([parsed([line], names) for line, names in zip(lines, found, strict=True)])
    alone = apart["timed"]
    assert together.drop("line", "timestamp", "timed").equals(apart.drop("line", "timestamp", "timed"))
    # lines that write their year settle it for lines that do not
    guessed = {form.name for form in TEXT_FORMATS if form.clock and form.clock.missing == "year"}
    alone &= pl.Series([guessed.isdisjoint(names) for names in found])
    assert together["timestamp"].filter(alone).equals(apart["timestamp"].filter(alone))


def test_a_line_that_has_its_time_is_parsed_as_one_that_has_none() -> None:
    lines = [e[1] for e in EXAMPLES[::12]]
    lines += [
        '{"log":"2026-11-19 08:09:10 INFO x","stream":"stdout","level":"error","t":"2026-11-19T08:09:10Z"}'
    ]
    names = tuple(dict.fromkeys(name for line in lines for name in detect([line]) if are_ordered((name,))))
    given = pl.Series("timestamp", [ARRIVED - timedelta(days=n) for n in range(len(lines))], dtype=UTC_US)
    with_times = parse(raw_frame(lines).with_columns(given), names, arrived=ARRIVED)
    times = ["timestamp", "timed"]
    assert with_times.drop(times).equals(parsed(lines, names).drop(times))
    assert with_times["timestamp"].equals(given) and with_times["timed"].all()


NEAR_MISSES = (
    "",
    "hello world",
    "117900001 2005.06.04 R01 not-a-time R01 RAS KERNEL INFO x",
    "Juno 14 15:16:01 box sshd: x",
    "I1120 no klog",
    '127.0.0.1 - - [20/Nov/2026] "GET /"',
    "12:X 20 Nov late",
    "error while reading",
    "Information is power",
    "INFORMED: yes",
    "a=b",
    "see a=b c=d",
    '{"unfinished": 1',
    "{not json}",
    "20261119 hello",
    "2026-11 hello",
    "[main] started",
    "name  | value",
    "[pod/unfinished started",
    "2026-11-19T08:09:10.1234567Zulu",
    "<34> hello",
)


@pytest.mark.parametrize("line", NEAR_MISSES)
def test_a_near_miss_is_no_format(line: str) -> None:
    assert detect([line]) == ()


@pytest.mark.long
def test_a_near_miss_is_its_own_message() -> None:
    # All lines at once: reading as every format takes a second, for one line as for many.
    # The bar of a table is a prefix only where a sample says so.
    frame = parsed(list(NEAR_MISSES), tuple(n for n in NAMES if n != "compose"))
    assert frame.height == len(NEAR_MISSES)
    for line, row in zip(NEAR_MISSES, frame.iter_rows(named=True), strict=True):
        assert row["message"] == line
        assert (row["timestamp"], row["level"], row["host"], row["service"]) == (ARRIVED, None, None, None)


def test_an_iso_line_with_a_level_is_not_taken_for_syslog() -> None:
    row = parsed(["2026-11-19T08:09:10+00:00 ERROR main: failed"]).row(0, named=True)
    assert (row["level"], row["host"], row["message"]) == ("error", None, "main: failed")


def test_the_alert_label_of_blue_gene_lines_changes_nothing() -> None:
    line = "1117900001 2005.06.04 R01 2005-06-04-08.46.41.25 R01 RAS KERNEL FATAL data TLB error"
    labelled = parsed([f"{label}{line}" for label in ("", "- ", "KERNDTLB ", "APPSEV ")], ("bgl",))
    assert labelled.drop("raw", "line").n_unique() == 1


def test_the_most_frequent_format_comes_first_and_rare_accidents_are_left_out() -> None:
    klog = [f"I1119 08:09:10.{i:06} 1 a.go:1] x" for i in range(150)]
    iso = ["2026-11-19T08:09:10Z text"] * 250
    assert detect(klog + iso) == ("iso", "klog")
    assert detect([*klog, "1763539200 once"]) == ("klog",)
    assert detect([]) == ()


def test_a_format_that_begins_behind_the_sample_is_read_with_its_time_and_level() -> None:
    early = [f"I1119 08:09:10.123456   12345 server.go:12] started {n}" for n in range(300)]
    late = ["2026-11-20 10:00:01 ERROR no disk", "Nov 20 10:00:02 box app[3]: bye", "ERROR: no disk"]
    framer = Framer()
    records = pl.concat([framer.feed([*early, *late]), framer.flush()])
    assert framer.formats == ("klog",)
    rows = parse(records, framer.formats, arrived=ARRIVED).tail(3).to_dicts()
    times = [row["timestamp"].strftime("%d %H:%M:%S") for row in rows]
    assert times == ["20 10:00:01", "20 10:00:02", "20 10:00:02"]
    assert [row["level"] for row in rows] == ["error", None, "error"]
    assert [row["message"] for row in rows] == ["no disk", "bye", "no disk"]


def test_continuation_lines_stay_in_the_message() -> None:
    raw = "2026-11-19 08:09:10,978 ERROR [main] a.B: broken\n\tat a.B.c(B.java:1)\nCaused by: x.Y: z\n"
    row = parsed([raw], ("log4j",)).row(0, named=True)
    assert row["message"] == "broken\n\tat a.B.c(B.java:1)\nCaused by: x.Y: z"


def test_container_lines_of_one_record_lose_their_wrappers() -> None:
    cri = (
        "2026-11-19T08:09:10.1Z stdout P first half,\n2026-11-19T08:09:10.2Z stdout F  second half\n"
        "2026-11-19T08:09:10.3Z stdout F   indented"
    )
    assert parsed([cri], ("cri",))["message"].item() == "first half, second half\n  indented"
    docker = "\n".join(
        f'{{"log":"{text}","stream":"stdout","time":"2026-11-19T08:09:10Z"}}'
        for text in ("half ", "whole\\n", "\\tat x\\n")
    )
    assert parsed([docker], ("docker",))["message"].item() == "half whole\n\tat x"


def test_colours_are_taken_off_wherever_they_begin_and_the_raw_line_stays() -> None:
    plain = [f"2026-11-20 10:{i // 60:02}:{i % 60:02} INFO handled {i}" for i in range(300)]
    lines = [*plain, "\x1b[1;31m2026-11-20 10:05:00 ERROR out of disk\x1b[0m", "\x1b[31m  at the end\x1b[0m"]
    framer = Framer()
    records = pl.concat([framer.feed(lines), framer.flush()])
    row = parse(records, framer.formats, arrived=ARRIVED).row(-1, named=True)
    assert framer.formats == ("iso",)
    assert (row["level"], row["message"]) == ("error", "out of disk\n  at the end")
    assert row["raw"] == "\n".join(lines[-2:])


def test_a_stack_trace_behind_a_prefix_is_one_message_without_prefixes() -> None:
    lines = [f"web-1  | 2026-11-20 10:00:{i % 60:02} INFO handled {i}" for i in range(300)]
    trace = [
        "web-1  | 2026-11-20 10:05:00 ERROR lost",
        "web-1  | a.b.Refused: no",
        "web-1  | \tat a.b.C(C.java:1)",
    ]
    framer = Framer()
    records = pl.concat([framer.feed(lines + trace), framer.flush()])
    row = parse(records, framer.formats, arrived=ARRIVED).row(-1, named=True)
    assert framer.formats == ("compose", "iso")
    assert (records.height, row["service"], row["lines"]) == (301, "web-1", 3)
    assert row["message"] == "lost\na.b.Refused: no\n\tat a.b.C(C.java:1)"


def test_a_table_with_bars_is_no_output_of_compose() -> None:
    assert "compose" not in detect([f"{name}  | {i}" for i, name in enumerate(("total", "free", "used") * 9)])
    assert detect(["2026-11-20T10:00:01.1234567Z Run actions/checkout"]) == ("iso",)


def test_a_message_longer_than_the_header_look_is_whole() -> None:
    text = "ü" * 3000 + " end"
    long = [
        f"2026-11-19 08:09:10,978 INFO [main] a.B: {text}",
        f'1.2.3.4 - - [19/Nov/2026:10:00:00 +0000] "GET /{text}" 500 1',
    ]
    rows = parsed(long, ("access", "log4j"))
    assert rows["message"].to_list() == [text, f'"GET /{text}" 500 1']
    assert rows["level"].to_list() == ["info", "error"]


def test_bad_json_among_good_is_kept_as_it_is() -> None:
    lines = [
        '{"msg":"one","n":1.50}',
        '{"msg":"two"',
        '{"msg":"three"} tail',
        '{"msg":NaN}',
        '{"msg":"\\ud800"}',
        f'{{"msg":"four","a":[1],"b":{{"c":{10**30}}}}}',
        '{"k":1}' * 2,
        '{"a":' * 5000 + "1" + "}" * 5000,
    ]
    messages = parsed(lines, ("json",))["message"].to_list()
    assert messages[:4] == ["one n=1.50", '{"msg":"two"', '{"msg":"three"} tail', '{"msg":NaN}']
    assert messages[5] == f"four a=[1] b.c={10**30}"
    assert messages[4] == lines[4]
    assert messages[6:] == lines[6:]


def test_records_that_already_have_a_message_only_get_a_time() -> None:
    frame = raw_frame(["2026-11-19T08:09:10Z ERROR a", "2026-11-19T08:09:10Z ERROR b", "x"]).with_columns(
        pl.Series("message", ["known", None, "late"]),
        pl.Series("level", [None, "info", "warning"], dtype=pl.String),
        pl.Series("timestamp", [None, None, ARRIVED - timedelta(days=1)], dtype=pl.Datetime("us", "UTC")),
    )
    out = parse(frame, ("iso",), arrived=ARRIVED)
    assert out["message"].to_list() == ["known", "b", "late"]
    assert out["level"].to_list() == [None, "info", "warning"]
    assert out["timestamp"].to_list() == [
        ARRIVED,
        datetime(2026, 11, 19, 8, 9, 10, tzinfo=UTC),
        ARRIVED - timedelta(days=1),
    ]
    assert dict(out.schema) == RAW_SCHEMA
    assert out["timed"].to_list() == [t != ARRIVED for t in out["timestamp"].to_list()]
    assert parse(frame.clear(), ("iso",), arrived=ARRIVED).height == 0


def test_a_line_without_time_has_that_of_the_line_before_it() -> None:
    lines = ["banner", "2026-11-20 10:00:00 INFO a", "INFO b", "c", "2026-11-20 10:00:09 INFO d"]
    out = parsed(lines, ("iso", "level"))
    seconds = [(t - datetime(2026, 11, 20, 10, tzinfo=UTC)).total_seconds() for t in out["timestamp"]]
    assert seconds[1:] == [0, 0, 0, 9] and out["timestamp"][0] == ARRIVED
    assert out["timed"].to_list() == [False, True, True, True, True]


def test_a_time_that_a_producer_gave_is_no_time_of_arrival_and_none_is_borrowed_for_its_neighbour() -> None:
    frame = raw_frame(["a", "b"]).with_columns(
        pl.Series("timestamp", [ARRIVED - timedelta(days=1), None], dtype=pl.Datetime("us", "UTC")),
        pl.col("raw").alias("message"),
    )
    out = parse(frame, (), arrived=ARRIVED)
    assert out["timed"].to_list() == [True, False] and out["timestamp"][1] == ARRIVED
    again = parse(out, (), arrived=ARRIVED + timedelta(days=9))
    assert again.equals(out)  # a rescored batch keeps what it was stored with


@pytest.mark.parametrize(
    ("dates", "name"),
    [
        (["03/04/2026 10:00:01", "25/04/2026 10:00:01"], "date-dmy"),
        (["03/04/2026 10:00:01", "03/25/2026 10:00:01"], "date-mdy"),
        (["03/04/2026 10:00:01 PM"], "date-mdy"),
        (["03/04/2026 10:00:01 PM", "25/04/2026 10:00:01 PM"], "date-dmy"),
        (["03/04/2026 10:00:01"], "date-dmy"),
        (["03.04.2026 10:00:01 PM"], "date-dmy"),
        (["03/04/2026 10:00:01", "03/05/2026 10:00:01"], "date-mdy"),
        (["03/04/2026 10:00:01", "04/04/2026 10:00:01"], "date-dmy"),
    ],
)
def test_the_sample_decides_between_day_and_month(dates: list[str], name: str) -> None:
    assert detect([f"{date} cart {i}" for i, date in enumerate(dates)]) == (name,)
    assert detect([f"shop {date} cart {i}" for i, date in enumerate(dates)]) == (f"within-{name[5:]}",)


def test_dates_in_free_text_and_in_stack_traces_are_no_time_of_the_line() -> None:
    text = [
        "We met on 2026-11-20 10:00:01 and talked.",
        "Nothing came of it.",
        "So we left again.",
        "It rained.",
    ]
    trace = [
        "shop.pay.PaymentException: card refused at 2026-11-20T10:00:01Z",
        "\tat shop.pay.Gateway.charge(Gateway.java:41)",
        "Caused by: java.net.SocketTimeoutException: Read timed out",
        "\t... 12 more",
        "Suppressed: a.B",
    ]
    places = [" ".join(["word"] * n) + " 2026-11-20 10:00:01 x" for n in (0, 3, 6, 9, 11) if n]
    ids = [f"order {1795168801 + 7 * i} was shipped" for i in range(20)]
    for lines in (text, trace, places, ids):
        assert detect(lines) == (), lines


ODD = st.one_of(
    st.text(max_size=60),
    st.builds(
        lambda e, cut, tail: e[1][:cut] + tail,
        st.sampled_from(EXAMPLES),
        st.integers(0, 120),
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(["", "\n\tat x", '"', "]", "}", "\\", '"}', "=", "x" * 1500]),
        ),
    ),
)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(ODD, st.sampled_from([e[1] for e in EXAMPLES])), max_size=40))
def test_formats_asked_for_at_once_are_those_that_are_found_one_by_one(lines: list[str]) -> None:
    with patch.object(formats, "_together", lambda names: tuple(("", (name,)) for name in names)):
        alone = detect(lines)
    assert detect(lines) == alone


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.lists(ODD, max_size=25), st.lists(st.sampled_from(NAMES), max_size=12))
def test_no_line_makes_parsing_fail_or_lose_a_row(lines: list[str], some: list[str]) -> None:
    frame = raw_frame(lines)
    for names in (detect(lines), tuple(some)):  # a pattern is compiled for each name
        out = parse(frame, names, arrived=ARRIVED, zone="America/New_York")
        assert out["raw"].to_list() == lines
        assert out["message"].null_count() == out["timestamp"].null_count() == 0
        assert set(out["level"].drop_nulls()) <= set(LEVELS)
        assert all(1970 <= t.year <= 2261 for t in out["timestamp"].to_list())
        assert dict(out.schema) == RAW_SCHEMA
        given = frame.with_columns(out["timestamp"])
        for headers in (set[str](), {"level"}):
            some_columns = parse(given, names, arrived=ARRIVED, headers=headers)
            assert some_columns["message"].equals(out["message"]), names
            assert not headers or some_columns["level"].equals(out["level"]), names


def test_a_message_alone_is_cut_off_where_the_captured_header_ends() -> None:
    others = [example[1] for example in EXAMPLES[::40]]
    for form in TEXT_FORMATS:
        own = [line for name, line, *_ in EXAMPLES if name == form.name]
        cut = [line[:at] for line in own for at in (9, 25, 40)]
        tails = [line + tail for line in own for tail in ("\n\tat x", " ü" * 700, " ")]
        raw = pl.Series("raw", own + cut + tails + others)
        pattern = "(?s)" + form.pattern
        captured, alone = formats._groups(raw, pattern), formats._groups(raw, pattern, message_only=True)
        assert alone.columns == ["message"] and alone["message"].equals(captured["message"]), form.name


# Time


@pytest.mark.parametrize(
    ("line", "arrived", "year"),
    [
        ("Dec 31 23:59:59 h a: x", "2026-01-01T00:00:05", 2025),
        ("Jan  1 00:00:05 h a: x", "2025-12-31T23:59:59", 2026),
        ("Jan  2 12:00:00 h a: x", "2025-12-31T23:59:59", 2025),
        ("Feb 29 12:00:00 h a: x", "2026-11-20T15:00:00", 2024),
        ("Feb 29 12:00:00 h a: x", "2028-02-29T12:00:00", 2028),
        ("Nov 21 14:59:59 h a: x", "2026-11-20T15:00:00", 2026),
        ("Nov 21 15:00:01 h a: x", "2026-11-20T15:00:00", 2025),
    ],
)
def test_a_missing_year_is_the_latest_that_is_not_in_the_future(line: str, arrived: str, year: int) -> None:
    now = datetime.fromisoformat(arrived).replace(tzinfo=UTC)
    out = parse(raw_frame([line]), ("syslog",), arrived=now)
    assert out["timestamp"].item().year == year


def test_local_times_use_the_zone_of_the_source_and_survive_the_change_of_clocks() -> None:
    times = {
        "2026-07-01 12:00:00": "2026-07-01T10:00:00",
        "2026-03-29 02:30:00": "2026-03-29T01:30:00",  # does not exist: 01:00 UTC is 03:00
        "2026-10-25 02:30:00": "2026-10-25T00:30:00",  # twice: the first one
        "2026-07-01 12:00:00Z": "2026-07-01T12:00:00",
        "2026-07-01 12:00:00 -0330": "2026-07-01T15:30:00",
    }
    out = parsed([f"{t} x" for t in times], ("iso",), zone="Europe/Berlin")
    assert [t.replace(tzinfo=None).isoformat() for t in out["timestamp"].to_list()] == list(times.values())
    samoa = parsed(["2011-12-30 12:00:00 x"], ("iso",), zone="Pacific/Apia")
    assert samoa["timestamp"].item() != ARRIVED


def test_an_unknown_zone_name_in_a_line_falls_back_on_the_source() -> None:
    lines = ["2026-07-01 12:00:00 IST [1] LOG:  x", "2026-07-01 12:00:00 CEST [1] LOG:  x"]
    hours = [t.hour for t in parsed(lines, ("postgresql",), zone="Asia/Kolkata")["timestamp"].to_list()]
    assert hours == [6, 10]


@pytest.mark.parametrize(
    "time", ["0000-01-01 00:00:00", "9999-12-31 23:59:59", "2026-13-01 00:00:00", "2026-01-01 25:61:61"]
)
def test_an_impossible_time_becomes_the_arrival_time(time: str) -> None:
    assert parsed([f"{time} INFO x"], ("iso",))["timestamp"].item() == ARRIVED


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="time zone 'Mars/Base' is unknown; give an IANA name"):
        parsed(["x"], (), zone="Mars/Base")
    with pytest.raises(
        BadInput, match="log format 'nope' is unknown; known are compose, kubectl, docker, cri"
    ):
        parsed(["x"], ("nope",))


# Real logs

LOGHUB = {
    "Android": "android", "Apache": "apache-error", "BGL": "bgl", "HDFS": "hdfs", "HPC": "hpc", "Hadoop": "log4j",
    "HealthApp": "healthapp", "Linux": "syslog", "Mac": "syslog", "OpenSSH": "syslog", "Windows": "windows-cbs",
    "Zookeeper": "zookeeper",
}  # fmt: skip


def physical_lines(data: bytes) -> int:
    return data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))


def stored(path: Path, data: bytes) -> pl.DataFrame:
    """Every chunk of the file, parsed; all its lines are there."""
    chunks = list(read_file(path))
    out = pl.concat([parse(c.records, c.formats, arrived=ARRIVED) for c in chunks])
    assert int(out["lines"].sum()) == physical_lines(data)
    assert out["message"].null_count() == 0
    assert out["timestamp"].null_count() == 0
    return out


@needs_log_sets
@pytest.mark.parametrize("system", LOGHUB)
def test_every_line_of_a_public_log_is_stored_with_its_own_time(system: str) -> None:
    path = DATA / "loghub_2k" / system / f"{system}_2k.log"
    out = stored(path, path.read_bytes())
    assert out.height == 2000
    assert (out["timestamp"] != ARRIVED).all()
    assert next(iter(read_file(path))).formats == (LOGHUB[system],)
    content = pl.read_csv(path.with_name(f"{system}_2k.log_structured.csv"), infer_schema=False)["Content"]
    same = out["message"].str.strip_chars() == content.fill_null("").str.strip_chars()
    # these authors cut some messages differently: the tag of a syslog line, spaces and quotes of the table
    assert same.mean() > {"Mac": 0.9, "Linux": 0.9, "HPC": 0.9, "Apache": 0.5}.get(system, 0.99)  # type: ignore[operator]


def test_every_line_of_our_own_samples_is_stored() -> None:
    folder = Path(__file__).resolve().parents[2] / "samples"
    samples = sorted(p for p in folder.rglob("*.log*") if p.is_file())
    if not samples:
        pytest.skip("there are no samples yet")
    for path in samples:
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(data)
        out = stored(path, data)
        assert (out["timestamp"] != ARRIVED).mean() > 0.5, path.name  # type: ignore[operator]


@needs_log_sets
def test_every_line_of_the_microservice_logs_is_stored_with_its_service(tmp_path: Path) -> None:
    archives = sorted((DATA / "trainticket").rglob("*.zip"))
    services: set[str] = set()
    for archive in archives:
        with zipfile.ZipFile(archive) as packed:
            # of each fault one run; the large normal one is read by the benchmarks
            logs = [i for i in packed.infolist() if i.filename.endswith(".log") and i.file_size < 8_000_000][
                :3
            ]
            for number, info in enumerate(logs):
                data = packed.read(info)
                path = tmp_path / f"{archive.stem}-{number}.log"
                path.write_bytes(data)
                out = stored(path, data)
                assert (out["timestamp"] != ARRIVED).mean() > 0.99  # type: ignore[operator]
                assert out["level"].null_count() == 0
                services.update(out["service"].to_list())
    assert "ts-order-service" in services
    assert all(name.startswith("ts-") for name in services)


@needs_log_sets
@pytest.mark.parametrize(
    ("name", "form"), [("bgl/BGL_100k.log.gz", "bgl"), ("hdfs/HDFS_20000.log.gz", "hdfs")]
)
def test_every_line_of_a_packed_public_log_is_stored(name: str, form: str) -> None:
    path = DATA / name
    data = gzip.decompress(path.read_bytes())
    out = stored(path, data)
    assert out.height == physical_lines(data)
    assert (out["timestamp"] != ARRIVED).all()
    assert out["level"].null_count() == 0
    assert not out["message"].str.contains(r"^(?:-|APP|KERN)[A-Z]* [0-9]{10} ").any()
    assert next(iter(read_file(path))).formats == (form,)
