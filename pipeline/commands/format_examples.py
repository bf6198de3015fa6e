"""One line of each known format, for `logweir formats`."""

from typing import Final

EXAMPLES: Final[dict[str, str]] = {
    "compose": "web-1  | 2026-11-19 08:09:10 WARN [main] shop.Cart: low",
    "kubectl": "[pod/shop-7d9f-x2/api] 2026-11-19T08:09:10Z\tERROR\tno stock",
    "docker": (
        '{"log":"2026-11-19 08:09:10,978 INFO [main] a.B: '
        'in\\u003e\\n","stream":"stdout","time":"2026-11-19T07:09:10.978123456Z"}'
    ),
    "cri": "2026-11-19T08:09:10.123456789Z stderr F E1119 08:09:10.120000       1 a.go:5] bad",
    "stamped": "2026-11-19T08:09:10.123456789Z 2026-11-19 08:09:09,978 INFO [main] a.B: in",
    "envelope": '{"date":1763539200.25,"log":"ERROR: no disk","stream":"stderr"}',
    "auditd": (
        "type=SYSCALL msg=audit(1795168801.123:24287): arch=c000003e syscall=2 success=no exit=-13 "
        'pid=3538 comm="cat"'
    ),
    "json": '{"time":"2026-11-19T08:09:10.5Z","level":"INFO","msg":"hi","n":1,"app":"shop"}',
    "windows-xml": (
        "<Event><System><Provider Name='Disk'/><EventID>7</EventID><Level>2</Level><TimeCreated "
        "SystemTime='2026-11-19T08:09:10.5Z'/><Computer>w</Computer></System></Event>"
    ),
    "fortigate": (
        'date=2026-11-20 time=10:00:01 devname="fw1" devid="FG1" tz="+0100" logid="0100032002" '
        'type="event" level="alert" user="admin" msg="Login failed"'
    ),
    "logfmt": 'time=2026-11-19T08:09:10Z level=warn msg="disk is low" free=3',
    "haproxy": (
        "10.0.0.1:51234 [20/Nov/2026:10:00:01.123] web~ app/s1 10/0/30/69/109 200 2750 - - ---- "
        '1/1/1/1/0 0/0 "GET /a HTTP/1.1"'
    ),
    "haproxy-syslog": (
        "<134>Nov 20 10:00:02 lb1 haproxy[2201]: 10.0.1.2:33317 [20/Nov/2026:10:00:01.123] web app/s1 "
        '10/0/30/69/109 404 2750 - - ---- 1/1/1/1/0 0/0 "GET /i HTTP/1.1"'
    ),
    "envoy": (
        '[2026-11-20T10:00:01.123Z] "GET /cart HTTP/1.1" 503 UF 0 91 12 - "10.0.0.5" "curl/8.5" "4711" '
        '"shop" "10.1.0.3:80"'
    ),
    "aws-alb": (
        "https 2026-11-20T10:00:01.123456Z app/shop/50dc6c 10.0.0.1:2817 10.0.1.1:80 0.086 0.048 0.037 "
        '502 502 0 57 "GET https://shop.example:443/ HTTP/1.1" "curl/8.5"'
    ),
    "aws-elb": (
        "2026-11-20T10:00:01.123456Z shop 10.0.0.1:2817 10.0.1.1:80 0.000073 0.001048 0.000057 200 200 0 "
        '29 "GET http://shop.example:80/ HTTP/1.1" "curl/8.5" - -'
    ),
    "aws-vpc-flow": (
        "2 123456789010 eni-1235b8ca123456789 172.31.9.69 172.31.9.12 49761 3389 6 20 4249 1795168801 "
        "1795168861 REJECT OK"
    ),
    "aws-s3": (
        "79a579a579a579a579a579a579a579a579a579a579a579a579a579a579a579a5 shop-files "
        '[20/Nov/2026:10:00:01 +0000] 10.0.0.3 - 3E57 REST.GET.OBJECT a.png "GET /a.png HTTP/1.1" 404 '
        'NoSuchKey 113 - 7 - "-" "x" -'
    ),
    "squid": (
        "1795168801.123    12 10.0.0.8 TCP_MISS/200 512 GET http://shop.example/ - HIER_DIRECT/10.1.1.1 "
        "text/html"
    ),
    "uwsgi": (
        "[pid: 71|app: 0|req: 3/12] 10.0.0.4 () {42 vars in 731 bytes} [Fri Nov 20 10:00:01 2026] GET "
        "/cart => generated 27 bytes in 3 msecs (HTTP/1.1 500) 2 headers in 71 bytes (1 switches on core "
        "0)"
    ),
    "access-python": '127.0.0.1 - - [20/Nov/2026 10:00:01] "GET / HTTP/1.1" 200 -',
    "php": "[20-Nov-2026 10:00:01 UTC] PHP Fatal error:  Uncaught Error: no cart in /srv/a.php:7",
    "monolog": '[2026-11-20 10:00:01] production.ERROR: payment refused {"order":7} []',
    "tomcat": (
        "20-Nov-2026 10:00:01.123 INFO [main] org.apache.catalina.startup.Catalina.start Server startup "
        "in [812] milliseconds"
    ),
    "bind": (
        "20-Nov-2026 10:00:01.123 queries: info: client @0x7f1 10.0.0.9#4711 (shop.example): query: "
        "shop.example IN A +"
    ),
    "samba": (
        "[2026/11/20 10:00:01.123456,  0] ../source3/smbd/server.c:1234(main)\n  smbd version 4.19 started."
    ),
    "cups": "E [20/Nov/2026:10:00:01 +0000] [Job 12] No pages found!",
    "mysql-slow": (
        "# Time: 2026-11-20T10:00:01.123456Z\n# User@Host: shop[shop] @ localhost []  Id:     4\n"
        "# Query_time: 4.003882  Lock_time: 0.000000 Rows_sent: 1  Rows_examined: 0\n"
        "SET timestamp=1795168801;\nSELECT SLEEP(4);"
    ),
    "mysql-slow-old": (
        "# Time: 261120 10:00:01\n# User@Host: shop[shop] @  [10.0.0.4]\n"
        "# Thread_id: 3  Schema: shop  QC_hit: No\n# Query_time: 0.577709  Lock_time: 0.017307  "
        "Rows_sent: 1  Rows_examined: 3871\nuse shop;\nSET timestamp=1795168801;\nSELECT LotNew('5');"
    ),
    "mysql-old": "261120 10:00:01 [ERROR] Can't start server: Bind on TCP/IP port",
    "postgresql-prefix": (
        "2026-11-20 10:00:01 UTC [77]: [3-1] user=app,db=shop,app=web,client=10.0.0.4 ERROR:  deadlock "
        "detected"
    ),
    "pgbouncer": (
        "2026-11-20 10:00:01.123 UTC [12] LOG C-0x55d: shop/app@10.0.0.4:5432 login attempt: db=shop user=app"
    ),
    "mongodb-text": "2026-11-20T10:00:01.123+0000 I NETWORK  [conn12] received client metadata",
    "mssql": "2026-11-20 10:00:01.12 spid5s      Starting up database 'shop'.",
    "clickhouse": (
        "2026.11.20 10:00:01.123456 [ 71 ] {a1-b2} <Error> executeQuery: Code: 60. DB::Exception: no table"
    ),
    "cassandra": "INFO  [main] 2026-11-20 10:00:01,123 StorageService.java:123 - Node up",
    "kafka": (
        "[2026-11-20 10:00:01,123] INFO [GroupCoordinator 0]: Stabilized group shop "
        "(kafka.coordinator.group.GroupCoordinator)"
    ),
    "ceph": "2026-11-20T10:00:01.123+0000 7f1b2c3d4e5f -1 osd.3 12 heartbeat_check: no reply",
    "journal-full": "Fri 2026-11-20 10:00:01 UTC web1 sshd[812]: Connection closed by 10.0.0.9",
    "journal-unix": "1795168801.123456 web1 sshd[12]: bye",
    "journal-monotonic": "[   12.345678] web1 kernel: usb 1-1: new",
    "logread": "Fri Nov 20 10:00:01 2026 daemon.err dnsmasq[71]: failed to bind",
    "cisco": "*Nov 20 10:00:01.123: %LINK-3-UPDOWN: Interface GigabitEthernet0/1, changed state to down",
    "cisco-year": "Nov 20 2026 10:00:01: %ASA-4-106023: Deny tcp src outside:10.0.0.9/4711",
    "esxi": "2026-11-20T10:00:01.123Z info hostd[2100123] [Originator@6876 sub=Vimsvc] Task completed",
    "macos-log": (
        "2026-11-20 10:00:01.123456+0100 0x1f3      Error       0x0                  71     0    sshd: "
        "(libsystem) failed"
    ),
    "fail2ban": "2026-11-20 10:00:01,123 fail2ban.actions        [71]: NOTICE  [sshd] Ban 10.0.0.9",
    "wazuh": "2026/11/20 10:00:01 ossec-syscheckd: INFO: File integrity monitoring scan ended.",
    "suricata-alert": (
        "11/20/2026-10:00:01.123456  [**] [1:2010935:3] ET SCAN [**] [Classification: Bad] [Priority: 2] "
        "{TCP} 10.0.0.9:1 -> 10.0.0.1:22"
    ),
    "suricata": "20/11/2026 -- 10:00:01 - <Notice> - all 4 packet processing threads started",
    "charon": "Nov 20 10:00:01 12[IKE] <shop|1> retransmit 1 of request",
    "syslog-local": "Nov 20 10:00:01 dnsmasq[71]: query[A] shop.example from 10.0.0.9",
    "systemd-console": "[\x1b[0;32m  OK  \x1b[0m] Started \x1b[0;1;39mOpenSSH server\x1b[0m.",
    "java-logging": "Nov 20, 2026 10:00:01 AM org.shop.Cart add\nSEVERE: no stock",
    "ruby": 'I, [2026-11-20T10:00:01.123456 #1234]  INFO -- : Started GET "/" for 10.0.0.9',
    "sidekiq": "2026-11-20T10:00:01.123Z pid=71 tid=abc class=PayJob jid=12ab INFO: start",
    "glog": "I20261120 10:00:01.123456 71 server.cc:12] listening",
    "tensorflow": (
        "2026-11-20 10:00:01.123456: I tensorflow/core/platform/cpu_feature_guard.cc:142] This binary is "
        "optimized"
    ),
    "chromium": "[71:81:1120/100001.123456:ERROR:gpu_init.cc(440)] Passthrough is not supported",
    "zap": '2026-11-20T10:00:01.123Z\tINFO\tserver/main.go:12\tlistening\t{"port": 80}',
    "capnslog": "2026-11-20 10:00:01.123456 I | etcdmain: etcd Version: 3.3",
    "rust-tracing": "2026-11-20T10:00:01.123456Z  INFO shop::cart: added 3",
    "wildfly": "2026-11-20 10:00:01,123 INFO  [org.jboss.as] (Controller Boot Thread) WFLYSRV0025: started",
    "wildfly-console": "10:00:01,123 INFO  [org.jboss.modules] (main) JBoss Modules 2.1",
    "home-assistant": "2026-11-20 10:00:01.123 ERROR (MainThread) [homeassistant.setup] Setup failed",
    "jenkins": "2026-11-20 10:00:01.123+0000 [id=25]\tINFO\thudson.WebAppMain$3#run: Jenkins is fully up",
    "jvm": "[2026-11-20T10:00:01.123+0000][info][gc] GC(3) Pause Young 12M->3M(64M) 4.2ms",
    "airflow": "[2026-11-20T10:00:01.123+0000] {taskinstance.py:1138} INFO - Dependencies all met",
    "scrapy": "2026-11-20 10:00:01 [scrapy.core.engine] INFO: Spider opened",
    "salt": "2026-11-20 10:00:01,123 [salt.minion      :1234][ERROR   ][71] Returner could not be loaded",
    "erlang-report": "=INFO REPORT==== 20-Nov-2026::10:00:01 ===\naccepting AMQP connection <0.1.0>",
    "elixir": "10:00:01.123 [info] GET /cart",
    "minecraft": "[10:00:01] [Server thread/INFO]: Done (3.2s)!",
    "pino-pretty": "[10:00:01.123] INFO (71): listening",
    "nest": "[Nest] 71  - 11/20/2026, 10:00:01 AM     LOG [NestFactory] Starting Nest application...",
    "dotnet": "info: Microsoft.Hosting.Lifetime[14]\n      Now listening on: http://[::]:80",
    "asterisk": "[2026-11-20 10:00:01] NOTICE[71]: chan_sip.c:123 handle_request: Registration failed",
    "lambda": "2026-11-20T10:00:01.123Z\tc6af9ac6-7b61-11e6-9a41-93e8deadbeef\tERROR\tno stock",
    "heroku": "2026-11-20T10:00:01.123456+00:00 app[web.1]: listening",
    "pipes": "2026-11-20 10:00:01|INFO|Shop.Cart|added 3",
    "level-time": "INFO  [2026-11-20 10:00:01,123] io.dropwizard.server.ServerFactory: Starting shop",
    "bgl": (
        "- 1117900001 2005.06.04 R01-M0-N1 2005-06-04-08.46.41.250000 R01-M0-N1 RAS KERNEL INFO cache fixed"
    ),
    "thunderbird": "- 1131500001 2005.11.09 dn1 Nov 9 01:33:21 dn1/dn1 crond[71]: job done",
    "hdfs": "081110 010203 55 INFO dfs.Node$Sender: sent blk_1",
    "hpc": "11 node-3 unix.hw net.down 1090000000 1 link lost",
    "syslog-5424": "<165>1 2026-11-19T08:09:10.003Z web-1 api 812 ID7 - ready",
    "syslog": "Jun  4 05:06:07 box sshd(pam_unix)[99]: check pass",
    "syslog-year": "<187>Nov  2 2024 10:00:00.5 fw app[3]: x",
    "syslog-iso": "2026-11-19T08:09:10.123456+01:00 box sshd[12]: bye",
    "klog": "I1119 08:09:10.123456   12345 server.go:12] started",
    "access": '10.1.2.3 - - [19/Nov/2026:10:00:00 +0100] "GET /a?b=1 HTTP/1.1" 200 512 "-" "curl/8"',
    "nginx-error": '2026/11/19 08:09:10 [error] 31#32: *5 open() "/x" failed',
    "apache-error": "[Sun Dec 04 04:47:44 2005] [notice] ok",
    "postgresql": '2026-11-19 08:09:10.123 UTC [77] ERROR:  column "a" is unknown',
    "postgresql-rds": "2026-11-19 08:09:10 UTC:10.0.0.9(5511):app@shop:[31]:FATAL:  too many",
    "mysql": "2026-11-19T08:09:10.123456Z 0 [Warning] [MY-1] [Server] old",
    "redis": "11:M 19 Nov 2026 08:09:10.123 * Ready",
    "healthapp": "20261119-8:9:10:4|Step|300|walk 3",
    "android": "03-17 16:13:38.811  1702  2395 D WindowManager: redraw",
    "windows-cbs": "2026-11-19 08:09:10, Info                  CBS    Session ended",
    "zookeeper": "2026-11-19 08:09:10,123 - WARN  [Send:77:Cnx$Worker@68] - leaving",
    "skywalking": (
        "2026-11-19 08:09:10.123 [SW_CTX:[ts-pay,ab12@10.0.0.7,t.1.2,s.1.2,0]] [http-1] INFO  p.Pay -paid 3"
    ),
    "spring-boot": "2026-11-19 08:09:10.123  INFO [cart,5f,6a,true] 1 --- [nio-1] c.s.Cart : added",
    "openstack": "2026-11-19 08:09:10.008 2931 INFO nova.compute [req-1] [instance: 7] up",
    "python": "2026-11-19 08:09:10,123 - shop.cart - WARNING - low - stock",
    "gunicorn": "[2026-11-19 08:09:10 +0100] [12] [INFO] Booting",
    "celery": "[2026-11-19 08:09:10,123: INFO/MainProcess] ready",
    "elasticsearch": "[2026-11-19T08:09:10,123][WARN ][o.e.Node          ] [es-1] slow",
    "env-logger": "[2026-11-19T08:09:10Z INFO  shop::cart] added",
    "log4j": "2026-11-19 08:09:10,978 INFO [main] org.shop.Cart: added 3",
    "log4j-class": "2026-11-19 08:09:10,123 INFO org.shop.Cart: added",
    "logback": "2026-11-19 08:09:10.123 [main] DEBUG a.Foo - hi",
    "logback-time": "08:09:10.123 [main] INFO a.Foo - hi",
    "spark": "26/11/19 08:09:10 INFO BlockManager: stored",
    "python-basic": "INFO:root:hello",
    "go": "2026/11/19 08:09:10 listening on :80",
    "iso": "2026-11-19T08:09:10Z plain text",
    "epoch": "1763539200.5 hit",
    "ctime": "Fri Nov 20 10:00:01 2026 10.0.0.9:1194 TLS Error: handshake failed",
    "rfc-2822": "Fri, 20 Nov 2026 10:00:01 +0100 ERROR no disk",
    "clf-time": "[20/Nov/2026:10:00:01 +0100] no stock",
    "date-mdy": "11/20/2026 10:00:01 AM no stock",
    "date-dmy": "20/11/2026 10:00:01 no stock",
    "compact": "20261120 10:00:01 ERROR x",
    "within-iso": "web1 cart 2026-11-20T10:00:01.123Z ERROR no stock",
    "within-slashed": "cart[7] 2026/11/20 10:00:01 [error] no stock",
    "within-ctime": "cart: Fri Nov 20 10:00:01 2026: no stock",
    "within-rfc-2822": "cart (Fri, 20 Nov 2026 10:00:01 +0100) no stock",
    "within-clf": "cart [20/Nov/2026:10:00:01 +0100] no stock",
    "within-syslog": "web1: Nov 20 10:00:01 no stock",
    "within-mdy": "cart 11/20/2026 10:00:01 AM no stock",
    "within-dmy": "cart 20.11.2026 10:00:01 no stock",
    "within-epoch": "cart [1795168801] no stock",
    "dmesg": "[   12.345678] usb 1-1: new",
    "level": "ERROR: no disk",
}
