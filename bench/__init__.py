"""Benchmarks: `scripts/bench NAME [--json]`. Each module has `measure(data) -> dict` with plain values."""
