"""Calibration, severity words and verdicts."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadBundle
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Calibration, Evidence, Mode, calibrate, conclude, is_rare, rarity
from pipeline.records import Verdict

NATS = st.floats(0.0, 60.0)
SURPRISES = st.lists(NATS, max_size=60)


def judged(
    calibration: Calibration,
    surprise: float = 3.0,
    *,
    words: tuple[str, ...] = (),
    unseen: tuple[str, ...] = (),
    severity: str | None = None,
    known: int = 0,
    new: bool = True,
    severe: bool = False,
    level: str | None = None,
    template_count: int | None = None,
    template_severe: bool | None = None,
) -> Verdict:
    return conclude(
        Evidence(surprise=surprise, words=words, unseen=unseen, severity=severity),
        calibration=calibration,
        known_count=known,
        template_new=new,
        severe=severe,
        level=level,
        template_id=7,
        template_count=template_count,
        template_severe=template_severe,
    )


BASELINE = calibrate([4.0 + 0.1 * i for i in range(40)], mode=Mode.BASELINE, total=4000)
SELF = replace(BASELINE, mode=Mode.SELF)


# --- calibration ---


def test_about_one_in_twenty_held_out_templates_lies_above_a_conformal_threshold() -> None:
    made = calibrate([float(i) for i in range(100)], mode=Mode.BASELINE, total=1)
    assert made.method == "conformal"
    assert sum(i > made.threshold for i in range(100)) in (4, 5)


def test_few_held_out_templates_give_a_wider_bound_than_their_largest() -> None:
    made = calibrate([4.0, 5.0, 6.0], mode=Mode.BASELINE, total=1)
    assert made.method == "student"
    assert made.threshold > 6.0


@pytest.mark.parametrize("surprises", [[], [3.0]])
def test_without_held_out_templates_surprise_alone_flags_nothing(surprises: list[float]) -> None:
    made = calibrate(surprises, mode=Mode.BASELINE, total=50)
    assert made.method == "none"
    assert judged(made, 1e6).anomalous is False


def test_equal_held_out_surprises_leave_room_above_them() -> None:
    made = calibrate([2.0] * 30, mode=Mode.BASELINE, total=1)
    assert judged(made, 2.1).anomalous is False


@given(SURPRISES)
def test_a_calibration_survives_its_json(surprises: list[float]) -> None:
    made = calibrate(surprises, mode=Mode.SELF, total=9)
    assert Calibration.from_json(json.loads(json.dumps(made.to_json()))) == made


@given(SURPRISES, NATS, NATS)
def test_p_values_are_probabilities_that_fall_with_surprise(
    surprises: list[float], a: float, b: float
) -> None:
    made = calibrate(surprises, mode=Mode.BASELINE, total=9)
    low, high = sorted((a, b))
    assert 0.0 < made.p_value(high) <= made.p_value(low) <= 1.0


@pytest.mark.parametrize(
    "change", [{"method": "magic"}, {"median": "x"}, {"threshold": float("nan")}, {"mode": "?"}]
)
def test_a_damaged_calibration_is_a_bad_bundle(change: dict[str, object]) -> None:
    with pytest.raises(BadBundle):
        Calibration.from_json({**BASELINE.to_json(), **change})


# --- verdicts ---


@given(
    surprises=SURPRISES,
    mode=st.sampled_from(Mode),
    pair=st.tuples(NATS, NATS),
    known=st.tuples(st.integers(0, 9000), st.integers(0, 9000)),
    new=st.booleans(),
    severe=st.booleans(),
    level=st.sampled_from([None, "info", "warning", "error", "fatal"]),
    word=st.sampled_from([None, "error", "panic"]),
    unseen=st.sampled_from([(), ("error",)]),
    template_severe=st.sampled_from([None, True, False]),
)
def test_more_evidence_never_lowers_the_score(
    *,
    surprises: list[float],
    mode: Mode,
    pair: tuple[float, float],
    known: tuple[int, int],
    new: bool,
    severe: bool,
    level: str | None,
    word: str | None,
    unseen: tuple[str, ...],
    template_severe: bool | None,
) -> None:
    made = calibrate(surprises, mode=mode, total=9000)
    low, high = sorted(pair)
    common: dict[str, object] = {"severity": word, "unseen": unseen, "template_severe": template_severe}

    def score(surprise: float = low, **changes: object) -> float:
        kinds = {"known": 0, "new": new, "severe": severe, "level": level, **common, **changes}
        if kinds["known"]:
            kinds["new"] = False
        value = judged(made, surprise, **kinds).score  # type: ignore[arg-type]
        assert value is not None and 0.0 <= value <= 1.0
        return value

    assert score(high) >= score(low)
    assert score(severe=True) >= score(severe=False)
    assert score(new=True) >= score(new=False)
    assert score(severity="error") >= score(severity=None)
    assert score(level="fatal") >= score(level="error") >= score(level=level if level != "fatal" else None)
    rare, common_count = sorted(known)
    assert score(known=rare, new=False) >= score(known=common_count, new=False)


@given(
    surprise=NATS,
    known=st.integers(1, 4000),
    severe=st.booleans(),
    level=st.sampled_from([None, "info", "error", "fatal"]),
    word=st.sampled_from([None, "error", "panic"]),
)
def test_a_pattern_of_the_baseline_is_never_anomalous(
    surprise: float, known: int, severe: bool, level: str | None, word: str | None
) -> None:
    found = judged(BASELINE, surprise, known=known, new=False, severe=severe, level=level, severity=word)
    assert found.anomalous is False and found.reasons == ()
    assert found.score is not None and found.score < 0.5


@given(
    surprise=NATS,
    mode=st.sampled_from(Mode),
    new=st.booleans(),
    severe=st.booleans(),
    known=st.integers(0, 50),
)
def test_anomalous_means_a_score_of_at_least_one_half(
    surprise: float, mode: Mode, new: bool, severe: bool, known: int
) -> None:
    found = judged(replace(BASELINE, mode=mode), surprise, new=new and not known, severe=severe, known=known)
    assert found.score is not None
    assert found.anomalous == (found.score >= 0.5)


@pytest.mark.parametrize("made", [BASELINE, SELF, calibrate([], mode=Mode.BASELINE, total=30)])
@pytest.mark.parametrize("sign", [{"severe": True}, {"severity": "failed"}, {"level": "fatal"}])
def test_a_new_template_with_an_error_sign_is_anomalous_however_likely_its_words(
    made: Calibration, sign: dict[str, object]
) -> None:
    assert judged(made, 0.0, **sign).anomalous is True  # type: ignore[arg-type]


def test_a_calm_new_template_is_anomalous_only_above_the_threshold() -> None:
    assert judged(BASELINE, BASELINE.threshold - 0.01).anomalous is False
    assert judged(BASELINE, BASELINE.threshold + 0.01).anomalous is True


@given(NATS)
def test_a_calm_variation_of_a_known_template_is_never_anomalous(surprise: float) -> None:
    assert judged(BASELINE, surprise, new=False).anomalous is False
    assert judged(SELF, surprise, new=False, known=1, template_count=3000).anomalous is False


def test_an_error_word_new_to_the_log_flags_a_variation_of_a_known_template() -> None:
    expected = judged(BASELINE, 6.0, new=False, severity="error", words=("queue",))
    novel = judged(BASELINE, 6.0, new=False, severity="refused", words=("refused",), unseen=("refused",))
    assert expected.anomalous is False
    assert novel.anomalous is True


def test_an_error_level_in_a_template_that_was_always_calm_is_anomalous() -> None:
    assert judged(BASELINE, 0.0, new=False, severe=True, template_severe=False).anomalous is True
    assert judged(BASELINE, 0.0, new=False, severe=True, template_severe=True).anomalous is False


def test_a_new_error_template_ranks_above_a_new_calm_one_and_that_above_a_variation() -> None:
    error = judged(BASELINE, 6.0, severe=True, severity="failed").score
    calm = judged(BASELINE, 6.0).score
    variation = judged(BASELINE, 6.0, new=False).score
    known = judged(BASELINE, 6.0, new=False, known=30).score
    assert error is not None and calm is not None and variation is not None and known is not None
    assert error > calm > variation > known


def test_in_self_mode_a_rare_error_ranks_above_a_frequent_one_and_a_frequent_calm_line_is_last() -> None:
    rare = judged(SELF, 5.0, new=False, known=1, severe=True).score
    frequent = judged(SELF, 5.0, new=False, known=900, severe=True).score
    calm = judged(SELF, 1.0, new=False, known=900).score
    assert rare is not None and frequent is not None and calm is not None
    assert rare > frequent > 0.5 > calm


def test_reasons_name_what_was_found_and_their_data() -> None:
    found = judged(BASELINE, 9.0, words=("refused", "by"), severity="refused", level="error", severe=True)
    assert found.reasons == ("new-template", "error-severity:error", "unlikely-tokens:refused by")
    worded = judged(BASELINE, 9.0, severity="refused", level="info")
    assert worded.reasons == ("new-template", "error-severity:refused")
    assert judged(SELF, 5.0, new=False, known=2).reasons == ("rare:2/4000",)


def test_rarity_falls_from_one_to_zero_with_the_count() -> None:
    assert rarity(1, 1000) == 1.0
    assert rarity(1000, 1000) == 0.0
    assert is_rare(17, 100_000) and not is_rare(18, 100_000)


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
        ("errors: 3 of 5", "errors"),
        ("config file not found", "not found"),
        ("no error in first pass, then parser crashed", "crashed"),
        ("table..........<NUM> and then a failure", "failure"),
        ("probe: connection-refused.", "refused"),
        ("event=failed-to-connect pod=web", "failed"),
        ("kernel-panic on cpu <NUM>", "panic"),
        ("read of crash-report.txt failed", "failed"),
        ("status half-installed libgpg-error-dev: out of memory", "out of memory"),
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
        "wrote crash-report.txt.",
        'rotated "/var/log/app-error.log" to app-error.log.1',
        "",
    ],
)
def test_counters_negations_handled_faults_and_names_are_no_severity(line: str) -> None:
    assert severity_words(line) is None


@given(st.text(max_size=300))
def test_any_text_has_at_most_one_lower_case_severity_word(text: str) -> None:
    found = severity_words(text)
    assert found is None or (found == found.lower() and found)


def test_concluding_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import pipeline.models.threshold, pipeline.models.bundle, pipeline.models.severity; "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
