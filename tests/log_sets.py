"""Where the public log sets lie that some tests read. A clone does not have them."""

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NOT_HERE = "the public log sets are not here"
needs_log_sets = pytest.mark.skipif(not DATA.is_dir(), reason=NOT_HERE)
