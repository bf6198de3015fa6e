"""The product's own path in one process: a bundle from a training sample, evidence of lines, their
verdicts."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from msgspec.structs import asdict

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.models import bundle
from pipeline.models.evidence import Evidence
from pipeline.models.known.patterns import load_known
from pipeline.models.line import LineModel
from pipeline.models.trainer import FitRequest, edition_config, fit
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.verdict import Verdict


def learn_and_score(
    sample: pl.DataFrame, masked: Sequence[str], *, seed: int, baseline: bool, edition: str = "causal"
) -> tuple[list[Evidence], Knowledge]:
    """Evidence of the lines from a bundle trained on the sample, and what a verdict needs of it.

    `sample` has the columns of SAMPLE_SCHEMA but `baseline`, which says whether it was declared normal.

    Without a time budget: how busy the machine is changes nothing in the figures.
    """
    with tempfile.TemporaryDirectory(prefix="logweir-bench-") as scratch:
        out = Path(scratch) / "bundle"
        manifest = train(sample.with_columns(baseline=pl.lit(baseline)), out, seed=seed, edition=edition)
        knowledge = Knowledge(calibration=manifest.calibration, known=load_known(out))
        return LineModel.load(out).score(masked), knowledge


def train(
    sample: pl.DataFrame, out: Path, *, seed: int, edition: str = "causal", **request: Any
) -> bundle.Manifest:
    """Trains a bundle in `out` on SAMPLE_SCHEMA. `request`: further fields of the FitRequest."""
    masks = MaskSet.load()
    for _ in fit(
        sample,
        FitRequest(
            tokens=masks.tokens,
            mask_version=masks.version,
            config=edition_config(edition),
            seed=seed,
            out=out,
            version="m000001-00000000",
            **request,
        ),
    ):
        pass
    return bundle.load_manifest(out)


def verdicts(lines: pl.DataFrame, evidence: Sequence[Evidence], knowledge: Knowledge) -> list[Verdict]:
    """One per line of a frame with pattern_id, severe, level and template_id."""
    rows = lines.select("pattern_id", "severe", "level", "template_id").iter_rows(named=True)
    return [
        verdict_of({**asdict(e), **row}, row["template_id"], knowledge)
        for e, row in zip(evidence, rows, strict=True)
    ]
