"""The command line of hack/vnode."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.shell import UsageError, main_guard, progress
from harness.vnode import VirtualNode, acceleration, lasting_directory
from harness.vnode_machine import MOST_VFS, Settings

_DESCRIPTION = """\
A virtual GPU node: a real kernel on two sockets with 4 PCIe switches, 8 functions that look like H100s, 4 NICs with
SR-IOV and soft RoCE. It needs root, about 3.5 GiB of memory and 3 GB in the cache.

  up              boot it and leave it running
  down            end it; nothing of it is left
  status          say what runs; exit code 1 when not all does
  run CMD...      run a command in it, with its own exit status; where none is up, one is booted for the command
  shell           a terminal in it
  put FILE PATH   copy a file or directory of this machine into it
  get PATH FILE   copy a file or directory out of it
  join            make it a node of a control plane of its own, with the driver installed; prints the KUBECONFIG

The code of the tree is in it as the command `railmate`, brought up to date by every `run`.
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hack/vnode", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vfs", type=int, default=4, metavar="N", help=f"VFs a NIC, up to {MOST_VFS} (default 4)"
    )
    parser.add_argument(
        "--rdma",
        choices=("exclusive", "shared"),
        default="exclusive",
        help="RDMA namespace mode (default exclusive)",
    )
    parser.add_argument(
        "--memory", type=int, default=3072, metavar="MIB", help="the node's memory (default 3072)"
    )
    commands = ("up", "down", "status", "run", "shell", "put", "get", "join")
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    wanted = {"run": 1, "put": 2, "get": 2}.get(options.command, 0)
    if len(arguments) < wanted or (len(arguments) > wanted and options.command != "run"):
        parser.error(
            f"{options.command}: give {'a command' if options.command == 'run' else f'{wanted} arguments'}"
        )
    if not 0 <= options.vfs <= MOST_VFS:
        parser.error(f"--vfs {options.vfs}: 0 to {MOST_VFS}")
    settings = Settings(options.vfs, options.rdma, options.memory, acceleration())
    return _do(options.command, arguments, settings)


def _do(command: str, arguments: list[str], settings: Settings) -> int:
    lasting = VirtualNode(lasting_directory(), settings)
    match command:
        case "up":
            _up(lasting)
        case "down":
            from harness.vnode_join import leave

            leave(lasting)
            lasting.stop()
            progress("vnode", "down")
        case "status":
            return _status(lasting)
        case "run":
            if lasting.up:
                lasting.sync()
                return lasting.channel.attach(arguments)
            with (
                tempfile.TemporaryDirectory(prefix="railmate-vnode-") as directory,
                VirtualNode(Path(directory) / "run", settings) as node,
            ):
                return node.channel.attach(arguments)
        case "shell":
            if not sys.stdin.isatty():
                raise UsageError("shell: standard input is no terminal; use hack/vnode run bash")
            return lasting.channel.attach(["bash", "-l"], terminal=True)
        case "put":
            lasting.channel.put(Path(arguments[0]), os.path.normpath(arguments[1]))
        case "get":
            lasting.channel.get(os.path.normpath(arguments[0]), Path(arguments[1]))
        case "join":
            from harness.vnode_join import join

            _up(lasting)
            print(f"KUBECONFIG={join(lasting, tied=False).kubeconfig}")
    return 0


def _up(node: VirtualNode) -> None:
    if not node.up:
        node.start(tied=False)
    progress("vnode", "up; hack/vnode run CMD... or hack/vnode shell")


def _status(node: VirtualNode) -> int:
    running = node.running()
    for name, alive in running.items():
        print(f"{name}: {'running' if alive else 'not running'}")
    if not all(running.values()):
        return 1
    answers = node.channel.answers()
    print(f"agent: {'answers' if answers else 'does not answer'}")
    return 0 if answers else 1


if __name__ == "__main__":
    main_guard(main)
