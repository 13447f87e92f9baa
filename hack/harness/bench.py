"""``hack/bench``: measurements that anyone can repeat.

Each is a module of this package with ``add_parser``; the table below is all there is to register.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

_BENCHES = ("bench_attach", "bench_scheduler", "bench_slices", "bench_topology")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured and within its limit, 1 over the limit, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="hack/bench", description="Measure railmate on this machine.")
    benches = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name in _BENCHES:
        import_module(f"harness.{name}").add_parser(benches)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


if __name__ == "__main__":
    sys.exit(main())
