"""Container images as archives, written without an engine or a registry.

The same input gives the same bytes: entries are sorted, times are zero, owner is root.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from harness.shell import HarnessError

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def architecture() -> str:
    """This machine's architecture in the words of OCI and Go. Raises HarnessError for one without a name here."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise HarnessError(f"no image can be made for {machine}; known: {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[machine]


def write_image(
    out: Path,
    ref: str,
    layers: Sequence[Path | Mapping[str, Path]],
    entrypoint: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    cmd: Sequence[str] = (),
    user: str = "",
    workdir: str = "",
    labels: Mapping[str, str] | None = None,
    stop_signal: str = "",
    compress: bool = True,
    keep_owners: bool = False,
) -> str:
    """Writes an image archive and returns the image's id (sha256:… of its configuration).

    ref: name:tag. A layer is a directory, whose tree becomes the root, or a mapping from absolute paths in the
    image to files of this machine (directories on the way are made, modes kept). `env` adds to PATH.
    Everything in the image belongs to root unless `keep_owners`.
    The archive is a Docker archive and an OCI layout in one, as `docker load`, `kind load image-archive` and
    `ctr images import` read them. A ref without a registry host ("busybox:stable") makes a Docker archive only:
    containerd completes such a name with its default registry, as it does for a pod's image, and takes the name
    in an OCI layout as it stands.
    Raises HarnessError for a ref without a tag or a file that cannot be read.
    """
    name, _, tag = ref.rpartition(":")
    if not name or "/" in tag:
        raise HarnessError(f"image name {ref!r} has no tag; give name:tag")
    configuration: dict[str, Any] = {
        "Entrypoint": list(entrypoint),
        "Env": [f"{key}={value}" for key, value in {"PATH": _PATH, **(env or {})}.items()],
    }
    for field, value in (
        ("Cmd", list(cmd)),
        ("User", user),
        ("WorkingDir", workdir),
        ("Labels", dict(labels or {})),
        ("StopSignal", stop_signal),
    ):
        if value:
            configuration[field] = value
    partial = out.with_name(out.name + ".part")
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        blobs = [_layer(layer, compress, keep_owners, stack, out.parent) for layer in layers]
        image = _json({
            "architecture": architecture(),
            "os": "linux",
            "config": configuration,
            "rootfs": {"type": "layers", "diff_ids": [blob.diff_id for blob in blobs]},
        })  # fmt: skip
        with tarfile.open(partial, "w", format=tarfile.GNU_FORMAT) as archive:
            image_digest = _add_blob(archive, image)
            for blob in _distinct(blobs):
                _add(archive, _blob_path(blob.digest), blob.size, blob.data)
            if _names_a_host(name):
                _add_oci_layout(archive, ref, blobs, image_digest, len(image), compress)
            manifest = [{
                "Config": _blob_path(image_digest),
                "RepoTags": [ref],
                "Layers": [_blob_path(blob.digest) for blob in blobs],
            }]  # fmt: skip
            _add_bytes(archive, "manifest.json", _json(manifest))
        partial.replace(out)
    return image_digest


def tree_of_binaries(binaries: Mapping[str, Path]) -> dict[str, Path]:
    """Layer with programs under /usr/local/bin."""
    return {f"/usr/local/bin/{name}": path for name, path in binaries.items()}


class _Layer:
    """One layer as a spooled file: digest and size as stored, diff_id of the bare tar."""

    def __init__(self, data: IO[bytes], digest: str, diff_id: str, size: int) -> None:
        self.data, self.digest, self.diff_id, self.size = data, digest, diff_id, size


class _Hashing(io.RawIOBase):
    """Passes writes on and hashes them."""

    def __init__(self, target: IO[bytes]) -> None:
        self.target, self.sha, self.size = target, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha.update(data)
        self.size += len(data)
        self.target.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return "sha256:" + self.sha.hexdigest()


def _layer(
    layer: Path | Mapping[str, Path], compress: bool, keep_owners: bool, stack: ExitStack, scratch: Path
) -> _Layer:
    stored = stack.enter_context(tempfile.TemporaryFile(dir=scratch))  # noqa: SIM115  (the stack closes it)
    outer = _Hashing(stored)
    # Level 1: the archive is read once, on this machine.
    packed = (
        gzip.GzipFile(filename="", mode="wb", fileobj=outer, compresslevel=1, mtime=0) if compress else None
    )
    inner = _Hashing(packed if packed is not None else outer)  # type: ignore[arg-type]
    try:
        with tarfile.open(fileobj=inner, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            if isinstance(layer, Path):
                _add_directory(tar, layer, keep_owners)
            else:
                _add_mapping(tar, layer)
    except OSError as error:
        raise HarnessError(f"image layer: {error.filename}: {error.strerror}") from error
    if packed is not None:
        packed.close()
    stored.seek(0)
    return _Layer(stored, outer.digest, inner.digest, outer.size)


def _add_directory(tar: tarfile.TarFile, root: Path, keep_owners: bool) -> None:
    if not root.is_dir():
        raise HarnessError(f"image layer {root} is not a directory")
    for directory, subdirectories, files in os.walk(root):
        subdirectories.sort()
        here = Path(directory)
        links = [name for name in subdirectories if (here / name).is_symlink()]
        if here != root:
            tar.addfile(_plain(tar.gettarinfo(here, str(here.relative_to(root))), keep_owners))
        for name in sorted([*files, *links]):
            _add_file(tar, here / name, str((here / name).relative_to(root)), keep_owners)


def _add_mapping(tar: tarfile.TarFile, layer: Mapping[str, Path]) -> None:
    made: set[str] = set()
    for target, source in sorted(layer.items()):
        parts = Path(target.lstrip("/"))
        for parent in reversed(parts.parents[:-1]):
            if str(parent) not in made:
                made.add(str(parent))
                entry = tarfile.TarInfo(str(parent))
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
        _add_file(tar, source.resolve(strict=True), str(parts))


def _add_file(tar: tarfile.TarFile, source: Path, name: str, keep_owners: bool = False) -> None:
    tar.inodes = {}  # type: ignore[attr-defined]  # names of one file are stored as files each, whatever order
    entry = tar.gettarinfo(source, name)
    if entry is None:  # a socket: it means nothing without its process
        return
    _plain(entry, keep_owners)
    if entry.isreg():
        with source.open("rb") as content:
            tar.addfile(entry, content)
    else:
        tar.addfile(entry)


def _plain(entry: tarfile.TarInfo, keep_owners: bool) -> tarfile.TarInfo:
    if not keep_owners:
        entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def _add_oci_layout(
    archive: tarfile.TarFile, ref: str, blobs: Sequence[_Layer], image: str, size: int, compress: bool
) -> None:
    suffix = "+gzip" if compress else ""
    manifest = _json({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": image, "size": size},
        "layers": [
            {"mediaType": f"application/vnd.oci.image.layer.v1.tar{suffix}", "digest": b.digest, "size": b.size}
            for b in blobs
        ],
    })  # fmt: skip
    digest = _add_blob(archive, manifest)
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest,
            "size": len(manifest),
            "platform": {"os": "linux", "architecture": architecture()},
            "annotations": {
                "io.containerd.image.name": ref,
                "org.opencontainers.image.ref.name": ref.rpartition(":")[2],
            },
        }],
    }  # fmt: skip
    _add_bytes(archive, "index.json", _json(index))
    _add_bytes(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))


def _names_a_host(name: str) -> bool:
    """Whether the first part of an image name is a registry host, by the rule of the reference grammar."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def _distinct(blobs: Sequence[_Layer]) -> list[_Layer]:
    return list({blob.digest: blob for blob in blobs}.values())


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add_blob(archive: tarfile.TarFile, data: bytes) -> str:
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    _add_bytes(archive, _blob_path(digest), data)
    return digest


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    _add(archive, name, len(data), io.BytesIO(data))


def _add(archive: tarfile.TarFile, name: str, size: int, data: IO[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    archive.addfile(entry, data)
