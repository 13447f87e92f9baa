"""railmate topology: GPUs, NICs, how far they are apart and which belong together."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from railmate.cli.overrides import add_override_flags, override_from
from railmate.cli.printable import printable
from railmate.errors import UsageError
from railmate.inventory.record import record
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.render.document import document_text
from railmate.topology.render.picture import picture
from railmate.topology.render.table import table
from railmate.topology.render.tree import tree

_FORMATS = ("table", "tree", "json", "svg")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "topology",
        help="show which GPU and NIC share a PCIe switch",
        description="Reads this machine's PCI devices and shows how far each GPU is from each NIC, "
        "and which NICs are its own.",
    )
    parser.add_argument(
        "--sysfs-root", type=Path, default=Path("/sys"), metavar="DIR", help="read DIR in place of /sys"
    )
    parser.add_argument(
        "--proc-root",
        type=Path,
        metavar="DIR",
        help="read DIR in place of /proc (default: proc beside a --sysfs-root that is named sys, else /proc)",
    )
    add_override_flags(parser)
    parser.add_argument("-o", "--output", choices=_FORMATS, default="table", help="default: table")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write this machine's facts to FILE (-: standard output) and show nothing else; what identifies the "
        "machine is replaced",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the topology; what could not be read goes to stderr, a line a file. Raises UsageError."""
    proc_root = args.proc_root or default_proc_root(args.sysfs_root)
    if args.record is not None:
        _write(args.record, record(args.sysfs_root, proc_root))
        return 0
    override = override_from(args.override, args.roles)
    inventory = scan(args.sysfs_root, proc_root)
    topology = analyze(inventory, override)
    for warning in inventory.warnings:
        print(f"railmate topology: {printable(warning)}", file=sys.stderr)
    if args.output == "json":
        text = document_text(inventory, topology)
    elif args.output == "tree":
        # Piped output is cut nowhere: only a terminal has a width.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        text = tree(inventory, topology, width)
    elif args.output == "svg":
        if not inventory.gpus and not inventory.nics:
            raise UsageError(f"{args.sysfs_root}: holds no GPU and no NIC, so there is nothing to draw")
        text = picture(inventory, topology)
    else:
        text = table(inventory, topology)
    sys.stdout.write(text if args.output == "json" else printable(text))
    return 0


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written ({error.strerror}). Give --record a file in another place."
        ) from None
    print(f"railmate topology: wrote {path}. Look it through before you send it.", file=sys.stderr)


def default_proc_root(sysfs_root: Path) -> Path:
    """A recorded tree has proc beside sys; the live /sys has /proc that way too."""
    return sysfs_root.resolve().parent / "proc"
