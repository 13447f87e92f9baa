"""The flags by which people say how a machine's hardware is offered, and what they mean together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from railmate.publish.shared import SharedPfs


def add_offer_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--publish",
        choices=("all", "nics"),
        default="all",
        help="all: GPUs, NICs and pairs; nics: NICs alone, where another driver publishes the GPUs; claims then join "
        "the two by matchAttribute resource.kubernetes.io/pcieRoot",
    )
    add(
        "--share-pair-vfs",
        action="store_true",
        help="offer the VF of a pair alone as well, also where its physical function has further VFs",
    )
    add(
        "--lone-vfs",
        type=lone_vfs,
        metavar="all|none|N",
        default="all",
        help="how many VFs of each physical function are offered alone; each is a device that the scheduler walks",
    )
    add(
        "--switch-groups",
        action="store_true",
        help="offer all GPUs and NICs of a switch as one device as well, where it has several pairs",
    )
    add(
        "--attributes",
        choices=("select", "all"),
        default="select",
        help="what is published of each device: what claims select and match on, or all that is known, half as many "
        "bytes again; a pod is told all in either case",
    )
    add(
        "--shared-pfs",
        action="append",
        default=[],
        metavar="NIC=N",
        help="share physical functions among pods, each with up to N macvlan sub-interfaces. NIC is an address "
        "(0000:0c:00.0), a vendor:device (15b3:101e) or a pattern of netdev or RDMA device names ('enp*'); a pattern "
        "takes rails only, and not the node's uplink. Repeatable; the first that fits counts",
    )


def shared_pfs(texts: Sequence[str]) -> tuple[SharedPfs, ...]:
    """What ``--shared-pfs`` says. Raises UsageError."""
    from railmate.publish.shared import parse_shared_pfs

    return tuple(parse_shared_pfs(text) for text in texts)


def lone_vfs(text: str) -> int | None:
    """A number, None for all. Raises ArgumentTypeError, whose message argparse shows."""
    if text == "all":
        return None
    if text == "none":
        return 0
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither all, none nor a number")
