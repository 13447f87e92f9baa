"""The ledger: one JSON file a claim in the plugin directory, written before anything is promised.

Unprepare knows a claim's UID only, and the claim may be gone from the API by then: the ledger alone
says what to give back. A file that cannot be read is set aside, never a reason to stop.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from railmate import files
from railmate.attach.model import NetdevSnapshot
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.claims.records import Entry, NewerRecordError, is_claim_uid, netdev_snapshot
from railmate.claims.strayrecords import StrayRecords
from railmate.errors import RailmateError, not_written
from railmate.plain import read

log = logging.getLogger(__name__)

_COPY = ".prepared"  # suffix of an entry's second copy
#: These pass, and say nothing of the file: no record is given up for them.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


class _UnreadableError(RailmateError):
    """The disk does not give out a record, nor its copy."""


class Ledger:
    """Entries by claim UID. Use it inside ``locked``: two instances of the driver share it while one
    replaces the other (rolling update)."""

    def __init__(self, plugin_dir: Path, on_set_aside: Callable[[str], None] = lambda message: None) -> None:
        """``on_set_aside`` is told of each file that was no entry, in a sentence for people."""
        self._on_set_aside = on_set_aside
        self._unreadable: set[Path] = set()  # what was told of
        self.on_stray: Callable[[], None] = lambda: None  # called after each netdev that is to be looked for
        self.plugin_dir = plugin_dir
        self._claims = plugin_dir / "claims"
        self._attached = plugin_dir / "attached"
        for directory in (plugin_dir, self._claims, self._attached):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._strays = StrayRecords(plugin_dir / "strays", "a netdev", _stray, NetdevSnapshot.to_dict)
        self.rdma_strays = StrayRecords(plugin_dir / "rdma-strays", "RDMA devices", _rdma_stray, _rdma_record)
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._asked: list[float] = []  # when each use of the lock that has not ended asked for it
        self._lock_file = plugin_dir / "serialize.lock"
        self._descriptor: int | None = None
        self._lease_lock_file = plugin_dir / "leases.lock"
        self._leasing: list[float] = []  # since when each claim's lock that a thread of ours has is held

    @property
    def attached_dir(self) -> Path:
        """Holds ``<claim uid>.<sandbox id>`` for each claim whose devices are in that sandbox."""
        return self._attached

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One thread of one instance at a time. Re-entrant within a thread."""
        asked = time.monotonic()
        self._asked.append(asked)
        try:
            with self._thread_lock:
                yield from self._with_file_lock()
        finally:
            self._asked.remove(asked)

    @contextmanager
    def leasing(self, uid: str) -> Iterator[None]:
        """One thread of one instance at a time asks for addresses of this claim, binds its functions, or undoes either,
        which may take seconds. Other claims' go on meanwhile.

        Taken before ``locked``, never within it.
        """
        with self._byte_lock(f"claim {uid}"):
            since = time.monotonic()
            self._leasing.append(since)
            try:
                yield
            finally:
                self._leasing.remove(since)

    @contextmanager
    def reserving(self, function: str) -> Iterator[None]:
        """Meanwhile this physical function and its VFs are prepared for nobody, by no instance: see ``is_reserved``.

        Taken before ``locked``, never within it. Once ``locked`` was had within it, what claims have of the function
        stands in the ledger.
        """
        with self._byte_lock(f"function {function}"):
            yield

    def is_reserved(self, function: str) -> bool:
        """Asked when ``locked``, before a claim that has something of the physical function is written."""
        try:
            with self._byte_lock(f"function {function}", wait=False):
                return False
        except BlockingIOError:
            return True

    @contextmanager
    def _byte_lock(self, key: str, *, wait: bool = True) -> Iterator[None]:
        """A lock of its own for each key, on one byte of one file, so that no files are left behind. It belongs to the
        open file (fcntl(2), open file description locks), so it is one among threads, too, and ends with its process.
        Raises BlockingIOError when another has it and it is not to be waited for."""
        descriptor = os.open(self._lease_lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # struct flock: type, whence, start, length, pid
            wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, zlib.crc32(key.encode()), 1, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, wanted)
            yield
        finally:
            os.close(descriptor)

    def busy_for(self) -> float:
        """Seconds since the longest-standing use of the lock asked for it. More than some means that it is stuck."""
        return time.monotonic() - min(self._asked, default=time.monotonic())

    def leasing_for(self) -> float:
        """Seconds that the longest-standing `leasing` of this instance has lasted, waits for the lock not counted."""
        return time.monotonic() - min(self._leasing, default=time.monotonic())

    def _with_file_lock(self) -> Iterator[None]:
        if self._depth == 0:
            self._descriptor = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def entries(self, mentioning: str = "") -> dict[str, Entry]:
        """All entries, or those in whose record that text stands, such as a pod's UID: a pod's start must not wait for
        the reading of all. Files that are none are set aside as ``<name>.bad``. Left out is what a newer railmate has
        written, and what the disk does not give out, once people have been told: see ``claims``.

        Raises RailmateError when no file can be read at the moment: claims must not be forgotten for that.
        """
        found: dict[str, Entry] = {}
        for path in sorted(self._claims.glob("*.json")):
            try:
                entry = self._read(path, mentioning)
            except NewerRecordError as error:
                log.error("%s: %s", path, error)
                continue
            except _UnreadableError as error:
                self._tell_of(
                    path,
                    f"{error} What claim {path.stem} holds is not known; delete its pod, and restart the node.",
                )
                continue
            if entry is not None:
                found[entry.claim.uid] = entry
        return found

    def claims(self) -> set[str]:
        """UIDs of all claims that have a record, readable here or not: a newer railmate's, one on a bad block. What is
        there for these claims is not to be removed."""
        return {path.stem for path in self._claims.glob("*.json")}

    def get(self, uid: str) -> Entry | None:
        path = self._path(uid)
        return self._read(path) if path.exists() else None

    def mark(self, uid: str) -> tuple[int, int] | None:
        """Of a claim's record: another whenever it has been written anew, None when it is gone. Needs no lock."""
        try:
            found = self._path(uid).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def put(self, entry: Entry, *, durable: bool = True) -> None:
        """Write the entry; ``durable`` entries survive a power cut, others only this process."""
        path, record = self._path(entry.claim.uid), entry.to_json()
        data = json.dumps(record, sort_keys=True).encode()
        try:
            if durable:
                Entry.from_json(record)  # what comes from the API may be anything
                # a second copy first: what the entry is rebuilt from when it is damaged
                files.write_bytes(path.with_suffix(_COPY), data, durable=False)
            files.write_bytes(path, data, durable=durable)
        except ValueError as error:
            raise RailmateError(
                f"{entry.claim}: its record could not be read again ({error}). Is the API server newer than 1.37?"
            ) from error
        except OSError as error:
            raise not_written(str(entry.claim), path, error) from error

    def drop(self, uid: str) -> None:
        path = self._path(uid)
        files.remove(path.with_suffix(_COPY))
        files.remove(path)

    def remove_orphaned_copies(self) -> int:
        """Remove second copies of entries that a killed writer did not come to write, or had dropped."""
        orphans = [path for path in self._claims.glob(f"*{_COPY}") if not path.with_suffix(".json").exists()]
        return sum(files.remove(path) for path in orphans)

    def remove_temporaries(self) -> int:
        """Remove what killed writers left; return how many. Under the lock no other writer is at work."""
        gate = files.remove_temporaries(self.plugin_dir, older_than=60.0)  # written without the lock
        strays = self._strays.remove_temporaries() + self.rdma_strays.remove_temporaries()
        return gate + strays + sum(files.remove_temporaries(d) for d in (self._claims, self._attached))

    # --- netdevs that did not come home with their claim
    def strays(self) -> list[NetdevSnapshot]:
        return list(self._strays.all().values())

    def put_stray(self, snapshot: NetdevSnapshot) -> None:
        self._strays.put(snapshot.pci_address, snapshot, f"netdev {snapshot.name} of {snapshot.pci_address}")
        self.on_stray()

    def drop_stray(self, pci_address: str) -> None:
        self._strays.drop(pci_address)

    # --- the gate's markers
    def markers(self) -> dict[str, set[str]]:
        """Claim UID to the sandboxes its gate is open for."""
        found: dict[str, set[str]] = {}
        for path in self._attached.iterdir():
            uid, _, sandbox = path.name.partition(".")
            if uid and sandbox:
                found.setdefault(uid, set()).add(sandbox)
        return found

    def open_gate(self, uid: str, sandbox: str, *, host_network: bool = False, nodes: str = "") -> None:
        """Let containers of this sandbox start: the claim's devices are in it, or stay on the node because the pod
        is on the host network; the gate then looks whether it really is. ``nodes`` is `Entry.nodes_word`: a container
        that was made with a CDI spec of other device nodes does not start."""
        content = _marker(host_network, nodes)
        files.write_bytes(self._attached / f"{uid}.{sandbox}", content, durable=False)

    def is_open(self, uid: str, sandbox: str) -> bool:
        return (self._attached / f"{uid}.{sandbox}").exists()

    def is_open_as(self, uid: str, sandbox: str, *, host_network: bool, nodes: str) -> bool:
        """Whether the gate is open in just these words of `open_gate`."""
        try:
            return (self._attached / f"{uid}.{sandbox}").read_bytes() == _marker(host_network, nodes)
        except OSError:
            return False

    def close_gate(self, uid: str, sandbox: str = "*") -> None:
        for marker in self._attached.glob(f"{uid}.{sandbox}"):
            files.remove(marker)

    def _path(self, uid: str) -> Path:
        if not is_claim_uid(uid):
            raise RailmateError(
                f"{uid!r} is no UID of a claim; nothing was done for it. The kubelet's log may tell more."
            )
        return self._claims / f"{uid}.json"

    def _read(self, path: Path, mentioning: str = "") -> Entry | None:
        try:
            if mentioning and json.dumps(mentioning)[1:-1].encode() not in path.read_bytes():
                return None
            return _load(path, path.stem)
        except (FileNotFoundError, IsADirectoryError):
            return None
        except OSError as error:
            if error.errno in _PASSING:
                raise RailmateError(
                    f"ledger entry {path} cannot be read ({error}). It is tried again."
                ) from error
            return self._copy_of(path, error)
        except ValueError as error:
            return self._set_aside(path, str(error))

    def _copy_of(self, path: Path, why: OSError) -> Entry:
        """In place of a record that the disk does not give out. The next write replaces that."""
        try:
            entry = _load(path.with_suffix(_COPY), path.stem)
        except (OSError, ValueError):
            raise _UnreadableError(
                f"ledger entry {path} cannot be read ({why}), and there is no copy. Look at the disk."
            ) from why
        self._tell_of(
            path, f"ledger entry {path} cannot be read ({why}); its copy is used. Look at the disk."
        )
        return entry

    def _tell_of(self, path: Path, what: str) -> None:
        """Once: it is read again and again."""
        if path not in self._unreadable:
            self._unreadable.add(path)
            log.error("%s", what)
            self._on_set_aside(what)

    def _set_aside(self, path: Path, why: str) -> Entry | None:
        """Keep the damaged file for people, and go on with the copy of what was prepared, where there is one.

        Only what happened since is lost with it: where the netdevs are. They are found when they are looked for.
        """
        aside = path.with_suffix(".bad")
        log.error("ledger entry %s cannot be used (%s); set aside as %s", path, why, aside.name)
        try:
            path.rename(aside)
            entry = _load(path.with_suffix(_COPY), path.stem)
            self.put(entry)
        except (OSError, ValueError, RailmateError) as error:
            log.error("ledger entry %s cannot be rebuilt: %s", path, error)
            self._on_set_aside(
                f"The record of claim {path.stem} was damaged ({why}) and set aside as {aside}. If its pod still runs, "
                "delete the pod, so that its devices are given back in order."
            )
            return None
        self._on_set_aside(
            f"The record of claim {path.stem} was damaged ({why}); it was rebuilt. Look at the disk."
        )
        return entry


def _marker(host_network: bool, nodes: str) -> bytes:
    return (("host" if host_network else "") + (f"\n{nodes}" if nodes else "")).encode()


def _load(path: Path, uid: str) -> Entry:
    """Raises OSError, and ValueError when the file is no entry of this claim."""
    try:
        entry = Entry.from_json(json.loads(path.read_bytes()))
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if entry.claim.uid != uid:
        raise ValueError(f"it speaks of claim {entry.claim.uid}")
    return entry


def _stray(pci_address: str, said: Any) -> NetdevSnapshot:
    stray = netdev_snapshot(said)
    if stray.pci_address != pci_address:
        raise ValueError(f"it speaks of {stray.pci_address[:40]!r}")
    return stray


def _rdma_stray(pci_address: str, said: Any) -> tuple[RdmaDeviceRef, ...]:
    return tuple(read(RdmaDeviceRef, one) for one in said["devices"])


def _rdma_record(devices: tuple[RdmaDeviceRef, ...]) -> dict[str, Any]:
    return {"devices": [asdict(one) for one in devices]}


def boot_id(proc: Path = Path("/proc")) -> str:
    """Changes with every boot (kernel Documentation/admin-guide/sysctl/kernel.rst, random/boot_id)."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()
