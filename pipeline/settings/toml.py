"""Files of TOML: settings, masks, formats and rules of workloads, of users and as they are shipped."""

import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.errors import BadInput

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a file. Raises OSError, UnicodeDecodeError and tomllib.TOMLDecodeError."""
    text = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except RecursionError:  # the parser of the standard library calls itself for each bracket
        raise tomllib.TOMLDecodeError("its brackets are nested too deeply") from None


def shipped_file(name: str) -> Path:
    """A file of `config/`: of the checkout, else of the installation. Raises BadInput where both lack it."""
    places = [
        Path(__file__).parents[2] / "config",
        Path(sysconfig.get_path("data")) / "share" / "logweir",
        Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))) / "share" / "logweir",
        Path(sys.prefix) / "share" / "logweir",
    ]
    for place in places:
        if (place / name).is_file():
            return place / name
    raise BadInput(f"{name} is in none of {', '.join(map(str, places))}; reinstall logweir")


def shipped_value(name: str, kind: type[T]) -> T:
    """The content of a file of `config/`. Raises BadInput for a missing or damaged one."""
    path = shipped_file(name)
    try:
        return msgspec.convert(read_toml(path), kind)
    except (OSError, ValueError, msgspec.ValidationError) as exc:
        raise BadInput(f"{path} cannot be read: {exc}; reinstall logweir") from exc
