"""The declarations of text formats: one entry each, specific before general.

A new format is one more `Format` in `TEXT_FORMATS`, below all formats that are more specific. Patterns are
Rust regular expressions over the whole record (`.` also matches a newline). ASCII classes only: `[0-9]` is
three times as fast as the Unicode class `\\d`.

Named groups: `message` (required); `time`, `fraction`, `millis`, `year`, `zone` (see times.Clock); `level`,
`level_2`, `level_3` (the first that matched), `pri` (syslog priority), `status` (HTTP); `host`, `process`,
`service`, and `logger`, which replaces an empty service."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.sources.times import EPOCH_CLOCK, ISO_CLOCK, Clock

# Lower-case words of any format to the spellings of `records.LEVELS`.
LEVEL_WORDS: Final[Mapping[str, str]] = {
    word: level
    for level, words in {
        "trace": "trace finest finer verbose vrb trc v",
        "debug": "debug dbg fine config d debug1 debug2 debug3 debug4 debug5",
        "info": "info inf information informational log statement detail hint context query i",
        "notice": "notice",
        "warning": "warning warn wrn w",
        "error": "error err severe failed e",
        "critical": "critical crit alert failure",
        "fatal": "fatal ftl panic dpanic emerg emergency f",
    }.items()
    for word in words.split()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One header layout. `unless` takes back lines that `pattern` matches by accident."""

    name: str
    pattern: str
    clock: Clock | None = None
    levels: Mapping[str, str] | None = None  # words as written; None: LEVEL_WORDS, any case
    unless: str = ""

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
        always = "(?P<zone>" in self.pattern and _OFFSET not in self.pattern
        return frozenset(missing if always else {*missing, "zone"})


_YMD = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_HMS = "[0-9]{1,2}:[0-9]{2}:[0-9]{2}"
_FRACTION = "(?:[.,](?P<fraction>[0-9]{1,9}))?"
_OFFSET = "(?: ?(?P<zone>Z|UTC|GMT|[+-][0-9]{2}:?[0-9]{2}))?"
_ISO = f"(?P<time>{_YMD}[T ]{_HMS}){_FRACTION}"
_ISO_Z = _ISO + _OFFSET
_MONTH_DAY = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}[0-9]{1,2}"
_SLASHED = f"(?P<time>[0-9]{{4}}/[0-9]{{2}}/[0-9]{{2}} {_HMS})"
# The remainder of a record; `(?s)` stands before every pattern.
ANYTHING: Final = "(?P<message>.*)$"
_TAIL = ANYTHING
_UPPER = "TRACE|DEBUG|VERBOSE|INFO|NOTICE|WARN|WARNING|ERROR|ERR|SEVERE|CRITICAL|CRIT|ALERT|EMERG|FATAL|PANIC"
_LEVEL = f"(?P<level>{_UPPER})"
_ANY_CASE = f"(?i:{_UPPER}|INFORMATION|EMERGENCY|DBG|INF|WRN|FTL)"
# A bare lower-case word may be the first word of the message, so a mark must follow it.
_LEVEL_SOMEHOW = (
    f"(?:{_LEVEL}[:,|]?(?: -)?(?:[ \t]+|$)|\\[ *(?P<level_2>{_ANY_CASE}) *\\]:?(?: -)?(?:[ \t]+|$)"
    f"|(?P<level_3>{_ANY_CASE})(?:[:|](?:[ \t]+|$)|\t+| [|-][ \t]+))"
)
_BSD_CLOCK = Clock(form="%b %d %H:%M:%S", missing="year")
_SLASH_CLOCK = Clock(form="%Y/%m/%d %H:%M:%S")
_TAG = "(?:(?P<service>[^ :\\[]{1,128})(?:\\[(?P<process>[^\\] ]{0,32})\\]:?|:)(?: |$))?"  # tag[pid]: or tag:

# A container runtime's wrapper around a line. Its absolute time wins over the inner one.
CRI: Final = Format(
    name="cri",
    pattern=(
        f"^(?P<time>{_YMD}T{_HMS})(?:\\.(?P<fraction>[0-9]{{1,9}}))?(?P<zone>Z|[+-][0-9]{{2}}:[0-9]{{2}})"
        " (?:stdout|stderr) [FP](?: |$)" + _TAIL
    ),
    clock=ISO_CLOCK,
)

TEXT_FORMATS: Final[tuple[Format, ...]] = (
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
            f"{_MONTH_DAY} {_HMS} [^ ]+ " + _TAG + _TAIL
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
            f"^<(?P<pri>[0-9]{{1,3}})>[0-9]{{1,2}} (?:{_ISO_Z}|-) (?:-|(?P<host>[^ ]+)) (?:-|(?P<service>[^ "
            "]+)) "
            "(?:-|(?P<process>[^ ]+)) [^ ]+ (?:-(?: |$))?(?:\ufeff)?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="syslog",
        pattern=(
            f"^(?:<(?P<pri>[0-9]{{1,3}})>)?(?P<time>{_MONTH_DAY} {_HMS})(?:\\.(?P<fraction>[0-9]+))?"
            "(?: (?P<year>[0-9]{4}))? (?P<host>[^ :]+) " + _TAG + _TAIL
        ),
        clock=_BSD_CLOCK,
    ),
    Format(
        name="syslog-year",  # network gear with the year configured
        pattern=(
            f"^(?:<(?P<pri>[0-9]{{1,3}})>)?(?P<time>{_MONTH_DAY} [0-9]{{4}} "
            f"{_HMS})(?:\\.(?P<fraction>[0-9]+))? "
            "(?P<host>[^ :]+) (?:: )?" + _TAG + _TAIL
        ),
        clock=Clock(form="%b %d %Y %H:%M:%S"),
    ),
    Format(
        name="syslog-iso",
        pattern=(
            f"^(?:<(?P<pri>[0-9]{{1,3}})>)?(?P<time>{_YMD}T{_HMS})(?:\\.(?P<fraction>[0-9]+))?"
            "(?P<zone>[+-][0-9]{2}:?[0-9]{2}) (?P<host>[^ :]+) "
            "(?P<service>[^ :\\[]{1,128})(?:\\[(?P<process>[^\\] ]{0,32})\\]:?|:)(?: |$)" + _TAIL
        ),
        unless=f"^[^ ]+ (?:\\[|{_ANY_CASE} )",
        clock=ISO_CLOCK,
    ),
    Format(
        name="klog",
        pattern=(
            f"^(?P<level>[IWEF])(?P<time>[0-9]{{4}} {_HMS})\\.(?P<fraction>[0-9]{{6}}) +(?P<process>[0-9]+) "
            "(?P<service>[^ \\]:]+):[0-9]+\\](?: |$)" + _TAIL
        ),
        clock=Clock(form="%m%d %H:%M:%S", missing="year"),
    ),
    Format(
        name="access",
        pattern=(
            "^(?:(?P<service>[^ :]+:[0-9]{1,5}) )?(?P<host>[0-9A-Za-z.:_-]+) [^ ]+ [^\\[]+ "
            f"\\[(?P<time>[0-9]{{2}}/[A-Z][a-z]{{2}}/[0-9]{{4}}:{_HMS}) (?P<zone>[+-][0-9]{{4}})\\] "
            '(?P<message>"(?:[^"\\\\]|\\\\.)*" (?P<status>[0-9]{3})(?: .*)?)$'
        ),
        clock=Clock(form="%d/%b/%Y:%H:%M:%S"),
    ),
    Format(
        name="nginx-error",
        pattern=f"^{_SLASHED} \\[(?P<level>[a-z]+)\\] (?P<process>[0-9]+)#[0-9]+: " + _TAIL,
        clock=_SLASH_CLOCK,
    ),
    Format(
        name="apache-error",
        pattern=(
            f"^\\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<time>{_MONTH_DAY} {_HMS})(?:\\.(?P<fraction>[0-9]+))? "
            "(?P<year>[0-9]{4})\\] \\[(?:[a-z0-9_]+:)?(?P<level>[a-z0-9]+)\\] "
            "(?:\\[pid (?P<process>[0-9]+)(?::tid [0-9]+)?\\] )?(?:\\[client (?P<host>[^\\]]+)\\] )?" + _TAIL
        ),
        clock=_BSD_CLOCK,
    ),
    Format(
        name="postgresql",
        pattern=(
            f"^{_ISO} (?P<zone>[A-Z]{{3,5}}|[+-][0-9]{{2}}(?::?[0-9]{{2}})?) "
            "\\[(?P<process>[0-9]+)(?:-[0-9]+)?\\] "
            "(?:(?P<service>[^ @]+@[^ ]+) )?(?P<level>[A-Z]+[1-5]?):  ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="postgresql-rds",
        pattern=(
            f"^{_ISO} (?P<zone>[A-Z]{{3,5}}):(?P<host>[^:( ]*)(?:\\([0-9]+\\))?:(?P<service>[^: ]*@[^: ]*):"
            "\\[(?P<process>[0-9]+)\\]:(?P<level>[A-Z]+[1-5]?):  ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="mysql",
        pattern=f"^{_ISO_Z} (?P<process>[0-9]+) \\[(?P<level>[A-Z][a-z]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="redis",
        pattern=(
            f"^(?P<process>[0-9]+):[MCSX] (?P<time>[0-9]{{2}} [A-Z][a-z]{{2}} [0-9]{{4}} {_HMS})"
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
            f"^(?:(?P<year>[0-9]{{4}})-)?(?P<time>[0-9]{{2}}-[0-9]{{2}} {_HMS})\\.(?P<fraction>[0-9]{{3,6}}) "
            "+(?P<process>[0-9]+) +[0-9]+ (?P<level>[VDIWEFA]) (?P<service>[^:]*?) *: ?" + _TAIL
        ),
        clock=Clock(form="%m-%d %H:%M:%S", missing="year"),
        levels={
            "V": "trace", "D": "debug", "I": "info", "W": "warning", "E": "error", "F": "fatal", "A": "fatal",
        },
    ),
    Format(
        name="windows-cbs",
        pattern=f"^(?P<time>{_YMD} {_HMS}), (?P<level>[A-Z][a-z]+) +(?P<service>[A-Za-z0-9_]+) +" + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="zookeeper",
        pattern=(
            f"^{_ISO} (?:\\[myid:[^\\]]*\\] )?- (?P<level>[A-Z]+) +"
            "\\[(?P<process>.*?):(?P<service>[A-Za-z_$.0-9]+)@[0-9]+\\] - " + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="skywalking",
        pattern=(
            f"^{_ISO_Z} \\[(?:SW_CTX|TID): "
            "?(?:\\[(?P<service>[^,\\]]*),[^@,\\]]*@?(?P<host>[^,\\]]*)[^\\]]*\\]|[^\\]]*)\\]"
            " \\[(?P<process>.*?)\\] (?P<level>[A-Z]+) +(?P<logger>[^ ]+) - ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="spring-boot",
        pattern=(
            f"^{_ISO_Z} +(?P<level>[A-Z]+) (?:\\[(?P<service>[^,\\]]*)[^\\]]*\\] )?(?P<process>[0-9]+) --- "
            "(?:\\[[^\\]]*\\] ?)+(?P<logger>[^ ]+) *: ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="openstack",
        pattern=(
            f"^{_ISO} (?P<process>[0-9]+) (?P<level>{_UPPER}) (?P<service>[A-Za-z_][A-Za-z0-9_.]*) "
            "(?P<message>\\[.*)$"
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="python",
        pattern=(
            f"^{_ISO} - (?P<service>[^ ]+) - (?:(?P<process>[^ ]+) - )?(?P<level>{_UPPER})(?: -|:) ?" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="gunicorn",
        pattern=f"^\\[{_ISO_Z}\\] \\[(?P<process>[0-9]+)\\] \\[(?P<level>[A-Z]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="celery",
        pattern=f"^\\[{_ISO}: (?P<level>[A-Z]+)/(?P<process>[^\\] ]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="elasticsearch",
        pattern=(
            f"^\\[{_ISO_Z}\\]\\[(?P<level>[A-Z]+) *\\]\\[(?P<service>[^ \\]]+) *\\] "
            "(?:\\[(?P<host>[^\\]]+)\\] ?)?"
            + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="env-logger",
        pattern=f"^\\[{_ISO_Z} +(?P<level>[A-Z]+) +(?P<service>[^ \\]]+)\\] " + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="log4j",
        pattern=(
            f"^\\[?{_ISO_Z}\\]? +(?:{_LEVEL}|\\[ *(?P<level_2>{_UPPER}) *\\]) +\\[(?P<process>[^\\]]*)\\]"
            " +(?P<service>[A-Za-z_$][^ ]*?)(?::| -)(?: |$)" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="log4j-class",
        # a dotted name is a logger; a plain word may begin the message
        pattern=(
            f"^{_ISO_Z} +{_LEVEL} "
            "+(?P<service>(?:[A-Za-z_$][A-Za-z0-9_$]*\\.)+[A-Za-z0-9_$]+)(?::[0-9]+)?(?::| -)(?: |$)"
            + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="logback",
        pattern=(
            f"^{_ISO_Z} +\\[(?P<process>[^\\]]*)\\] +{_LEVEL} +"
            "(?P<service>[A-Za-z_$][^ ]*?)(?: -|:)(?: |$)" + _TAIL
        ),
        clock=ISO_CLOCK,
    ),
    Format(
        name="logback-time",
        pattern=(
            f"^(?P<time>{_HMS})[.,](?P<fraction>[0-9]{{3}}) +\\[(?P<process>[^\\]]*)\\] +{_LEVEL} +"
            "(?P<service>[A-Za-z_$][^ ]*?)(?: -|:)(?: |$)" + _TAIL
        ),
        clock=Clock(form="%H:%M:%S", missing="date"),
    ),
    Format(
        name="spark",
        pattern=f"^(?P<time>[0-9]{{2}}/[0-9]{{2}}/[0-9]{{2}} {_HMS}) {_LEVEL} (?P<service>[^ :]+): ?" + _TAIL,
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
        pattern=f"^{_SLASHED}(?:\\.(?P<fraction>[0-9]{{6}}))? {_LEVEL_SOMEHOW}?" + _TAIL,
        clock=_SLASH_CLOCK,
    ),
    Format(
        name="iso",
        # `[time] LEVEL text`, `time - LEVEL - text`, `time LEVEL text`, `time text`
        pattern=f"^\\[?{_ISO_Z}\\]?(?:[,:|]|[ \t]+[-|])?(?:[ \t]+|$){_LEVEL_SOMEHOW}?" + _TAIL,
        clock=ISO_CLOCK,
    ),
    Format(
        name="epoch",
        pattern="^(?P<time>1[0-9]{9})(?:\\.(?P<fraction>[0-9]{1,9}))?(?: +|$)" + _TAIL,
        clock=EPOCH_CLOCK,
    ),
    Format(name="dmesg", pattern="^\\[ *[0-9]+\\.[0-9]{6}\\] " + _TAIL),
    Format(
        name="level",
        pattern=(f"^(?:{_LEVEL}(?::|\\||  ?-| )|\\[ *(?P<level_2>{_ANY_CASE}) *\\]:?)(?: +|$)?" + _TAIL),
    ),
)  # fmt: skip

BY_NAME: Final[Mapping[str, Format]] = {f.name: f for f in (CRI, *TEXT_FORMATS)}
