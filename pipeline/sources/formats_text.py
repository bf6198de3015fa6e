"""The declarations of text formats: one entry each, specific before general.

A new format is one more `Format`, here or in a table of `formats_text_more`, below all formats that are more
specific. Patterns are Rust regular expressions over the whole record (`.` also matches a newline). ASCII
classes only: `[0-9]` is three times as fast as the Unicode class `\\d`.

Named groups: `message` (required); `time`, `fraction`, `millis`, `year`, `zone` (see times.Clock); `level`,
`level_2`, `level_3` (the first that matched), `pri` (syslog priority), `status` (HTTP); `host`, `process`,
`service`, and `logger`, which replaces an empty service."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.sources.times import EPOCH_CLOCK, ISO_CLOCK, Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One header layout. `unless` takes back lines that `pattern` matches by accident.

    The message of a `whole` format is the line as it is, and its pattern has a group `before`. Of most lines
    `usual` gives the groups of `pattern`, and it matches no other line. No character of a line leaves it two
    ways to go on, so the regex engine captures in one pass, five times as fast."""

    name: str
    pattern: str
    usual: str = ""
    clock: Clock | None = None
    levels: Mapping[str, str] | None = None  # words as written; None: records.LEVEL_WORDS, any case
    unless: str = ""
    whole: bool = False
    block: bool = False  # the lines up to the next header belong to a record, whatever they say

    @property
    def head(self) -> str:
        """The pattern up to the message; a match begins a record."""
        return self.pattern.partition("(?P<message>")[0]

    @property
    def guesses(self) -> frozenset[str]:
        """Parts of the time, of `year`, `date` and `zone`, that a line may leave out."""
        if self.clock is None or not self.clock.form:
            return frozenset()
        missing: set[str] = {self.clock.missing} if self.clock.missing else set()
        always = "(?P<zone>" in self.pattern and OFFSET not in self.pattern
        return frozenset(missing if always else {*missing, "zone"})


YMD = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
HMS = "[0-9]{1,2}:[0-9]{2}:[0-9]{2}"
FRACTION = "(?:[.,](?P<fraction>[0-9]{1,9}))?"
OFFSET = "(?: ?(?P<zone>Z|UTC|GMT|[+-][0-9]{2}:?[0-9]{2}))?"
ISO = f"(?P<time>{YMD}[T ]{HMS}){FRACTION}"
ISO_Z = ISO + OFFSET
MONTH_DAY = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}[0-9]{1,2}"
SLASHED = f"(?P<time>[0-9]{{4}}/[0-9]{{2}}/[0-9]{{2}} {HMS})"
# The remainder of a record; `(?s)` stands before every pattern.
ANYTHING: Final = "(?P<message>.*)$"
_TAIL = ANYTHING
# Also as log15 and go-logging spell them, and in other languages.
UPPER = (
    "TRACE|DEBUG|DBUG|VERBOSE|INFO|NOTICE|WARN|WARNING|ERROR|ERR|ERRO|EROR|SEVERE|CRITICAL|CRIT|"
    "ALERT|EMERG|FATAL"
    "|PANIC|FEHLER|SCHWERWIEGEND|WARNUNG|ERREUR|AVERTISSEMENT|ERRORE"
)
LEVEL = f"(?P<level>{UPPER})"
ANY_CASE = f"(?i:{UPPER}|INFORMATION|EMERGENCY|DBG|INF|WRN|FTL)"
# A bare lower-case word may be the first word of the message, so a mark must follow it.
LEVEL_SOMEHOW = (
    f"(?:{LEVEL}[:,|]?(?: -)?(?:[ \t]+|$)|\\[ *(?P<level_2>{ANY_CASE}) *\\]:?(?: -)?(?:[ \t]+|$)"
    f"|(?P<level_3>{ANY_CASE})(?:[:|](?:[ \t]+|$)|\t+| [|-][ \t]+))"
)
BSD_CLOCK = Clock(form="%b %d %H:%M:%S", missing="year")
SLASH_CLOCK = Clock(form="%Y/%m/%d %H:%M:%S")
TAG = "(?:(?P<service>[^ :\\[]{1,128})(?:\\[(?P<process>[^\\] ]{0,32})\\]:?|:)(?: |$))?"  # tag[pid]: or tag:

# A container runtime's wrapper around a line. Its absolute time wins over the inner one.
CRI: Final = Format(
    name="cri",
    pattern=(
        f"^(?P<time>{YMD}T{HMS})(?:\\.(?P<fraction>[0-9]{{1,9}}))?(?P<zone>Z|[+-][0-9]{{2}}:[0-9]{{2}})"
        " (?:stdout|stderr) [FP](?: |$)" + _TAIL
    ),
    clock=ISO_CLOCK,
)

BASIC_FORMATS: Final[tuple[Format, ...]] = (
    Format(
        name="bgl",
        # An alert label may come first. The label is the ground truth, so no group captures it.
        pattern=(
            "^(?:(?:-|[A-Z][A-Z0-9_]*) )?(?P<time>[0-9]{9,10}) [0-9]{4}\\.[0-9]{2}\\.[0-9]{2} (?P<host>[^ "
            "]+) "
            "[0-9]{4}-[0-9]{2}-[0-9]{2}-[0-9]{2}\\.[0-9]{2}\\.[0-9]{2}\\.(?P<fraction>[0-9]+) [^ ]+ "
            "(?P<service>[^ ]+ [^ ]+) (?P<level>[A-Z]+)(?: |$)" + _TAIL
        ),
        clock=EPOCH_CLOCK,
    ),
    Format(
        name="thunderbird",
        pattern=(
            "^(?:(?:-|[A-Z][A-Z0-9_]*) )?(?P<time>[0-9]{9,10}) [0-9]{4}\\.[0-9]{2}\\.[0-9]{2} (?P<host>[^ "
            "]+) "
            f"{MONTH_DAY} {HMS} [^ ]+ " + TAG + _TAIL
        ),
        clock=EPOCH_CLOCK,
    ),
    Format(
        name="hdfs",
        pattern="^(?P<time>[0-9]{6} [0-9]{6}) (?P<process>[0-9]+) (?P<level>[A-Z]+) (?P<service>[^ :]+): ?"
        + _TAIL,
        clock=Clock(form="%y%m%d %H%M%S"),
    ),
    Format(
        name="hpc",
        pattern=(
            "^[0-9]+ (?P<host>[^ ]+) (?P<service>[^ ]+ [^ ]+) (?P<time>[0-9]{9,10}) -?[0-9]+(?: |$)" + _TAIL
        ),
        clock=EPOCH_CLOCK,
    ),
    Format(
        name="syslog-5424",
        pattern=(
            f"^<(?P<pri>[0-9]{{1,3}})>[0-9]{{1,2}} (?:{ISO_Z}|-) (?:-|(?P<host>[^ ]+)) (?:-|(?P<service>[^ "
            "]+)) "
            "(?:-|(?P<process>[^ ]+)) [^ ]+ (?:-(?: |$))?(?:\ufeff)?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="syslog",
        pattern=(
            f"^(?:<(?P<pri>[0-9]{{1,3}})>)?(?P<time>{MONTH_DAY} {HMS})(?:\\.(?P<fraction>[0-9]+))?"
            "(?: (?P<year>[0-9]{4}))? (?P<host>[^ :]+) " + TAG + _TAIL
        ),
        clock=BSD_CLOCK,
    ),
    Format(
        name="syslog-year",  # network gear with the year configured
        pattern=(
            f"^(?:<(?P<pri>[0-9]{{1,3}})>)?(?P<time>{MONTH_DAY} [0-9]{{4}} "
            f"{HMS})(?:\\.(?P<fraction>[0-9]+))? "
            "(?P<host>[^ :]+) (?:: )?" + TAG + _TAIL
        ),
        clock=Clock(form="%b %d %Y %H:%M:%S"),
    ),
    Format(
        name="syslog-iso",
        pattern=(
            f"^(?:<(?P<pri>[0-9]{{1,3}})>)?(?P<time>{YMD}T{HMS})(?:\\.(?P<fraction>[0-9]+))?"
            "(?P<zone>[+-][0-9]{2}:?[0-9]{2}) (?P<host>[^ :]+) "
            "(?P<service>[^ :\\[]{1,128})(?:\\[(?P<process>[^\\] ]{0,32})\\]:?|:)(?: |$)" + _TAIL
        ),
        unless=f"^[^ ]+ (?:\\[|{ANY_CASE} )",
        clock=ISO_CLOCK,
    ),
    Format(
        name="klog",
        pattern=(
            f"^(?P<level>[IWEF])(?P<time>[0-9]{{4}} {HMS})\\.(?P<fraction>[0-9]{{6}}) +(?P<process>[0-9]+) "
            "(?P<service>[^ \\]:]+):[0-9]+\\](?: |$)" + _TAIL
        ),
        clock=Clock(form="%m%d %H:%M:%S", missing="year"),
    ),
    Format(
        name="access",
        pattern=(
            "^(?:(?P<service>[^ :]+:[0-9]{1,5}) )?(?P<host>[0-9A-Za-z.:_-]+) [^ ]+ [^\\[]+ "
            f"\\[(?P<time>[0-9]{{2}}/[A-Z][a-z]{{2}}/[0-9]{{4}}:{HMS}) (?P<zone>[+-][0-9]{{4}})\\] "
            '(?P<message>"(?:[^"\\\\]|\\\\.)*" (?P<status>[0-9]{3})(?: .*)?)$'
        ),
        clock=Clock(form="%d/%b/%Y:%H:%M:%S"),
    ),
    Format(
        name="nginx-error",
        pattern=f"^{SLASHED} \\[(?P<level>[a-z]+)\\] (?P<process>[0-9]+)#[0-9]+: " + _TAIL,
        clock=SLASH_CLOCK,
    ),
    Format(
        name="apache-error",
        pattern=(
            f"^\\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<time>{MONTH_DAY} {HMS})(?:\\.(?P<fraction>[0-9]+))? "
            "(?P<year>[0-9]{4})\\] \\[(?:[a-z0-9_]+:)?(?P<level>[a-z0-9]+)\\] "
            "(?:\\[pid (?P<process>[0-9]+)(?::tid [0-9]+)?\\] )?(?:\\[client (?P<host>[^\\]]+)\\] )?" + _TAIL
        ),
        clock=BSD_CLOCK,
    ),
    Format(
        name="postgresql",
        pattern=(
            f"^{ISO} (?P<zone>[A-Z]{{3,5}}|[+-][0-9]{{2}}(?::?[0-9]{{2}})?) "
            "\\[(?P<process>[0-9]+)(?:-[0-9]+)?\\] "
            "(?:(?P<service>[^ @]+@[^ ]+) )?(?P<level>[A-Z]+[1-5]?):  ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="postgresql-rds",
        pattern=(
            f"^{ISO} (?P<zone>[A-Z]{{3,5}}):(?P<host>[^:( ]*)(?:\\([0-9]+\\))?:(?P<service>[^: ]*@[^: ]*):"
            "\\[(?P<process>[0-9]+)\\]:(?P<level>[A-Z]+[1-5]?):  ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="mysql",
        pattern=(f"^(?P<time>{YMD}[T ] ?{HMS}){FRACTION}{OFFSET} (?P<process>[0-9]+) "
        "\\[(?P<level>[A-Z][A-Za-z]+)\\] ") + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="redis",
        pattern=(
            f"^(?P<process>[0-9]+):[MCSX] (?P<time>[0-9]{{2}} [A-Z][a-z]{{2}} [0-9]{{4}} {HMS})"
            "\\.(?P<fraction>[0-9]{3}) (?P<level>[.*#-]) " + _TAIL
        ),
        clock=Clock(form="%d %b %Y %H:%M:%S"),
        levels={".": "debug", "-": "info", "*": "notice", "#": "warning"},
    ),
    Format(
        name="healthapp",
        pattern=(
            "^(?P<time>[0-9]{8}-[0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}):(?P<millis>[0-9]{1,3})\\|"
            "(?P<service>[^|]*)\\|(?P<process>[^|]*)\\|" + _TAIL
        ),
        clock=Clock(form="%Y%m%d-%H:%M:%S"),
    ),
    Format(
        name="android",
        pattern=(
            f"^(?:(?P<year>[0-9]{{4}})-)?(?P<time>[0-9]{{2}}-[0-9]{{2}} {HMS})\\.(?P<fraction>[0-9]{{3,6}}) "
            "+(?P<process>[0-9]+) +[0-9]+ (?P<level>[VDIWEFA]) (?P<service>[^:]*?) *: ?" + _TAIL
        ),
        clock=Clock(form="%m-%d %H:%M:%S", missing="year"),
        levels={
            "V": "trace", "D": "debug", "I": "info", "W": "warning", "E": "error", "F": "fatal", "A": "fatal",
        },
    ),
    Format(
        name="windows-cbs",
        pattern=f"^(?P<time>{YMD} {HMS}), (?P<level>[A-Z][a-z]+) +(?P<service>[A-Za-z0-9_]+) +" + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="zookeeper",
        pattern=(
            f"^{ISO} (?:\\[myid:[^\\]]*\\] )?- (?P<level>[A-Z]+) +"
            "\\[(?P<process>.*?):(?P<service>[A-Za-z_$.0-9]+)@[0-9]+\\] - " + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="skywalking",
        pattern=(
            f"^{ISO_Z} \\[(?:SW_CTX|TID): "
            "?(?:\\[(?P<service>[^,\\]]*),[^@,\\]]*@?(?P<host>[^,\\]]*)[^\\]]*\\]|[^\\]]*)\\]"
            " \\[(?P<process>.*?)\\] (?P<level>[A-Z]+) +(?P<logger>[^ ]+) - ?" + _TAIL
        ),
        usual=(
            f"^{ISO} \\[(?:SW_CTX|TID): ?\\[(?P<service>[^,\\]]*),[^@,\\]]*@(?P<host>[^,\\]]*),[^\\]]*\\]\\]"
            " \\[(?P<process>[^\\]]*)\\] (?P<level>[A-Z]+) +(?P<logger>[^ ]+) - ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="spring-boot",
        pattern=(
            f"^{ISO_Z} +(?P<level>[A-Z]+) (?:\\[(?P<service>[^,\\]]*)[^\\]]*\\] )?(?P<process>[0-9]+) --- "
            "(?:\\[[^\\]]*\\] ?)+(?P<logger>[^ ]+) *: ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="openstack",
        pattern=(
            f"^{ISO} (?P<process>[0-9]+) (?P<level>{UPPER}) (?P<service>[A-Za-z_][A-Za-z0-9_.]*) "
            "(?P<message>\\[.*)$"
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="python",
        pattern=(
            f"^{ISO} - (?P<service>[^ ]+) - (?:(?P<process>[^ ]+) - )?(?P<level>{UPPER})(?: -|:) ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="gunicorn",
        pattern=f"^\\[{ISO_Z}\\] \\[(?P<process>[0-9]+)\\] \\[(?P<level>[A-Z]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="celery",
        pattern=f"^\\[{ISO}: (?P<level>[A-Z]+)/(?P<process>[^\\] ]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="elasticsearch",
        pattern=(
            f"^\\[{ISO_Z}\\]\\[(?P<level>[A-Z]+) *\\]\\[(?P<service>[^ \\]]+) *\\] "
            "(?:\\[(?P<host>[^\\]]+)\\] ?)?"
            + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="env-logger",
        pattern=f"^\\[{ISO_Z} +(?P<level>[A-Z]+) +(?P<service>[^ \\]]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="log4j",
        pattern=(
            f"^\\[?{ISO_Z}\\]? +(?:{LEVEL}|\\[ *(?P<level_2>{UPPER}) *\\]) +\\[(?P<process>[^\\]]*)\\]"
            " +(?P<service>[A-Za-z_$][^ ]*?)(?::| -)(?: |$)" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="log4j-class",
        # a dotted name is a logger; a plain word may begin the message
        pattern=(
            f"^{ISO_Z} +{LEVEL} "
            "+(?P<service>(?:[A-Za-z_$][A-Za-z0-9_$]*\\.)+[A-Za-z0-9_$]+)(?::[0-9]+)?(?::| -)(?: |$)"
            + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="logback",
        pattern=(
            f"^{ISO_Z} +\\[(?P<process>[^\\]]*)\\] +{LEVEL} +"
            "(?P<service>[A-Za-z_$][^ ]*?)(?: -|:)(?: |$)" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="logback-time",
        pattern=(
            f"^(?P<time>{HMS})[.,](?P<fraction>[0-9]{{3}}) +\\[(?P<process>[^\\]]*)\\] +{LEVEL} +"
            "(?P<service>[A-Za-z_$][^ ]*?)(?: -|:)(?: |$)" + _TAIL
        ),
        clock=Clock(form="%H:%M:%S", missing="date"),
    ),
    Format(
        name="spark",
        pattern=f"^(?P<time>[0-9]{{2}}/[0-9]{{2}}/[0-9]{{2}} {HMS}) {LEVEL} (?P<service>[^ :]+): ?" + _TAIL,
        clock=Clock(form="%y/%m/%d %H:%M:%S"),
    ),
    Format(
        name="python-basic",
        pattern=(
            "^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):(?P<service>[A-Za-z_][A-Za-z0-9_.-]*):" + _TAIL
        ),
    ),
    Format(
        name="go",
        pattern=f"^{SLASHED}(?:\\.(?P<fraction>[0-9]{{6}}))? {LEVEL_SOMEHOW}?" + _TAIL,
        clock=SLASH_CLOCK,
    ),
    Format(
        name="iso",
        # `[time] LEVEL text`, `time - LEVEL - text`, `time LEVEL text`, `time text`
        pattern=f"^[\\[(<]?{ISO_Z}[\\])>]?(?:[,:|]|[ \t]+[-|])?(?:[ \t]+|$){LEVEL_SOMEHOW}?" + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="epoch",
        # seconds, milli-, micro- or nanoseconds
        pattern=(
            "^[\\[(]?(?P<time>1[0-9]{9}(?:[0-9]{3}|[0-9]{6}|[0-9]{9})?)(?:\\."
            "(?P<fraction>[0-9]{1,9}))?[\\])]?:?"
            f"(?:[ \t|,;]+|$){LEVEL_SOMEHOW}?" + _TAIL
        ),
        clock=EPOCH_CLOCK,
    ),
    Format(name="dmesg", pattern="^(?:<(?P<pri>[0-9]{1,3})>)?\\[ *[0-9]+\\.[0-9]{6}\\] " + _TAIL),
    Format(
        name="level",
        pattern=(
            f"^(?:{LEVEL}(?::|\\||  ?-| )|\\[ *(?P<level_2>{ANY_CASE}) *\\]:?"
            # logrus on a terminal, with seconds since its start
            "|(?P<level_3>TRAC|DEBU|INFO|WARN|ERRO|FATA|PANI)\\[[0-9]{4,}\\])(?: +|$)?" + _TAIL
        ),
    ),
)  # fmt: skip

# Applications, and the loggers of languages

_DAY: Final = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH: Final = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_TIME_OF_DAY: Final = f"(?P<time>{HMS})[.,](?P<fraction>[0-9]{{3}})"
_DAY_CLOCK: Final = Clock(form="%H:%M:%S", missing="date")
_LETTERS: Final[Mapping[str, str]] = {
    "T": "trace", "V": "trace", "D": "debug", "I": "info", "N": "notice", "W": "warning", "E": "error",
    "C": "critical", "F": "fatal", "A": "info",
}  # fmt: skip

APPS: Final = (
    Format(
        name="java-logging",  # SimpleFormatter of java.util.logging: the level begins the second line
        pattern=(
            f"^(?P<time>{_MONTH} [0-9]{{1,2}}, [0-9]{{4}} {HMS} [AP]M) (?P<service>[A-Za-z_$][^ \n"
            "]*)(?: [^\n]+)?"
            "(?:\n(?P<level>SEVERE|WARNING|INFO|CONFIG|FINE|FINER|FINEST): )?" + ANYTHING
        ),
        clock=Clock(form="%b %d, %Y %I:%M:%S %p"),
        block=True,
    ),
    Format(
        name="ruby",  # Logger of Ruby, and so Rails
        pattern=(
            f"^(?P<level>[DIWEFA]), \\[(?P<time>{YMD}T{HMS})(?:\\.(?P<fraction>[0-9]+))? "
            "#(?P<process>[0-9]+)\\] +"
            "[A-Z]+ -- (?P<service>[^:]*): ?" + ANYTHING
        ),
        clock=ISO_CLOCK,
        levels=_LETTERS,
    ),
    Format(
        name="sidekiq",
        pattern=(
            f"^{ISO_Z} (?:pid=)?(?P<process>[0-9]+) (?:tid=|TID-)[^ ]+ "
            "(?:(?:class=)?(?P<service>[A-Z][^ =]*) )?"
            f"(?:[^ ]+[=-][^ ]+ )*{LEVEL}: " + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="glog",
        pattern=(
            f"^(?P<level>[IWEF])(?P<time>[0-9]{{8}} {HMS})\\.(?P<fraction>[0-9]{{6}}) +(?P<process>[0-9]+) "
            "(?P<service>[^ \\]:]+):[0-9]+\\](?: |$)" + ANYTHING
        ),
        clock=Clock(form="%Y%m%d %H:%M:%S"),
    ),
    Format(
        name="tensorflow",
        pattern=f"^{ISO}: (?P<level>[IWEF]) (?P<service>[^ \\]:]+):[0-9]+\\] " + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="chromium",
        pattern=(
            "^\\[(?P<process>[0-9]+)(?::[0-9]+)?:(?P<time>[0-9]{4}/[0-9]{6})\\.(?P<fraction>[0-9]{6}):"
            "(?P<level>[A-Z]+)[0-9]*:(?P<service>[^ (\\]]+)\\([0-9]+\\)\\] " + ANYTHING
        ),
        clock=Clock(form="%m%d/%H%M%S", missing="year"),
    ),
    Format(
        name="zap",  # console encoder: tabs, a logger and a caller
        pattern=(
            (f"^{ISO_Z}\t(?P<level>[A-Za-z]+)\t(?:(?P<service>[^\t]+)\t)?(?P<logger>[^\t "
            "]+\\.go):[0-9]+\t") + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="capnslog",
        pattern=f"^{ISO} (?P<level>[CEWNIDT]) \\| (?P<service>[^ :]+): " + ANYTHING,
        clock=ISO_CLOCK,
        levels=_LETTERS,
    ),
    Format(
        name="rust-tracing",
        pattern=(
            (f"^{ISO_Z} +{LEVEL} (?:ThreadId\\([0-9]+\\) "
            ")?(?P<service>[a-z_][a-z0-9_]*(?:::[A-Za-z0-9_]+)+): ") + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="wildfly",  # also Quarkus and Keycloak
        pattern=f"^{ISO} {LEVEL} +\\[(?P<service>[A-Za-z_][^ \\]]*)\\] \\((?P<process>[^)]*)\\) " + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="wildfly-console",
        pattern=(
            f"^{_TIME_OF_DAY} {LEVEL} +\\[(?P<service>[A-Za-z_][^ \\]]*)\\] "
            "\\((?P<process>[^)]*)\\) " + ANYTHING
        ),
        clock=_DAY_CLOCK,
    ),
    Format(
        name="home-assistant",
        pattern=f"^{ISO} {LEVEL} \\((?P<process>[^)]*)\\) \\[(?P<service>[^ \\]]+)\\] " + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="jenkins",
        pattern=f"^{ISO_Z} \\[id=(?P<process>[0-9]+)\\]\t(?P<level>[A-Z]+)"
        "\t(?P<service>[^ :]+): ?" + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="jvm",  # unified logging, such as that of the garbage collector
        pattern=(
            f"^\\[{ISO_Z}\\](?:\\[[0-9.,]+s\\])?(?:\\[(?P<process>[0-9]+)\\])?"
            "(?:\\[[0-9]+\\])?\\[(?P<level>trace|debug|info|warning|error) "
            "*\\]\\[(?P<service>[a-z+,0-9-]+) *\\] ?"
            + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="airflow",
        pattern=f"^\\[{ISO_Z}\\] \\{{(?P<service>[^}}:]+):[0-9]+\\}} {LEVEL} - " + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="scrapy",
        pattern=f"^{ISO} \\[(?P<service>[A-Za-z_][A-Za-z0-9_.]*)\\] {LEVEL}: " + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="salt",
        pattern=(
            (f"^{ISO} \\[(?P<service>[A-Za-z_][A-Za-z0-9_.]*) *:[0-9]+ *\\]\\[(?P<level>[A-Z]+) "
            "*\\](?:\\[(?P<process>[0-9]+)\\])? ")
            + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="erlang-report",
        pattern=(
            f"^=(?P<level>[A-Z]+) REPORT==== (?P<time>[0-9]{{1,2}}-{_MONTH}-[0-9]{{4}}::{HMS})"
            "(?:\\.(?P<fraction>[0-9]+))? ===\\s*" + ANYTHING
        ),
        clock=Clock(form="%d-%b-%Y::%H:%M:%S"),
        levels={
            "CRASH": "critical", "ERROR": "error", "SUPERVISOR": "error", "WARNING": "warning",
            "INFO": "info", "PROGRESS": "info", "NOTICE": "notice", "DEBUG": "debug",
            "CRITICAL": "critical", "ALERT": "critical", "EMERGENCY": "fatal",
        },
    ),
    Format(
        name="elixir",
        pattern=(
            (f"^{_TIME_OF_DAY} (?:[a-z_]+=[^ ]+ )*\\[(?P<level>debug|info|notice|warn|warning|error|"
            "critical|alert|emergency)\\] +")
            + ANYTHING
        ),
        clock=_DAY_CLOCK,
    ),
    Format(
        name="minecraft",
        pattern=(f"^\\[(?P<time>{HMS})\\] \\[(?P<process>[^\\]/]+)/{LEVEL}\\](?: "
        "\\[(?P<service>[^\\]]+)\\])?: ") + ANYTHING,
        clock=_DAY_CLOCK,
    ),
    Format(
        name="pino-pretty",
        pattern=(
            f"^\\[{_TIME_OF_DAY}\\] {LEVEL} \\((?:(?P<service>[^/)]+)/)?(?P<process>[0-9]+)"
            "(?: on (?P<host>[^)]+))?\\): " + ANYTHING
        ),
        clock=_DAY_CLOCK,
    ),
    Format(
        name="nest",
        pattern=(
            "^\\[Nest\\] (?P<process>[0-9]+) +- (?P<time>[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}, "
            "[0-9]{1,2}:[0-9]{2}:[0-9]{2} [AP]M) +"
            "(?P<level>LOG|ERROR|WARN|DEBUG|VERBOSE|FATAL) (?:\\[(?P<service>[^\\]]+)\\] )?" + ANYTHING
        ),
        clock=Clock(form="%m/%d/%Y, %I:%M:%S %p"),
    ),
    Format(
        name="dotnet",
        pattern=("^(?P<level>trce|dbug|info|warn|fail|crit): "
        "(?P<service>[A-Za-z_][A-Za-z0-9_.]*)\\[[0-9]+\\]\\s*") + ANYTHING,
        levels={
            "trce": "trace", "dbug": "debug", "info": "info", "warn": "warning",
            "fail": "error", "crit": "critical",
        },
    ),
    Format(
        name="asterisk",
        pattern=(
            f"^\\[{ISO}\\] (?P<level>VERBOSE|DEBUG|NOTICE|WARNING|ERROR|DTMF|SECURITY)\\["
            "(?P<process>[0-9]+)\\]"
            "(?:\\[[^\\]]+\\])?:? (?P<service>[^ :]+)(?::[0-9]+)?(?: [A-Za-z0-9_]+)?: " + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="lambda",
        pattern=f"^{ISO_Z}\t(?P<process>[0-9a-f-]{{36}})\t{LEVEL}\t" + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="heroku",
        pattern=f"^{ISO_Z} (?P<host>[a-z][a-z0-9-]*)\\[(?P<service>[^\\]]+)\\]: ?" + ANYTHING,
        clock=ISO_CLOCK,
    ),
    Format(
        name="pipes",  # NLog, Loguru
        pattern=(
            (f"^{ISO_Z} *\\| *(?P<level>{ANY_CASE}) *\\| "
            "*(?:(?P<service>[A-Za-z_][A-Za-z0-9_.$:<>/-]*)(?: *\\| *| - ))?")
            + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="level-time",  # Dropwizard, Django, CouchDB
        pattern=(
            (f"^(?:{LEVEL}:?|\\[ *(?P<level_2>{ANY_CASE}) *\\])[ \t]+[\\[(]?{ISO_Z}[\\])]?:?(?: "
            "-)?(?:[ \t]+|$)")
            + ANYTHING
        ),
        clock=ISO_CLOCK,
    ),
)  # fmt: skip
