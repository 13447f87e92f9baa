"""Commands, errors and progress lines shared by the bench."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_STARTED = time.monotonic()
_TAIL_LINES = 25


class HarnessError(Exception):
    """Something on the bench failed; the message names the object, the cause and the next step."""


class UsageError(HarnessError):
    """Bad arguments; the command ends with exit code 2."""


def progress(subject: str, text: str) -> None:
    """Prints one line to stderr: seconds since this program started, what it is about, what happens."""
    print(f"[{time.monotonic() - _STARTED:4.0f}s] {subject}: {text}", file=sys.stderr, flush=True)


def main_guard(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> None:
    """Runs a command's main function; errors become one message and an exit code, not a traceback."""
    arguments = sys.argv[1:] if argv is None else argv
    program = "hack/" + Path(sys.argv[0]).stem.removesuffix("_cli")
    try:
        code = main(arguments)
    except HarnessError as error:
        print(f"{program}: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command picks up where it stopped", file=sys.stderr)
        code = 130
    sys.exit(code)


def need(tool: str, package: str) -> str:
    """Path of a program of the machine. Raises HarnessError that names the package which has it."""
    # /usr/sbin is not on everybody's PATH, and most of what a bench needs lives there.
    path = shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        raise HarnessError(f"{tool} is missing; install it (Debian, Ubuntu: apt-get install {package})")
    return path


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, indented, or a note that there is none."""
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return "    (no log)"
    return "\n".join("    " + line for line in text) or "    (log is empty)"


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    log: Path | None = None,
    timeout: float | None = None,
) -> str:
    """Runs a command and returns its standard output.

    With `log` the output (both streams) goes to that file instead and the result is empty.
    `env` adds to the environment. `timeout` is in seconds.
    Raises HarnessError with the command, its exit code and the end of its output.
    """
    words = [str(word) for word in argv]
    environment = None if env is None else {**os.environ, **env}
    data = stdin.encode() if isinstance(stdin, str) else stdin
    line = shlex.join(words)
    shown = line if len(line) < 300 else line[:300] + " …"
    try:
        if log is None:
            done = subprocess.run(
                words, cwd=cwd, env=environment, input=data, stdin=None if data is not None else subprocess.DEVNULL,
                capture_output=True, timeout=timeout, check=False,
            )  # fmt: skip
            output, detail = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as sink:
                done = subprocess.run(
                    words, cwd=cwd, env=environment, input=data, stdin=None if data is not None else subprocess.DEVNULL,
                    stdout=sink, stderr=subprocess.STDOUT, timeout=timeout, check=False,
                )  # fmt: skip
            output, detail = "", ""
    except FileNotFoundError as error:
        raise HarnessError(f"{words[0]} is missing: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"`{shown}` did not finish within {timeout:.0f} s") from error
    if done.returncode == 0:
        return output
    if log is not None:
        raise HarnessError(f"`{shown}` failed with code {done.returncode}; end of {log}:\n{tail(log)}")
    said = (detail.strip() or output.strip()).splitlines()[-_TAIL_LINES:]
    raise HarnessError(
        f"`{shown}` failed with code {done.returncode}:\n" + "\n".join("    " + s for s in said)
    )
