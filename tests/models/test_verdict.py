"""From evidence to a verdict."""

import subprocess
import sys
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.evidence import Evidence, Normal
from pipeline.models.known.patterns import KNOWN_SCHEMA, KnownPatterns
from pipeline.models.known.sentences import Sentences
from pipeline.models.threshold import ANOMALOUS_SCORE, Calibration, calibrate
from pipeline.models.verdict import Knowledge, Past, conclude, is_rare, rarity, verdict_of
from pipeline.records.verdict import Verdict

NATS = st.floats(0.0, 60.0)
SURPRISES = st.lists(NATS, max_size=60)
SHARES = st.floats(0.0, 1.0)
LOGITS = st.floats(-8.0, 8.0)


def normals(surprisals: list[float]) -> list[Normal]:
    return [Normal(evidence=Evidence(surprisal=s, prior=-1.5)) for s in surprisals]


def judged(
    calibration: Calibration,
    surprisal: float = 3.0,
    *,
    words: tuple[str, ...] = (),
    unseen: tuple[str, ...] = (),
    severity: str | None = None,
    novelty: float = 0.0,
    prior: float = -1.5,
    known: int = 0,
    new: bool = True,
    severe: bool = False,
    level: str | None = None,
    template_count: int = 0,
    template_severe: bool | None = None,
    baseline: bool = True,
) -> Verdict:
    return conclude(
        Evidence(
            surprisal=surprisal,
            words=words,
            unseen=unseen,
            severity=severity,
            novelty=novelty,
            prior=prior,
        ),
        calibration=calibration,
        past=Past(
            count=known,
            in_baseline=baseline,
            template_new=new,
            template_count=template_count,
            template_severe=template_severe,
            template_in_baseline=baseline,
        ),
        severe=severe,
        level=level,
        template_id=7,
    )


MADE = calibrate(normals([4.0 + 0.1 * i for i in range(40)]), total=4000)
NONE = calibrate([], total=30)


@given(
    surprisals=SURPRISES,
    baseline=st.booleans(),
    surprisal=st.tuples(NATS, NATS),
    novelty=st.tuples(SHARES, SHARES),
    prior=st.tuples(LOGITS, LOGITS),
    known=st.tuples(st.integers(0, 9000), st.integers(0, 9000)),
    new=st.booleans(),
    severe=st.booleans(),
    level=st.sampled_from([None, "info", "warning", "error", "fatal"]),
    word=st.sampled_from([None, "error", "panic"]),
    unseen=st.sampled_from([(), ("error",)]),
    template_severe=st.sampled_from([None, True, False]),
)
def test_more_evidence_never_lowers_the_score_nor_raises_the_p_value(
    *,
    surprisals: list[float],
    baseline: bool,
    surprisal: tuple[float, float],
    novelty: tuple[float, float],
    prior: tuple[float, float],
    known: tuple[int, int],
    new: bool,
    severe: bool,
    level: str | None,
    word: str | None,
    unseen: tuple[str, ...],
    template_severe: bool | None,
) -> None:
    made = calibrate(normals(surprisals), total=9000)
    common: dict[str, object] = {
        "surprisal": min(surprisal), "novelty": min(novelty), "prior": min(prior), "known": 0, "new": new,
        "severe": severe, "level": level, "severity": word, "unseen": unseen, "template_severe": template_severe,
        "baseline": baseline,
    }  # fmt: skip

    def found(**changes: object) -> tuple[float, float]:
        kinds = common | changes
        if kinds["known"]:
            kinds["new"] = False
        verdict = judged(made, **kinds)  # type: ignore[arg-type]
        assert verdict.score is not None and 0.0 <= verdict.score <= 1.0
        assert verdict.p_value is None or 0.0 < verdict.p_value <= 1.0
        return verdict.score, -(verdict.p_value or 0.0)

    def rises(less: dict[str, object], more: dict[str, object]) -> None:
        (low, low_p), (high, high_p) = found(**less), found(**more)
        assert high >= low and high_p >= low_p

    rises({}, {"surprisal": max(surprisal)})
    rises({}, {"novelty": max(novelty)})
    rises({}, {"prior": max(prior)})
    rises({"severe": False}, {"severe": True})
    rises({"new": False}, {"new": True})
    rises({"severity": None}, {"severity": "error"})
    rises({"level": "error"}, {"level": "fatal"})
    rises({"level": level if level != "fatal" else None}, {"level": "error"})
    rises({"known": max(known), "new": False}, {"known": min(known), "new": False})


@given(
    surprisal=NATS,
    known=st.integers(1, 4000),
    severe=st.booleans(),
    level=st.sampled_from([None, "info", "error", "fatal"]),
    word=st.sampled_from([None, "error", "panic"]),
)
def test_a_pattern_of_the_baseline_is_never_anomalous(
    surprisal: float, known: int, severe: bool, level: str | None, word: str | None
) -> None:
    found = judged(MADE, surprisal, known=known, new=False, severe=severe, level=level, severity=word)
    assert found.anomalous is False and found.reasons == () and found.p_value == 1.0
    assert found.score is not None and found.score < 0.5


@given(
    surprisal=NATS,
    baseline=st.booleans(),
    new=st.booleans(),
    severe=st.booleans(),
    known=st.integers(0, 50),
)
def test_anomalous_means_a_score_of_at_least_one_half(
    surprisal: float, baseline: bool, new: bool, severe: bool, known: int
) -> None:
    found = judged(MADE, surprisal, baseline=baseline, new=new and not known, severe=severe, known=known)
    assert found.score is not None
    assert found.anomalous == (found.score >= 0.5)


@pytest.mark.parametrize("made", [MADE, NONE])
@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("sign", [{"severe": True}, {"severity": "failed"}, {"level": "fatal"}])
def test_a_new_template_with_an_error_sign_is_anomalous_however_likely_its_words(
    made: Calibration, baseline: bool, sign: dict[str, object]
) -> None:
    assert judged(made, 0.0, prior=-8.0, baseline=baseline, **sign).anomalous is True  # type: ignore[arg-type]


@given(surprisal=NATS, novelty=SHARES, prior=LOGITS, baseline=st.booleans())
def test_a_calm_new_template_is_anomalous_exactly_above_the_threshold(
    surprisal: float, novelty: float, prior: float, baseline: bool
) -> None:
    strange = MADE.normalised_score(Evidence(surprisal=surprisal, novelty=novelty, prior=prior))
    found = judged(MADE, surprisal, novelty=novelty, prior=prior, baseline=baseline)
    assert found.anomalous == (strange >= MADE.threshold)


@given(surprisal=NATS, novelty=SHARES, prior=LOGITS)
def test_without_held_out_templates_no_calm_line_is_flagged(
    surprisal: float, novelty: float, prior: float
) -> None:
    assert judged(NONE, surprisal, novelty=novelty, prior=prior).anomalous is False


@given(surprisal=NATS, novelty=SHARES, prior=LOGITS)
def test_a_calm_variation_of_a_known_template_is_never_anomalous(
    surprisal: float, novelty: float, prior: float
) -> None:
    terms: dict[str, Any] = {"novelty": novelty, "prior": prior}
    assert judged(MADE, surprisal, new=False, **terms).anomalous is False
    assert (
        judged(
            MADE, baseline=False, surprisal=surprisal, new=False, known=1, template_count=3000, **terms
        ).anomalous
        is False
    )


def test_an_error_word_new_to_the_log_flags_a_variation_of_a_known_template() -> None:
    expected = judged(MADE, 6.0, new=False, severity="error", words=("queue",))
    novel = judged(MADE, 6.0, new=False, severity="refused", words=("refused",), unseen=("refused",))
    assert expected.anomalous is False
    assert novel.anomalous is True


def test_an_error_level_in_a_template_that_was_always_calm_is_anomalous() -> None:
    assert judged(MADE, 0.0, new=False, severe=True, template_severe=False).anomalous is True
    assert judged(MADE, 0.0, new=False, severe=True, template_severe=True).anomalous is False


def test_a_new_error_template_ranks_above_a_new_calm_one_and_that_above_a_variation() -> None:
    error = judged(MADE, 6.0, severe=True, severity="failed").score
    calm = judged(MADE, 6.0).score
    variation = judged(MADE, 6.0, new=False).score
    known = judged(MADE, 6.0, new=False, known=30).score
    assert error is not None and calm is not None and variation is not None and known is not None
    assert error > calm > variation > known


def test_in_stored_results_a_rare_error_ranks_above_a_frequent_one_and_a_frequent_calm_line_is_last() -> None:
    rare = judged(MADE, baseline=False, surprisal=5.0, new=False, known=1, severe=True).score
    frequent = judged(MADE, baseline=False, surprisal=5.0, new=False, known=900, severe=True).score
    calm = judged(MADE, baseline=False, surprisal=1.0, new=False, known=900).score
    assert rare is not None and frequent is not None and calm is not None
    assert rare > frequent > 0.5 > calm


@given(
    surprisal=NATS,
    novelty=SHARES,
    prior=LOGITS,
    known=st.integers(1, 4000),
    sign=st.sampled_from([{"severe": True}, {"level": "error"}, {"severity": "failed", "known": 2}]),
)
def test_in_stored_results_an_error_level_and_a_rare_error_word_are_always_anomalous(
    surprisal: float, novelty: float, prior: float, known: int, sign: dict[str, Any]
) -> None:
    terms: dict[str, Any] = {"known": known, "new": False, "novelty": novelty, "prior": prior} | sign
    assert judged(MADE, baseline=False, surprisal=surprisal, **terms).anomalous is True


def knowing(*rows: tuple[int, int, int, bool, bool]) -> Knowledge:
    """Rows of pattern, count, template, and whether training saw it at an error level and in a baseline."""
    frame = pl.DataFrame(rows, schema=KNOWN_SCHEMA, orient="row")
    return Knowledge(calibration=MADE, known=KnownPatterns(frame))


def row_of(pattern: int, level: str) -> dict[str, Any]:
    return {
        "pattern_id": pattern, "severe": level == "error", "level": level, "surprisal": 0.0, "words": [],
        "unseen": [], "novelty": 0.0, "prior": -8.0, "severity": None, "tokens": 4,
    }  # fmt: skip


def test_a_calm_sentence_that_was_never_said_is_anomalous_and_a_stranger_one_more_so() -> None:
    said = Sentences.fit([("array md0 is healthy", 500, ""), ("all well", 9, "")])
    known = KnownPatterns(pl.DataFrame([(7, 500, 1, False, True)], schema=KNOWN_SCHEMA, orient="row"), said)
    knowledge = Knowledge(calibration=MADE, known=known)

    def verdict(line: str, level: str = "info", pattern: int = 8) -> Verdict:
        return verdict_of(row_of(pattern, level) | {"masked": line}, 1, knowledge)

    one, several = verdict("array md0 is degraded"), verdict("no space left on device")
    assert one.anomalous and one.reasons == ("never-said:4000 healthy",)
    assert several.anomalous and several.reasons == ("never-said:4000",)
    assert one.score is not None and several.score is not None
    assert ANOMALOUS_SCORE <= one.score < several.score < ANOMALOUS_SCORE + 0.05
    assert not verdict("array md0 is healthy", pattern=7).anomalous
    assert not verdict("array md0 is <NUM>").anomalous, "a number may stand anywhere"
    assert "never-said" not in "".join(verdict("array md0 is degraded", "error").reasons)


def test_an_error_with_the_text_of_calm_lines_is_anomalous_whichever_came_first() -> None:
    # Lines at error levels have templates of their own; training knows the lowest one of a pattern.
    for first, second in (("error", "info"), ("info", "error")):
        ids = {first: 1, second: 2}
        knowledge = knowing((7, 1502, 1, True, False))
        assert verdict_of(row_of(7, "error"), ids["error"], knowledge).anomalous is True
        calm = verdict_of(row_of(7, "info"), ids["info"], knowledge)
        assert calm.anomalous is False and "new-template" not in calm.reasons


def test_an_error_is_new_to_a_baseline_whose_lines_of_this_text_were_calm() -> None:
    calm = knowing((7, 900, 1, False, True))
    assert verdict_of(row_of(7, "error"), 2, calm).anomalous is True
    assert verdict_of(row_of(7, "info"), 1, calm).anomalous is False
    erroneous = knowing((7, 900, 1, True, True))
    assert verdict_of(row_of(7, "error"), 2, erroneous).anomalous is False


def test_one_model_knows_baselines_and_results_and_judges_each_pattern_by_its_own() -> None:
    """A service without a baseline takes nothing away from the others."""
    knowledge = knowing((7, 900, 1, True, True), (8, 900, 2, True, False), (9, 900, 1, True, False))
    assert verdict_of(row_of(7, "error"), 1, knowledge).anomalous is False, "declared normal"
    assert verdict_of(row_of(8, "error"), 2, knowledge).anomalous is True, "nobody declared it"
    assert verdict_of(row_of(10, "error"), 1, knowledge).anomalous is False, "a variation of a declared one"
    assert verdict_of(row_of(11, "error"), 2, knowledge).anomalous is True
    hidden = knowledge.known.without(frozenset({7}), frozenset())
    assert not hidden.in_baseline(7) and not hidden.template_in_baseline(1)


def test_reasons_name_what_was_found_and_their_data() -> None:
    found = judged(MADE, 9.0, words=("refused", "by"), severity="refused", level="error", severe=True)
    assert found.reasons == ("new-template", "error-severity:error", "unlikely-tokens:refused by")
    worded = judged(MADE, 9.0, severity="refused", level="info")
    assert worded.reasons == ("new-template", "error-severity:refused")
    assert judged(MADE, baseline=False, surprisal=5.0, new=False, known=2).reasons == ("rare:2/4000",)


def test_rarity_falls_from_one_to_zero_with_the_count() -> None:
    assert rarity(1, 1000) == 1.0
    assert rarity(1000, 1000) == 0.0
    assert is_rare(17, 100_000) and not is_rare(18, 100_000)


def test_concluding_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import pipeline.models.verdict, pipeline.models.bundle, pipeline.models.prior, "
        "pipeline.models.novelty; "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("level", [None, "info", "warning"])
@pytest.mark.parametrize("new", [True, False])
def test_without_held_out_templates_no_line_is_flagged_for_being_strange(
    baseline: bool, level: str | None, new: bool
) -> None:
    made = calibrate([], total=1_000)
    verdict = judged(made, 50.0, baseline=baseline, novelty=1.0, prior=8.0, level=level, new=new)
    assert verdict.anomalous is False and verdict.p_value is None
