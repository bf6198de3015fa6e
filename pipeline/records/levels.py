"""The severities of log lines."""

from collections.abc import Mapping
from typing import Any, Final

# One spelling per severity, lowest first; formats map their own words to these.
LEVELS: Final = ("trace", "debug", "info", "notice", "warning", "error", "critical", "fatal")
ERROR_LEVELS: Final = frozenset({"error", "critical", "fatal"})
# Lower-case words of any format to the spellings of LEVELS.
LEVEL_WORDS: Final[Mapping[str, str]] = {
    word: level
    for level, words in {
        "trace": "trace trac finest finer verbose vrb trc v",
        "debug": "debug dbg dbug debu fine config d debug1 debug2 debug3 debug4 debug5",
        "info": (
            "info inf information informational note system log statement detail hint context query i infos"
        ),
        "notice": "notice hinweis",
        "warning": "warning warn wrn w warnung avertissement attention advertencia",
        "error": "error err severe failed e erro eror fehler schwerwiegend erreur errore grave",
        "critical": "critical crit alert failure",
        "fatal": "fatal ftl fata panic pani panik dpanic emerg emergency f",
    }.items()
    for word in words.split()
}


def level_of(value: Any) -> str | None:
    """One of LEVELS, None for other values."""
    word = value.strip().lower() if isinstance(value, str) else ""
    return word if word in LEVELS else LEVEL_WORDS.get(word)
