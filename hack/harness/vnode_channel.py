"""Commands in the virtual node: the machine's side of vnode_guest/agent.py, whose docstring has the protocol."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import sys
import tarfile
import termios
import threading
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.shell import HarnessError

_STDIN, _STDOUT, _STDERR, _SIZE, _EXIT = range(5)
_HEADER = struct.Struct(">BI")
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Done:
    """What a command in the node left: its exit status (128 + the signal that ended it) and its output."""

    code: int
    stdout: bytes
    stderr: bytes


class Channel:
    """The way to the agent that listens at a TCP port of loopback. Any number of commands may run at once."""

    def __init__(self, port: int) -> None:
        self._port = port

    def answers(self, seconds: float = 5) -> bool:
        """Whether the agent runs a command."""
        try:
            with self._started(["true"], {}, None, None, seconds) as link:
                return any(kind == _EXIT for kind, _ in frames(link))
        except (OSError, HarnessError):
            return False

    def execute(
        self, argv: Sequence[str | Path], *, stdin: bytes = b"", env: Mapping[str, str] | None = None,
        cwd: str | None = None, timeout: float | None = None,
    ) -> Done:  # fmt: skip
        """Runs a command to its end, whatever its status. `timeout` in seconds, between two pieces of output.

        Raises HarnessError when it cannot be started, says nothing for too long, or the node is gone.
        """
        line = shlex.join(str(word) for word in argv)
        output = {_STDOUT: io.BytesIO(), _STDERR: io.BytesIO()}
        try:
            with self._started(argv, env or {}, cwd, None, timeout) as link:
                writer = threading.Thread(target=_feed, args=(link, stdin), daemon=True)
                writer.start()
                for kind, data in frames(link):
                    if kind == _EXIT:
                        return Done(_status(data), output[_STDOUT].getvalue(), output[_STDERR].getvalue())
                    output[kind].write(data)
        except TimeoutError as error:
            raise HarnessError(
                f"`{line}` in the virtual node gave no sign of life for {timeout:.0f} s"
            ) from error
        except OSError as error:
            raise HarnessError(
                f"the virtual node cannot be reached: {error}; see hack/vnode status"
            ) from error
        raise HarnessError(f"the virtual node went away while `{line}` ran; see hack/vnode status")

    def run(self, *argv: str, stdin: bytes = b"", timeout: float | None = 120) -> str:
        """Runs a command and returns its output. Raises HarnessError with what it said when its status is not 0."""
        done = self.execute(argv, stdin=stdin, timeout=timeout)
        if done.code:
            said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace").splitlines()[-25:]
            lines = "\n".join("    " + one for one in said)
            raise HarnessError(
                f"`{shlex.join(argv)}` in the virtual node failed with code {done.code}:\n{lines}"
            )
        return done.stdout.decode(errors="replace")

    def attach(self, argv: Sequence[str], *, terminal: bool = False) -> int:
        """Runs a command with this process's own streams; returns its exit status. `terminal`: with one of its own."""
        size = list(os.get_terminal_size())[::-1] if terminal else None
        env = {"TERM": os.environ.get("TERM", "dumb")}
        with (
            self._started(argv, env, None, size, None) as link,
            _raw_terminal(link) if terminal else nullcontext(),
        ):
            return _relay(link)

    def put(self, source: Path, target: str) -> None:
        """Copies a file, or a directory with all that is in it, to a path in the node."""
        packed = io.BytesIO()
        parent, _, name = target.rstrip("/").rpartition("/")
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, name)
        self.run("mkdir", "-p", parent or "/")
        self.run("tar", "-x", "--no-same-owner", "-C", parent or "/", stdin=packed.getvalue())

    def get(self, source: str, target: Path) -> None:
        """Copies a file or a directory of the node to a path of this machine; what is there is replaced."""
        parent, _, name = source.rstrip("/").rpartition("/")
        done = self.execute(["tar", "-c", "-C", parent or "/", name])
        if done.code:
            raise HarnessError(
                f"{source} of the virtual node: {done.stderr.decode(errors='replace').strip()}"
            )
        scratch = target.with_name(f".{target.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(scratch, filter="data")
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        (scratch / name).replace(target)
        scratch.rmdir()

    @contextmanager
    def _started(
        self, argv: Sequence[str | Path], env: Mapping[str, str], cwd: str | None, size: list[int] | None,
        timeout: float | None,
    ) -> Iterator[socket.socket]:  # fmt: skip
        order = {"argv": [str(word) for word in argv], "env": dict(env), "cwd": cwd, "tty": size}
        with socket.create_connection(("127.0.0.1", self._port), timeout=timeout) as link:
            link.sendall(json.dumps(order).encode() + b"\n")
            yield link


def frames(link: socket.socket) -> Iterator[tuple[int, bytes]]:
    """What the agent sends, to the end of the connection."""
    with link.makefile("rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            kind, size = _HEADER.unpack(header)
            yield kind, stream.read(size)


def _status(data: bytes) -> int:
    result = json.loads(data)
    if isinstance(result, str):
        raise HarnessError(f"in the virtual node: {result}")
    return int(result)


def _send(link: socket.socket, kind: int, data: bytes) -> None:
    link.sendall(_HEADER.pack(kind, len(data)) + data)


def _feed(link: socket.socket, data: bytes) -> None:
    try:
        for start in range(0, len(data), _CHUNK):
            _send(link, _STDIN, data[start : start + _CHUNK])
        _send(link, _STDIN, b"")
    except OSError:
        pass  # it ended without reading all its input


def _relay(link: socket.socket) -> int:
    """Standard input to the command and its output to ours, until it ends."""

    def feed() -> None:
        try:
            while data := os.read(0, _CHUNK):
                _send(link, _STDIN, data)
            _send(link, _STDIN, b"")
        except OSError:
            pass  # the command has ended

    threading.Thread(target=feed, daemon=True).start()
    sinks: dict[int, IO[bytes]] = {_STDOUT: sys.stdout.buffer, _STDERR: sys.stderr.buffer}
    for kind, data in frames(link):
        if kind == _EXIT:
            return _status(data)
        sinks[kind].write(data)
        sinks[kind].flush()
    raise HarnessError("the virtual node went away; see hack/vnode status")


@contextmanager
def _raw_terminal(link: socket.socket) -> Iterator[None]:
    """Keys go to the command as they are, and it hears of the window's new size."""
    before = termios.tcgetattr(0)

    def resized(*_: object) -> None:
        _send(link, _SIZE, json.dumps(list(os.get_terminal_size())[::-1]).encode())

    previous = signal.signal(signal.SIGWINCH, resized)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, previous)
