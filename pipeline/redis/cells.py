"""Cells: pipelines with a Redis each, for more batches than one Redis takes. A workload lies in one cell.

REDIS_URL=cells:///path names a file that maps prefixes of workloads to addresses. The longest prefix that
fits decides, and "" takes what no other one does:

    [cells]
    "" = "redis://other.example:6379/0"
    "shop/" = "redis://shop.example:6379/0"
    "shop/checkout" = "sentinel://a,b,c/0?master=checkout"

Each cell is a whole pipeline: batches, queues, templates and pointers are its own. Producers choose; the
processes of a cell know only its address."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pipeline.errors import BadSetting
from pipeline.settings import Settings
from pipeline.settings.values import cells_file, check_url


@dataclass(frozen=True, slots=True)
class Cells:
    """The REDIS_URL of each prefix."""

    urls: Mapping[str, str] = field(repr=False)  # with passwords

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises BadSetting in one sentence, without an address: it may hold a password."""
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise BadSetting(
                f"the cells file {path} cannot be read: {exc.strerror}; correct REDIS_URL"
            ) from exc
        except UnicodeDecodeError:
            raise BadSetting(f"the cells file {path} is not valid TOML: it is not UTF-8") from None
        except tomllib.TOMLDecodeError as exc:
            raise BadSetting(f"the cells file {path} is not valid TOML: {exc}") from exc
        urls = raw.get("cells")
        if set(raw) != {"cells"} or not isinstance(urls, dict) or "" not in urls:
            raise BadSetting(
                f"the cells file {path} has to hold one table [cells] of prefixes and addresses, and in it "
                'the line "" = "redis://host:6379/0" for other workloads'
            )
        for prefix, url in urls.items():
            try:
                if not isinstance(url, str) or cells_file(url) is not None:
                    raise ValueError("its address is that of no Redis")
                check_url(url)
            except ValueError as exc:
                raise BadSetting(f"the cells file {path} has an unusable cell {prefix!r}: {exc}") from None
        return cls(urls)

    def url(self, workload: str) -> str:
        """The address of the cell with the longest prefix of this workload."""
        return self.urls[max((prefix for prefix in self.urls if workload.startswith(prefix)), key=len)]


def cells_of(settings: Settings) -> Cells | None:
    """The cells that REDIS_URL names; None where it names a Redis, or nothing. Raises BadSetting."""
    path = cells_file(settings.redis.url)
    return None if path is None else Cells.load(Path(path))


def in_cell(settings: Settings, workload: str) -> Settings:
    """The settings of the cell that takes this workload, unchanged without cells. Raises BadSetting."""
    cells = cells_of(settings)
    return settings if cells is None else settings.replace(redis_url=cells.url(workload))
