"""`logweir gpu models [put|remove]`: models that nodes serve on leases of the pool, and Logweir's own."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, print_outcome
from pipeline.errors import BadInput
from pipeline.gpu.policy.fairness import is_name
from pipeline.gpu.pool import Pool
from pipeline.gpu.served import ServedModel, checked_model_name
from pipeline.gpu.served_files import format_of
from pipeline.service.access.audit import user_of_machine
from pipeline.service.gpu import remove_model, serve_model
from pipeline.settings import Settings
from pipeline.units import mib, plural, seconds, size

MOST_REPLICAS: Final = 1_000
WORK_MIB: Final = 64  # of a copy beside its weights, where nobody says how much


def main(args: argparse.Namespace, pool: Pool, settings: Settings) -> int:
    if not args.name:
        raise BadInput(f"`logweir gpu models {args.change}` needs the name of a model")
    name = checked_model_name(args.name)
    if not is_name(args.tenant):
        raise BadInput(f"--tenant {args.tenant[:80]!r} is no name of a tenant; see gpu_tenants")
    if args.change == "put":
        return _put(args, name, pool, settings)
    if args.file:
        raise BadInput(f"{args.file!r} is one word too many; write `logweir gpu models remove {name}`")
    removed = remove_model(pool.client, settings, args.tenant, name, args.version, by=user_of_machine())
    words = f"{name}: {plural(len(removed), 'version')} removed; nodes unload within seconds"
    facts = {"removed": name, "tenant": args.tenant, "versions": [one.version for one in removed]}
    return print_outcome(args, facts, words)


def _put(args: argparse.Namespace, name: str, pool: Pool, settings: Settings) -> int:
    if not args.file:
        raise BadInput(f"name the file too, as in `logweir gpu models put {name} {name}.onnx`")
    if not 1 <= args.replicas <= MOST_REPLICAS:
        raise BadInput(f"--replicas {args.replicas} must be from 1 to {MOST_REPLICAS:,}")
    path = Path(args.file)
    kind = format_of(path)
    model = ServedModel(
        tenant=args.tenant,
        name=name,
        format=kind,
        memory_mib=_memory_mib(args.memory, path),
        replicas=args.replicas,
        sha256="",
        size=0,
    )
    new, old = serve_model(pool.client, settings, path, model, by=user_of_machine())
    words = f"{name} version {new.version} of {new.tenant}; `logweir gpu models` shows where it is ready"
    if old:
        words += f"; version {', '.join(str(one.version) for one in old)} is removed"
    facts = {
        "model": name,
        "tenant": new.tenant,
        "version": new.version,
        "memory_mib": new.memory_mib,
        "removed": [one.version for one in old],
    }
    return print_outcome(args, facts, words)


def _memory_mib(text: str | None, path: Path) -> int:
    if text is not None:
        found = mib(text)
        if found < 1:
            raise BadInput(f"--memory {text!r} is no amount of memory; write 512MiB or 4GiB")
        return found
    files = path.rglob("*") if path.is_dir() else (path,)
    total = sum(file.stat().st_size for file in files if file.is_file())
    return -(-2 * total // 2**20) + WORK_MIB


def show_served(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> int:
    """All models, where they are ready, and why they wait."""
    if args.json:
        print_json(list(rows))
        return 0
    console = out()
    if not rows:
        console.print(
            "no model is on a leased device; `logweir gpu models put NAME FILE` makes one", markup=False
        )
        return 0
    table = Table(
        "model", "tenant", "state", "ready", "memory", "where", "used", "because", box=None, pad_edge=False
    )
    for row in rows:
        ready = [copy for copy in row["copies"] if copy["state"] == "ready"]
        used = min((copy["used_s_ago"] for copy in ready), default=None)
        words = (
            row["model"] if row["version"] is None else f"{row['model']} v{row['version']}",
            row["tenant"],
            row["state"],
            f"{row['ready']}/{row['replicas']}",
            "" if row["memory_mib"] is None else size(row["memory_mib"]),
            ", ".join(sorted({copy["node"] or copy["holder"] for copy in row["copies"]})),
            "" if used is None else f"{seconds(max(0.0, used))} ago",
            row["why"],
        )
        table.add_row(*map(cell, words))
    console.print(table)
    return 0
