"""The flags by which users tell what sysfs does not: the same in every command that looks at a machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from railmate.topology.overridefile import load_override, with_roles
from railmate_api.override import TopologyOverride


def add_override_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--override",
        type=Path,
        metavar="FILE",
        help="a TopologyOverride in YAML, or an NCCL topology XML; what it says wins over sysfs",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        dest="roles",
        metavar="NIC=ROLE",
        help="what a NIC is for: rail, management, storage or other. NIC is an address (0000:82:00.0), a "
        "vendor:device (15b3:a2dc) or a pattern of netdev or RDMA device names ('enp5*'). Repeatable; the first "
        "that fits counts, and these come before the override file's",
    )


def override_from(path: Path | None, roles: Sequence[str]) -> TopologyOverride | None:
    """What the flags say, None for nothing. Raises UsageError."""
    return with_roles(None if path is None else load_override(path), roles)
