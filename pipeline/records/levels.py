"""The severities of log lines."""

from typing import Final

# One spelling per severity, lowest first; formats map their own words to these.
LEVELS: Final = ("trace", "debug", "info", "notice", "warning", "error", "critical", "fatal")
ERROR_LEVELS: Final = frozenset({"error", "critical", "fatal"})
# RFC 5424 §6.2.1, severities 0 to 7
SYSLOG_LEVELS: Final = ("fatal", "critical", "critical", "error", "warning", "notice", "info", "debug")
