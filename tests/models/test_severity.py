"""Words that say something went wrong, and the prior that weighs them by a log's own levels."""

import random
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models import severity
from pipeline.models.prior import SeverityPrior, is_prose
from pipeline.models.severity import all_well, may_be_severe, severity_words, trouble

# --- severity words ---


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("connection to <IP> refused", "refused"),
        ("java.net.SocketTimeoutException: Read timed out", "timeout"),
        ("request trips left time out: Read timed out", "timed out"),
        ("rts panic! - stopping execution", "panic"),
        ("kernel: Out of memory: Killed process <NUM>", "out of memory"),
        ("ddr: excessive soft failures, consider replacing the card", "failures"),
        ("ERROR_CODE <NUM>", "error"),
        ("exited with error: <NUM>", "error"),
        ("error not corrected", "error"),
        ("process <NUM> still waiting for ShareLock on transaction <NUM> after <NUM> ms", "still waiting"),
        ("INFO: task jbd2/sda1:<NUM> blocked for more than <NUM> seconds.", "blocked for more"),
        ("ERRO ledger is late", "erro"),
        ("Fehler beim Lesen", "fehler"),
        ("errors: 3 of 5", "errors"),
        ("config file not found", "not found"),
        ("no error in first pass, then parser crashed", "crashed"),
        ("table..........<NUM> and then a failure", "failure"),
        ("probe: connection-refused.", "refused"),
        ("event=failed-to-connect pod=web", "failed"),
        ("kernel-panic on cpu <NUM>", "panic"),
        ("read of crash-report.txt failed", "failed"),
        ("status half-installed libgpg-error-dev: out of memory", "out of memory"),
        ("dpkg: error processing package crash:amd64 (--configure):", "error"),
        ("Unpacking failed (<NUM>)", "failed"),
        ("Setting up the mast failed", "failed"),
        ("Removing failed nodes (<NUM>)", "failed"),
        ("status failed: all <NUM>", "failed"),
        ("mount of data:amd64 failed <NUM> times", "failed"),
        ("FailedScheduling <NUM> nodes", "failed"),
        ("pod was OOMKilled", "oom"),
        ("CorruptIndexException: bad", "corrupt"),
        ("zk.KeeperException$ConnectionLossException: gone", "exception"),
        ("timeout of 30000ms exceeded", "timeout"),
        ("read/write error", "error"),
        ("failed after attempts=<NUM>", "failed"),
        ("error opening /usr/lib/x.so", "error"),
    ],
)
def test_a_word_that_says_something_went_wrong_is_found(line: str, word: str) -> None:
    assert severity_words(line) == word


@pytest.mark.parametrize(
    "line",
    [
        "all is well",
        "<NUM> errors",
        "<NUM> double-hummer alignment exceptions",
        "processed <NUM> records, <NUM> failed",
        "failed=<NUM> retried=<NUM>",
        "errors: 0, warnings: 0",
        '"error_count": <NUM>',
        "no error",
        "finished without any errors",
        "a non-fatal condition",
        "instruction cache parity error corrected",
        "ErrorHandler registered",
        "writing to error log",
        "error=null",
        "parity error.......<NUM>",
        "terrors and mirrors",
        "failover to replica",
        "status installed libgpg-error-dev:amd64 <NUM>",
        "status installed libgpg-error0:amd64 <NUM>",
        "unpacking ruby-error-highlight over <NUM>",
        "unpacking (gpg-error-doc) ...",
        "fetched gpg-error_<NUM>-<NUM>_amd64.deb",
        "Setting up fail2ban (<NUM>-<NUM>) ...",
        "Unpacking crash (<NUM>) over (<NUM>-<NUM>) ...",
        "Processing triggers for crash (<NUM>) ...",
        "Selecting previously unselected package crash.",
        "<TIME> status installed fail2ban:all <NUM>-<NUM>",
        "configure crash:amd64 <NUM> <none>",
        "Install: crash:amd64 (<NUM>, automatic), fail2ban:all (<NUM>)",
        "link group ABORT.<NUM>.gz updated to point to /usr/share/man/man7/ABORT.7.gz",
        "run with --slave /usr/share/man/man3/error.3.gz error.3.gz /opt/man3/error.3.gz",
        "wrote crash-report.txt.",
        'rotated "/var/log/app-error.log" to app-error.log.1',
        "minSessionTimeout set to -1",
        "session timeout of 3000 ms",
        "request.timeout value is 0",
        "zookeeper.session.timeout=<NUM>",
        "Number of failed storages = 0",
        "total corrupt blocks = <NUM>",
        "FailedServersCache started",
        "onConnectionLost called",
        "setErrorHandler done",
        "/hbase/corrupt/x archived",
        "at TestFailedRegion.java:12",
        "hdfs://host/failed/x was moved",
        "[ <NUM> tests aborted ]",
        "hbase.error.dir is set",
        "",
    ],
)
def test_counters_negations_handled_faults_and_names_are_no_severity(line: str) -> None:
    assert severity_words(line) is None


@given(st.text(max_size=300))
def test_any_text_has_at_most_one_lower_case_severity_word(text: str) -> None:
    found = severity_words(text)
    assert found is None or (found == found.lower() and found)


FAULTS = sorted({*severity.words().failure, *severity.words().phrases})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_line_without_any_word_that_may_be_severe_need_not_be_read(fault: str) -> None:
    for line in (fault, fault.upper(), f"<NUM>x{fault.title()}y", fault.replace(" ", "\u2003")):
        if severity_words(line):
            assert may_be_severe(line)
    assert severity_words(fault) and not may_be_severe("all is well")


@pytest.mark.parametrize(
    "word", ["retrying", "disconnected", "warning", "dead", "mismatched", "unexpectedly"]
)
def test_weak_signs_of_trouble_match_as_the_beginning_of_a_word(word: str) -> None:
    assert trouble(word) and not all_well(word)


@pytest.mark.parametrize("word", ["deadline", "badge", "bugle", "halting", "order", ""])
def test_short_signs_match_whole_words_only(word: str) -> None:
    assert not trouble(word)


# --- the prior ---

CALM = [f"job {w} finished in <NUM> ms" for w in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")]
ODD = [f"flux {w} beyond horizon" for w in ("north", "south", "east", "west", "up", "down")]


def test_without_levels_or_with_one_level_the_prior_is_the_word_list() -> None:
    lines = [*CALM, *ODD, "kernel panic", "retrying"]
    words = SeverityPrior.by_words().score(lines)
    for severe in (False, True):
        fitted = SeverityPrior.fit(lines, [severe] * len(lines), [9] * len(lines))
        assert fitted.score(lines) == words


def test_two_lines_at_an_error_level_are_too_few_to_learn_from() -> None:
    lines = [*CALM, *ODD[:2]]
    fitted = SeverityPrior.fit(lines, [False] * len(CALM) + [True] * 2, [9] * len(lines))
    assert fitted.score(lines) == SeverityPrior.by_words().score(lines)


def test_a_named_fault_is_above_even_odds_and_more_than_weak_signs_and_those_more_than_none() -> None:
    fault, weak, none, well = SeverityPrior.by_words().score(
        ["connection refused", "connection dropped", "connection there", "connection established"]
    )
    assert fault > 0 > weak > none > well


def test_a_sentence_is_rather_an_error_than_a_list_of_values_with_the_same_words() -> None:
    sentence, half, listed = SeverityPrior.by_words().score(
        [
            "the (small) node left: its ring.",
            "the small node=<NUM> left its ring=<NUM>",
            "node=<NUM> ring=<NUM>",
        ]
    )
    assert sentence > half > listed
    assert sentence - listed == pytest.approx(1.0)  # the bound of what prose adds


@pytest.mark.parametrize(
    ("word", "prose"),
    [
        ("\u0939\u093f\u0928\u094d\u0926\u0940", True),  # Hindi
        ("\u0e17\u0e35\u0e48,", True),  # Thai
        ("\u0643\u064e\u062a\u064e\u0628\u064e", True),  # Arabic with vowels
        ("Vie\u0323\u0302t", True),  # decomposed Vietnamese
        ("\u0301", False),
        ("\u0301a", False),
        ("e\u03011", False),
        ("e\u0301=a", False),
        ("", False),
        ("Cut!", True),
        ('"o\u00f9"', True),
        *((word, False) for word in ("x1", "a=b", "can't", "<IP>", "...")),
    ],
)
def test_combining_marks_behind_a_letter_belong_to_a_word_of_prose(word: str, prose: bool) -> None:
    assert is_prose(word) is prose


def test_words_that_a_log_writes_at_error_levels_come_to_count() -> None:
    many = [f"{line} {i % 7}" for i in range(10) for line in (*CALM, *ODD)]
    prior = SeverityPrior.fit(many, ["flux" in line for line in many], [1] * len(many))
    before, after = (p.score(["flux seen beyond the gate"])[0] for p in (SeverityPrior.by_words(), prior))
    assert after > before + 0.5
    assert prior.score(["job alpha finished"])[0] < SeverityPrior.by_words().score(["job alpha finished"])[0]


def test_a_million_calm_lines_do_not_teach_that_a_fault_is_calm() -> None:
    lines = [*CALM * 50, *ODD]
    rare = SeverityPrior.fit(lines, ["flux" in line for line in lines], [10_000] * len(lines))
    assert rare.score(["kernel panic: not syncing"])[0] > 0


def test_fitting_is_deterministic_and_survives_its_bytes() -> None:
    lines = [*CALM, *ODD]
    severe = [False] * len(CALM) + [True] * len(ODD)
    one, other = (SeverityPrior.fit(lines, severe, range(1, 13)) for _ in range(2))
    assert one.to_bytes() == other.to_bytes()
    back = SeverityPrior.from_bytes(one.to_bytes())
    assert back.score(lines) == pytest.approx(one.score(lines), abs=1e-3)
    assert SeverityPrior.from_bytes(back.to_bytes()).score(lines) == back.score(lines)
    assert len(one.to_bytes()) < 64_000


@given(st.lists(st.text(max_size=200), max_size=5))
def test_any_text_has_a_bounded_logit_whatever_stands_beside_it(lines: list[str]) -> None:
    prior = SeverityPrior.by_words()
    together = prior.score(lines)
    assert together == [prior.score([line])[0] for line in lines]
    assert all(-8.0 <= logit <= 8.0 for logit in together)


PHRASES = st.sampled_from(
    ["job", "failed", "not", "found", "out", "of", "memory", "no errors", "oom", "<IP>", "é" * 600]
)


@example(["é" * 1100 + " failed", "failed " + "é" * 1100])
@given(st.lists(st.lists(PHRASES, max_size=8).map(" ".join), max_size=5))
def test_faults_that_are_known_already_weigh_what_they_do_when_they_are_looked_for(lines: list[str]) -> None:
    """Also of lines of which the prior reads the beginning only."""
    prior = SeverityPrior.by_words()
    assert prior.score(lines, [severity_words(line) for line in lines]) == prior.score(lines)


def damaged() -> list[Any]:
    whole = msgpack.unpackb(SeverityPrior.by_words().to_bytes())
    rng = random.Random(1)
    return [
        b"",
        b"\xc1",
        msgpack.packb([2, *whole[1:]]),
        msgpack.packb([1, whole[1][:-1], whole[2]]),
        msgpack.packb([1, whole[1], whole[2][:-4]]),
        msgpack.packb([1, b"\xff\xff\xff\x7f", b"\0\0\0\0"]),
        msgpack.packb([1, b"\0\0\0\0", b"\0\0\xc0\x7f"]),
        rng.randbytes(40),
    ]


@pytest.mark.parametrize("blob", damaged(), ids=repr)
def test_bytes_that_are_no_prior_are_a_bad_bundle(blob: bytes) -> None:
    with pytest.raises(BadBundle, match="train again"):
        SeverityPrior.from_bytes(blob)
