"""``railmate`` and ``kubectl-railmate``.

Exit codes: 0 done, 1 the answer is no (or it failed), 2 bad usage or input.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import railmate
from railmate.errors import RailmateError, UsageError

#: Sub-commands, each a module of this package, of which only the one that is called is imported.
_COMMANDS = ("node", "topology", "slices", "claim", "explain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the console scripts' entry point."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        parsed = _parser(given[0] if given else "").parse_args(given)
        code = int(parsed.run(parsed))
        sys.stdout.flush()  # here, where it may fail with a sentence
        return code
    except UsageError as error:
        print(f"railmate: {error}", file=sys.stderr)
        return 2
    except RailmateError as error:
        print(f"railmate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader (head, less) has seen enough
        return 0
    except UnicodeEncodeError as error:
        odd = error.object[error.start]
        print(
            f"railmate: standard output cannot show {odd!a} in {error.encoding}. Set PYTHONIOENCODING=utf-8, or ask "
            "for -o json.",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print(f"railmate: output cannot be written ({error.strerror}). Send it elsewhere.", file=sys.stderr)
        _drop_output()
        return 1


def _drop_output() -> None:
    """Keeps the interpreter from complaining at its exit of what it could not write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(command: str = "") -> argparse.ArgumentParser:
    """With the parser of the command alone, where it is one; else with all."""
    parser = argparse.ArgumentParser(
        prog="railmate", description="GPU and RDMA NIC pairs that share a PCIe switch, for Kubernetes pods."
    )
    parser.add_argument("--version", action="version", version=f"railmate {railmate.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in (command,) if command in _COMMANDS else _COMMANDS:
        import_module(f"railmate.cli.{name}").add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
