"""Declarations of further text formats by family, and the table of all text formats in their order.

The rules of `formats_text` hold. Formats of one program come before the general ones, so their patterns ask
for something that only this program writes."""

from collections.abc import Mapping
from typing import Final

from pipeline.sources.formats_text import (
    ANY_CASE,
    ANYTHING,
    APPS,
    BASIC_FORMATS,
    BSD_CLOCK,
    CRI,
    FRACTION,
    HMS,
    ISO,
    ISO_Z,
    LEVEL,
    LEVEL_SOMEHOW,
    MONTH_DAY,
    OFFSET,
    SLASH_CLOCK,
    SLASHED,
    TAG,
    UPPER,
    YMD,
    Format,
)
from pipeline.sources.times import EPOCH_CLOCK, ISO_CLOCK, Clock

_DAY: Final = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH: Final = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLF: Final = f"(?P<time>[0-9]{{2}}/{_MONTH}/[0-9]{{4}}:{HMS})"
_CLF_CLOCK: Final = Clock(form="%d/%b/%Y:%H:%M:%S")
_DASHED: Final = f"(?P<time>[0-9]{{2}}-{_MONTH}-[0-9]{{4}} {HMS})"  # 20-Nov-2026 10:00:01
_DASHED_CLOCK: Final = Clock(form="%d-%b-%Y %H:%M:%S")
_PRI: Final = "(?:<[0-9]{1,3}>)?"
_SYSLOG_TIME: Final = f"(?:{MONTH_DAY} {HMS}|{YMD}T[^ ]+)"
_REQUEST: Final = '"(?:[^"\\\\]|\\\\.)*"'

_LETTERS: Final[Mapping[str, str]] = {
    "T": "trace", "V": "trace", "D": "debug", "I": "info", "N": "notice", "W": "warning", "E": "error",
    "C": "critical", "F": "fatal",
}  # fmt: skip

_SERVERS: Final = (
    Format(
        name="haproxy",  # HTTP: five timers and a status; TCP: three timers and bytes
        pattern=(
            f"^(?P<host>[0-9A-Fa-f.:]+):[0-9]+ \\[{_CLF}\\.(?P<fraction>[0-9]+)\\] "
            "(?P<message>[^ ]+ [^ ]+/[^ ]+ (?:[0-9+-]+(?:/[0-9+-]+){4} (?P<status>-1|[0-9]{3}) "
            "|[0-9+-]+(?:/[0-9+-]+){2} ).*)$"
        ),
        clock=_CLF_CLOCK,
    ),
    Format(
        name="haproxy-syslog",
        pattern=(
            f"^{_PRI}{_SYSLOG_TIME} (?P<host>[^ :]+) (?P<service>haproxy)\\[(?P<process>[0-9]+)\\]: "
            f"(?P<message>[0-9A-Fa-f.:]+:[0-9]+ \\[{_CLF}\\.(?P<fraction>[0-9]+)\\] "
            "[^ ]+ [^ ]+/[^ ]+ (?:[0-9+-]+(?:/[0-9+-]+){4} (?P<status>-1|[0-9]{3}) "
            "|[0-9+-]+(?:/[0-9+-]+){2} ).*)$"
        ),
        clock=_CLF_CLOCK,
    ),
    Format(
        name="envoy",
        pattern=f"^\\[{ISO_Z}\\] (?P<message>{_REQUEST} (?P<status>[0-9]{{1,3}}) .*)$",
        clock=ISO_CLOCK,
    ),
    Format(
        name="aws-alb",
        pattern=(
            f"^(?:https?|h2|grpcs?|wss?) {ISO_Z} (?P<service>app/[^ ]+) (?P<host>[^ ]+):[0-9]+ "
            "(?P<message>[^ ]+ [0-9.-]+ [0-9.-]+ [0-9.-]+ (?P<status>[0-9]{3}|-) .*)$"
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="aws-elb",
        pattern=(
            f"^{ISO_Z} (?P<service>[^ ]+) (?P<host>[^ ]+):[0-9]+ "
            "(?P<message>[^ ]+:?[^ ]* [0-9.-]+ [0-9.-]+ [0-9.-]+ (?P<status>[0-9]{3}|-) (?:[0-9]{1,3}|-) .*)$"
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="aws-vpc-flow",  # the default format, version 2; `start` is the time
        pattern=(
            "^2 [0-9]{12} (?P<host>eni-[0-9a-f]+) (?P<message>[^ ]+ [^ ]+ [0-9-]+ [0-9-]+ [0-9-]+ "
            "[0-9-]+ [0-9-]+ "
            "(?P<time>1[0-9]{9}) 1[0-9]{9} (?P<level>ACCEPT|REJECT|-) (?P<level_2>OK|NODATA|SKIPDATA))$"
        ),
        clock=EPOCH_CLOCK,
        levels={"ACCEPT": "info", "REJECT": "warning", "OK": "info", "NODATA": "info", "SKIPDATA": "warning"},
    ),
    Format(
        name="aws-s3",
        pattern=(
            f"^[0-9a-f]{{64}} (?P<service>[^ ]+) \\[{_CLF} (?P<zone>[+-][0-9]{{4}})\\] (?P<host>[^ ]+) "
            f"(?P<message>[^ ]+ [^ ]+ [^ ]+ .*?(?:{_REQUEST}|-) (?P<status>[0-9]{{3}}|-) .*)$"
        ),
        clock=_CLF_CLOCK,
    ),
    Format(
        name="squid",
        pattern=(
            "^(?P<time>1[0-9]{9})\\.(?P<fraction>[0-9]{3}) +-?[0-9]+ (?P<host>[^ ]+) "
            "(?P<message>[A-Z_]+/(?P<status>[0-9]{3}) [0-9]+ [A-Z]+ .*)$"
        ),
        clock=EPOCH_CLOCK,
    ),
    Format(
        name="uwsgi",
        pattern=(
            "^\\[pid: (?P<process>[0-9]+)\\|app: [^\\]]+\\] (?P<host>[^ ]+) \\([^)]*\\) \\{[^}]*\\} "
            f"\\[{_DAY} (?P<time>{MONTH_DAY} {HMS}) (?P<year>[0-9]{{4}})\\] "
            "(?P<message>.*?(?:\\(HTTP/[0-9.]+ (?P<status>[0-9]{3})\\).*)?)$"
        ),
        clock=BSD_CLOCK,
    ),
    Format(
        name="access-python",  # http.server and Werkzeug; Django without a client
        pattern=(
            "^(?:(?:INFO:(?P<service>werkzeug):)?(?P<host>[0-9A-Za-z.:_-]+) - - )?"
            f"\\[(?P<time>[0-9]{{2}}/{_MONTH}/[0-9]{{4}} {HMS})\\] "
            f"(?P<message>{_REQUEST} (?P<status>[0-9]{{3}})(?: .*)?)$"
        ),
        clock=Clock(form="%d/%b/%Y %H:%M:%S"),
    ),
    Format(
        name="php",
        pattern=(
            f"^\\[{_DASHED}(?: (?:(?P<zone>[A-Z]{{3,5}})|[A-Z][A-Za-z_]+/[A-Za-z_/+-]+))?\\] "
            "(?:PHP (?P<level>[A-Z][a-z]+)(?: (?:error|Error|code|Standards))?: {1,2}"
            "|(?P<level_2>DEBUG|NOTICE|WARNING|ERROR|ALERT): )?" + ANYTHING
        ),
        clock=_DASHED_CLOCK,
        levels={
            "Fatal": "fatal", "Catchable": "error", "Recoverable": "error", "Parse": "error",
            "Warning": "warning", "Notice": "notice", "Deprecated": "notice", "Strict": "notice",
            "DEBUG": "debug", "NOTICE": "notice", "WARNING": "warning", "ERROR": "error", "ALERT": "critical",
        },
    ),
    Format(
        name="monolog",
        pattern=f"^\\[{ISO_Z}\\] (?P<service>[A-Za-z][A-Za-z0-9_-]*)\\.(?P<level>{UPPER}|EMERGENCY): "
        + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="tomcat",
        pattern=(
            f"^{_DASHED}\\.(?P<fraction>[0-9]{{3}}) (?P<level>[A-Z]+) \\[(?P<process>[^\\]]*)\\] "
            "(?P<service>[^ ]+) " + ANYTHING
        ),
        clock=_DASHED_CLOCK,
        levels={
            "SEVERE": "error", "WARNING": "warning", "INFO": "info", "CONFIG": "debug", "FINE": "debug",
            "FINER": "trace", "FINEST": "trace",
        },
    ),
    Format(
        name="bind",
        pattern=f"^{_DASHED}\\.(?P<fraction>[0-9]{{3}}) (?P<service>[a-z-]+): (?P<level>[a-z]+): " + ANYTHING,
        clock=_DASHED_CLOCK,
    ),
    Format(
        name="samba",
        pattern=(
            f"^\\[{SLASHED}\\.(?P<fraction>[0-9]{{6}}), +(?P<level>[0-9]+)[^\\]]*\\] "
            "(?:[^ ]+/)?(?P<service>[^ :/]+):[0-9]+\\([^)]*\\)\\s*" + ANYTHING
        ),
        clock=SLASH_CLOCK,
        levels={"0": "error", "1": "warning", "2": "notice", "3": "info"}
        | {str(n): "debug" for n in range(4, 11)},
    ),
    Format(
        name="cups",
        pattern=f"^(?P<level>[A-Za-z]) \\[{_CLF} (?P<zone>[+-][0-9]{{4}})\\] " + ANYTHING,
        clock=_CLF_CLOCK,
        levels={"X": "fatal", "A": "critical", "d": "trace"} | dict(_LETTERS),
    ),
)  # fmt: skip

# Lines of numbers, then the database and the time of the statement; the message is the statement.
_SLOW_REST: Final = (
    "(?:\n(?:#|  [A-Z][A-Za-z_]+: )[^\n]*)*(?:\n(?i:use) [^\n]*;)?(?:\nSET timestamp=[0-9]+;[^\n]*)*\\s*"
    + ANYTHING
)
_SLOW_WHO: Final = "[^\n]*(?:\n# User@Host: (?P<service>[^\\[ ]*)[^@\n]* @ +\\[?(?P<host>[^ \\[\\]]*)[^\n]*)?"

_DATABASES: Final = (
    Format(
        name="mysql-slow",  # a record of the same second as the one before has no time
        pattern=(
            f"^# (?:Time: {ISO_Z}{_SLOW_WHO}|User@Host: (?P<logger>[^\\[ ]*)\\[[^\n]*)" + _SLOW_REST
        ),
        clock=ISO_CLOCK,
        block=True,
    ),
    Format(
        name="mysql-slow-old",  # to 5.6, and MariaDB
        pattern=f"^# Time: (?P<time>[0-9]{{6}} {{1,2}}{HMS}){FRACTION}{_SLOW_WHO}" + _SLOW_REST,
        clock=Clock(form="%y%m%d %H:%M:%S"),
        block=True,
    ),
    Format(
        name="mysql-old",  # to 5.6, and MariaDB to 10.1
        pattern=(
            f"^(?P<time>[0-9]{{6}} {{1,2}}{HMS}) {{1,2}}(?:(?P<process>[0-9]+) )?"
            "(?:\\[(?P<level>[A-Z][A-Za-z]+)\\] |(?P<service>mysqld_safe) |(?P<logger>InnoDB): )" + ANYTHING
        ),
        clock=Clock(form="%y%m%d %H:%M:%S"),
    ),
    Format(
        name="postgresql-prefix",  # the prefix that pgBadger asks for
        pattern=(
            f"^{ISO} (?P<zone>[A-Z]{{3,5}}|[+-][0-9]{{2}}(?::?[0-9]{{2}})?) \\[(?P<process>[0-9]+)\\]: "
            "(?:\\[[0-9]+-[0-9]+\\] )?(?:user=(?P<service>[^, ]*)[^ ]* )?"
            "(?P<level>[A-Z]+[1-5]?):  ?" + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="pgbouncer",
        pattern=(
            f"^{ISO} (?P<zone>[A-Z]{{3,5}}|[+-][0-9]{{2}}) \\[(?P<process>[0-9]+)\\] "
            "(?P<level>DEBUG|NOISE|LOG|WARNING|ERROR|FATAL) (?P<message>(?:[CS]-0x[0-9a-f]+: |stats: "
            "|[a-z]).*)$"
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="mongodb-text",  # to 4.2
        pattern=(
            f"^{ISO_Z} (?P<level>[DIWEF])[1-5]? +(?P<service>[A-Z-]+) +\\[(?P<process>[^\\]]+)\\] " + ANYTHING
        ),
        clock=ISO_CLOCK,
        levels=_LETTERS,
    ),
    Format(
        name="mssql",
        pattern=(f"^(?P<time>{YMD} {HMS})\\.(?P<fraction>[0-9]{{2}}) "
        f"(?P<process>spid[0-9]+s?|Server|Logon|Backup) {{2,}}")
        + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="clickhouse",
        pattern=(
            f"^(?P<time>[0-9]{{4}}\\.[0-9]{{2}}\\.[0-9]{{2}} {HMS})\\.(?P<fraction>[0-9]+) "
            "(?:\\[ (?P<process>[0-9]+) \\] )?(?:\\{[^}]*\\} )?<(?P<level>[A-Z][a-z]+)> (?P<service>[^ :]+): "
            + ANYTHING
        ),
        clock=Clock(form="%Y.%m.%d %H:%M:%S"),
    ),
    Format(
        name="cassandra",
        pattern=(
            (f"^(?P<level>[A-Z]+) +\\[(?P<process>[^\\]]*)\\] {ISO} "
            "(?P<service>[A-Za-z0-9_$]+)(?:\\.java)?:[0-9]+ - ")
            + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="kafka",  # the logger stands at the end
        pattern=(
            f"^\\[{ISO}\\] {LEVEL} (?P<message>[^\n]*\\("
            "(?P<service>[a-z][A-Za-z0-9_]*\\.[A-Za-z0-9_.$-]+)\\)(?:\n.*)?)$"
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="ceph",
        pattern=f"^{ISO_Z} (?P<process>[0-9a-f]{{8,16}}) +(?P<level>-?[0-9]{{1,2}}) " + ANYTHING,
        clock=ISO_CLOCK,
        levels={"-1": "error", "0": "info"} | {str(n): "debug" for n in range(1, 21)},
    ),
)  # fmt: skip

_SYSTEMS: Final = (
    Format(
        name="auditd",
        pattern=(
            "^(?:node=(?P<host>[^ ]+) )?type=(?P<service>[A-Z0-9_\\[\\]]+) msg=audit\\((?P<time>[0-9]{10})"
            "\\.(?P<fraction>[0-9]+):[0-9]+\\):(?: |$)"
            "(?P<message>(?:.*?\\b(?:res|success)=(?P<level>failed|no|yes|success|[01])\\b)?.*)$"
        ),
        clock=EPOCH_CLOCK,
        levels={
            "failed": "warning", "no": "warning", "0": "warning",
            "yes": "info", "success": "info", "1": "info",
        },
    ),
    Format(
        name="journal-full",
        pattern=f"^{_DAY} {ISO} (?P<zone>[A-Z]{{2,5}}|[+-][0-9]{{2,4}}) (?P<host>[^ :]+) " + TAG + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="journal-unix",
        pattern=(
            "^(?P<time>1[0-9]{9})\\.(?P<fraction>[0-9]{6}) (?P<host>[^ :]+) "
            "(?P<service>[^ :\\[]{1,128})(?:\\[(?P<process>[0-9]+)\\])?:(?: |$)" + ANYTHING
        ),
        clock=EPOCH_CLOCK,
    ),
    Format(
        name="journal-monotonic",
        pattern=(
            "^\\[ *[0-9]+\\.[0-9]{6}\\] (?P<host>[^ :\\[]+) (?:(?P<service>[^ "
            ":\\[]{1,128})\\[(?P<process>[0-9]+)\\]"
            "|(?P<logger>kernel)):(?: |$)" + ANYTHING
        ),
    ),
    Format(
        name="logread",  # OpenWrt
        pattern=(
            f"^{_DAY} (?P<time>{MONTH_DAY} {HMS}) (?P<year>[0-9]{{4}}) [a-z0-9]+\\."
            "(?P<level>emerg|alert|crit|err|warn|notice|info|debug) "
            "(?P<service>[^ :\\[]{1,128})(?:\\[(?P<process>[0-9]+)\\])?:(?: |$)" + ANYTHING
        ),
        clock=BSD_CLOCK,
    ),
    Format(
        name="cisco",
        pattern=(
            f"^{_PRI}(?:(?:{MONTH_DAY}(?: [0-9]{{4}})? {HMS} )?(?P<host>[0-9A-Za-z_.-]+) )?(?:[0-9]+: )?[*.]?"
            f"(?P<time>{MONTH_DAY} {HMS})(?:\\.(?P<fraction>[0-9]+))?(?: "
            f"(?P<zone>UTC|GMT|[A-Z]E?[SD]?T|[A-Z]{{2}}[SD]T))?(?:: | (?P<logger>[^ :%]+) (?:[0-9]*: "
            ")?)"
            "(?P<service>%[A-Z0-9_]+(?:-[A-Z0-9_]+)*-(?P<pri>[0-7])-[A-Z0-9_]+): ?" + ANYTHING
        ),
        clock=BSD_CLOCK,
    ),
    Format(
        name="cisco-year",
        pattern=(
            f"^{_PRI}(?:[0-9]+: )?[*.]?(?P<time>{MONTH_DAY} [0-9]{{4}} {HMS})(?:\\.(?P<fraction>[0-9]+))?"
            "(?: (?P<zone>UTC|GMT|[A-Z]E?[SD]?T|[A-Z]{2}[SD]T))?(?: (?P<host>[^ :%]+))?(?: ?[0-9]*:)? ?"
            "(?P<service>%[A-Z0-9_]+(?:-[A-Z0-9_]+)*-(?P<pri>[0-7])-[A-Z0-9_]+): ?" + ANYTHING
        ),
        clock=Clock(form="%b %d %Y %H:%M:%S"),
    ),
    Format(
        name="esxi",
        pattern=(
            f"^{ISO_Z} (?P<level>info|warning|error|verbose|trivia|debug|panic) "
            "(?P<service>[A-Za-z][A-Za-z0-9_-]*)\\[(?P<process>[0-9A-Fa-f]+)\\]:? " + ANYTHING
        ),
        clock=ISO_CLOCK,
        levels={
            "info": "info", "warning": "warning", "error": "error", "verbose": "debug", "trivia": "trace",
            "debug": "debug", "panic": "fatal",
        },
    ),
    Format(
        name="macos-log",
        pattern=(
            f"^{ISO_Z} +0x[0-9a-f]+ +(?P<level>Default|Info|Debug|Error|Fault|Activity) +0x[0-9a-f]+ +"
            "(?P<process>[0-9]+) +[0-9]+ +(?P<service>[^:]{1,128}): " + ANYTHING
        ),
        clock=ISO_CLOCK,
        levels={
            "Default": "notice", "Info": "info", "Debug": "debug", "Error": "error", "Fault": "critical",
            "Activity": "info",
        },
    ),
    Format(
        name="fail2ban",
        pattern=(
            f"^{ISO} (?P<service>fail2ban\\.[a-z]+) *\\[(?P<process>[0-9]+)\\]: "
            "(?P<level>[A-Z]+) +" + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="wazuh",
        pattern=(
            (f"^{SLASHED} (?P<service>[a-z][a-z0-9_-]*)(?:\\[(?P<process>[0-9]+)\\] [^ ]+ at [^ ]+)?: "
            f"{LEVEL}: ")
            + ANYTHING
        ),
        clock=SLASH_CLOCK,
    ),
    Format(
        name="suricata-alert",  # also Snort with the year
        pattern=(
            f"^(?P<time>[0-9]{{2}}/[0-9]{{2}}/[0-9]{{4}}-{HMS})\\.(?P<fraction>[0-9]+) +"
            "(?P<message>\\[\\*\\*\\] .*?(?:\\[Priority: (?P<level>[0-9])\\].*)?)$"
        ),
        clock=Clock(form="%m/%d/%Y-%H:%M:%S"),
        levels={"1": "critical", "2": "error", "3": "warning", "4": "notice"},
    ),
    Format(
        name="suricata",
        pattern=(
            "^(?:\\[(?P<process>[0-9]+)\\] )?(?P<time>[0-9]{1,2}/[0-9]{1,2}/[0-9]{4} -- "
            f"{HMS}) - <(?P<level>[A-Z][a-z]+)> - " + ANYTHING
        ),
        clock=Clock(form="%d/%m/%Y -- %H:%M:%S"),
    ),
    Format(
        name="charon",  # strongSwan
        pattern=f"^(?P<time>{MONTH_DAY} {HMS}) (?P<process>[0-9]{{2}})"
        "\\[(?P<service>[A-Z]{3})\\] " + ANYTHING,
        clock=BSD_CLOCK,
    ),
    Format(
        name="syslog-local",  # no host: dnsmasq, Dovecot, Busybox
        pattern=(
            f"^(?P<time>{MONTH_DAY} {HMS}) (?P<service>[A-Za-z][^ :\\[(]{{0,127}})(?:\\([^)]*\\))?"
            "(?:\\[(?P<process>[0-9]+)\\])?: "
            "(?:(?P<level>Debug|Info|Warning|Error|Fatal|Panic): )?" + ANYTHING
        ),
        clock=BSD_CLOCK,
    ),
    Format(
        name="systemd-console",
        pattern=(
            "^(?:\\[(?P<level> {2}OK {2}|FAILED|DEPEND| WARN | INFO | TIME )\\] "
            "| {9}(?P<level_2>Starting|Stopping|Mounting|Unmounting|Activating|Deactivating|"
            "Reloading) )" + ANYTHING
        ),
        levels={
            "  OK  ": "info", "FAILED": "error", "DEPEND": "error", " WARN ": "warning", " INFO ": "info",
            " TIME ": "error",
        } | dict.fromkeys(
            ("Starting", "Stopping", "Mounting", "Unmounting", "Activating", "Deactivating", "Reloading"),
            "info",
        ),
    ),
)  # fmt: skip

# Dates of all countries, at the beginning of a line

_ZONE_NAME: Final = "UTC|GMT|MSK|[A-Z]E?[SD]?T|[A-Z]{2}[SD]T"
_OPEN: Final = "[\\[(<]?"
_CLOSE: Final = f"[\\])>]?(?:[,:|]|[ \t]+[-|])?(?:[ \t]+|$){LEVEL_SOMEHOW}?"
_FRACTION: Final = "(?:[.,](?P<fraction>[0-9]{1,9}))?"
_DAY_2: Final = "(?:0?[1-9]|[12][0-9]|3[01])"
_MONTH_2: Final = "(?:0?[1-9]|1[0-2])"
_CLOCK_TEXT: Final = f",?[ T]{HMS}(?: ?[AaPp]\\.?[Mm]\\.?)?"
_DMY: Final = f"(?P<time>{_DAY_2}[./-]{_MONTH_2}[./-](?:19|20)[0-9]{{2}}{_CLOCK_TEXT})"
_MDY: Final = f"(?P<time>{_MONTH_2}[./-]{_DAY_2}[./-](?:19|20)[0-9]{{2}}{_CLOCK_TEXT})"
_EPOCH: Final = "(?P<time>1[0-9]{9}(?:[0-9]{3}|[0-9]{6}|[0-9]{9})?)(?:\\.(?P<fraction>[0-9]{1,9}))?"
_DMY_CLOCK: Final = Clock(form="%d/%m/%Y %H:%M:%S", loose=True)
_MDY_CLOCK: Final = Clock(form="%m/%d/%Y %H:%M:%S", loose=True)
_RFC2822: Final = (
    f"(?:{_DAY}, +)?(?P<time>[0-9]{{1,2}} {_MONTH} [0-9]{{4}} {HMS})(?: "
    f"(?P<zone>{_ZONE_NAME}|[+-][0-9]{{4}}))?"
)
_RFC2822_CLOCK: Final = Clock(form="%d %b %Y %H:%M:%S")
_CTIME: Final = (
    f"{_DAY} (?P<time>{MONTH_DAY} {HMS}){_FRACTION}(?: (?P<zone>{_ZONE_NAME}))?(?: (?P<year>[0-9]{{4}}))?"
)

_DATES: Final = (
    Format(name="ctime", pattern=f"^{_OPEN}{_CTIME}{_CLOSE}" + ANYTHING, clock=BSD_CLOCK),
    Format(name="rfc-2822", pattern=f"^{_OPEN}{_RFC2822}{_CLOSE}" + ANYTHING, clock=_RFC2822_CLOCK),
    Format(
        name="clf-time",
        pattern=f"^{_OPEN}{_CLF}(?: (?P<zone>[+-][0-9]{{4}}))?{_CLOSE}" + ANYTHING,
        clock=_CLF_CLOCK,
    ),
    Format(name="date-mdy", pattern=f"^{_OPEN}{_MDY}{_FRACTION}{_CLOSE}" + ANYTHING, clock=_MDY_CLOCK),
    Format(name="date-dmy", pattern=f"^{_OPEN}{_DMY}{_FRACTION}{_CLOSE}" + ANYTHING, clock=_DMY_CLOCK),
    Format(
        name="compact",
        pattern=f"^{_OPEN}(?P<time>[0-9]{{8}}[ T]{HMS}){_FRACTION}{OFFSET}{_CLOSE}" + ANYTHING,
        clock=Clock(form="%Y%m%d %H:%M:%S", loose=True),
    ),
)

# A time within the first characters of a line. The message is the whole line.

# A level before the time: nothing in between looks like a time.
_BEFORE: Final = (
    f"^(?P<before>(?:(?:[^:\n]{{0,40}}?[^:\n0-9A-Za-z])?(?P<level_2>{UPPER})[^0-9A-Za-z\n](?:[^:\n"
    f"]{{0,40}}?[^:\n0-9A-Za-z])?"
    "|[^\n]{0,60}?[^\n0-9A-Za-z])?)"
)
_AFTER: Final = (
    f"(?:$|(?:[^0-9A-Za-z.,]|[.,](?:[^0-9]|$))(?:(?:[^\n]{{0,24}}?[^\n"
    f"0-9A-Za-z])??(?:(?P<level>{UPPER})(?:[^0-9A-Za-z]|$)"
    f"|[\\[(<|](?P<level_3>{ANY_CASE})[\\])>|:]))?)(?P<message>)"
)
_NOTATIONS: Final[Mapping[str, tuple[str, Clock]]] = {
    "iso": (ISO_Z, ISO_CLOCK),
    "slashed": (f"(?P<time>[0-9]{{4}}/[0-9]{{2}}/[0-9]{{2}} {HMS}){_FRACTION}", SLASH_CLOCK),
    "ctime": (_CTIME, BSD_CLOCK),
    "rfc-2822": (_RFC2822, _RFC2822_CLOCK),
    "clf": (f"{_CLF}(?: (?P<zone>[+-][0-9]{{4}}))?", _CLF_CLOCK),
    "syslog": (f"(?P<time>{MONTH_DAY} {HMS}){_FRACTION}(?: (?P<year>[0-9]{{4}}))?", BSD_CLOCK),
    "mdy": (_MDY + _FRACTION, _MDY_CLOCK),
    "dmy": (_DMY + _FRACTION, _DMY_CLOCK),
}
_WITHIN: Final = (
    *(
        Format(name=f"within-{name}", pattern=_BEFORE + time + _AFTER, clock=clock, whole=True)
        for name, (time, clock) in _NOTATIONS.items()
    ),
    Format(
        name="within-epoch",
        pattern=f'^(?P<before>[^\n]{{0,60}}?[\\[(<|=,;"\t]){_EPOCH}[\\])>|,;"\t](?P<message>)',
        clock=EPOCH_CLOCK,
        whole=True,
    ),
)

# Little speaks for these, so they come last.
_VAGUE: Final = ("dmesg", "level")
TEXT_FORMATS: Final[tuple[Format, ...]] = (
    *_SERVERS,
    *_DATABASES,
    *_SYSTEMS,
    *APPS,
    *(form for form in BASIC_FORMATS if form.name not in _VAGUE),
    *_DATES,
    *_WITHIN,
    *(form for form in BASIC_FORMATS if form.name in _VAGUE),
)
BY_NAME: Final[Mapping[str, Format]] = {form.name: form for form in (CRI, *TEXT_FORMATS)}
# Ahead of the formats with the same date and the day first.
MONTH_FIRST: Final = frozenset(("date-mdy", "within-mdy"))
# Also a line of pairs, so it comes before these.
BEFORE_PAIRS: Final = ("auditd",)
