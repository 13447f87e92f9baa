"""``railmate slices``: what would be published for a machine, without a cluster."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path

from railmate.cli.offers import add_offer_flags, shared_pfs
from railmate.cli.overrides import add_override_flags, override_from
from railmate.cli.printable import printable
from railmate.cli.topology import default_proc_root
from railmate_api.attributes import DRIVER_NAME


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "slices",
        help="print the ResourceSlices that would be published",
        description="Print the ResourceSlices that the node plugin would publish for a machine. Needs no cluster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sysfs-root", type=Path, default=Path("/sys"), help="the machine's sysfs, or a copy of it")
    add(
        "--proc-root",
        type=Path,
        default=None,
        help="the machine's procfs; default: proc beside the sysfs root",
    )
    add("--node-name", default=socket.gethostname().lower(), help="the node and pool name to write")
    add("--driver-name", default=DRIVER_NAME, help="the driver name to write")
    add_offer_flags(parser)
    add("-o", "--output", choices=["yaml", "json"], default="yaml", help="format")
    add_override_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import yaml

    from railmate.inventory.scan import scan
    from railmate.publish.devices import OfferOptions, build_offer
    from railmate.publish.slices import check_names, resource_slices
    from railmate.topology.analyze import analyze

    check_names(args.driver_name, args.node_name)
    override = override_from(args.override, args.roles)
    inventory = scan(args.sysfs_root, args.proc_root or default_proc_root(args.sysfs_root))
    topology = analyze(inventory, override)
    options = OfferOptions(
        nics_only=args.publish == "nics",
        share_pair_vfs=args.share_pair_vfs,
        lone_vfs=args.lone_vfs,
        switch_groups=args.switch_groups,
        all_attributes=args.attributes == "all",
        shared_pfs=shared_pfs(args.shared_pfs),
    )
    offer = build_offer(inventory, topology, options)
    for sentence in (*inventory.warnings, *topology.notes, *offer.notes):
        print(f"railmate: {printable(sentence)}", file=sys.stderr)
    slices = resource_slices(offer, args.driver_name, args.node_name)
    if args.output == "json":
        json.dump({"apiVersion": "v1", "kind": "List", "items": slices}, sys.stdout, indent=2)
        print()
    else:
        yaml.safe_dump_all(slices, sys.stdout, sort_keys=False)
    return 0
