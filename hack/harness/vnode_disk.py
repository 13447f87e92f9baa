"""What the virtual node boots from: kernel, initial RAM disk and root disk, made from the trees of vnode_packages."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cache import artefact, content_key
from harness.shell import HarnessError, need, run
from harness.vnode_packages import guest_tree, kernel_release, kernel_tree, through_loader

ROOT = Path(__file__).resolve().parents[2]
GUEST_FILES = Path(__file__).parent / "vnode_guest"
#: Where the locked dependencies and the code of the driver are in the node.
PACKAGES_DIR, OWN_DIR = "/usr/lib/railmate/packages", "/usr/lib/railmate/own"
_LOCK = ROOT / "driver" / "requirements.lock"
_BOOT_MODULES = ("virtio_pci", "virtio_blk", "ext4")
_DISK_SIZE = "8G"  # sparse; what the node writes goes to a temporary file
_DIRECTORIES = ("usr/lib/vnode", "root", "var/lib/kubelet", "var/lib/containerd", "opt/cni/bin")
_COMMAND = f"""\
#!/bin/sh
export PYTHONPATH={OWN_DIR}:{PACKAGES_DIR}
exec python3 -c 'import sys; from railmate.cli.main import main; sys.exit(main())' "$@"
"""


@dataclass(frozen=True)
class Boot:
    """Files on this machine."""

    kernel: Path
    initrd: Path
    disk: Path


def boot_files() -> Boot:
    """Everything that `VirtualNode` starts, built if need be."""
    kernel, modules = kernel_tree(), own_modules()
    release = kernel_release(kernel)
    return Boot(
        kernel / "usr/lib/modules" / release / "vmlinuz",
        _initrd(kernel, release),
        _disk(kernel, release, modules),
    )


def own_modules() -> list[Path]:
    """The kernel modules that stand in for drivers of absent silicon, built with the compiler and headers of the
    kernel's tree.

    The compiler runs in the tree as its root, and in an environment of its own.
    """
    tree = kernel_tree()
    release, sources = kernel_release(tree), sorted(GUEST_FILES.glob("*.c"))

    def make(directory: Path) -> None:
        place = Path("tmp") / f"railmate-{directory.name}"
        work = tree / place
        work.mkdir(parents=True)
        try:
            for source in sources:
                shutil.copy(source, work)
            (work / "Makefile").write_text(f"obj-m := {' '.join(f'{one.stem}.o' for one in sources)}\n")
            headers = f"/usr/src/linux-headers-{release}"
            inside = (
                'mount --bind /proc "$0/proc" && exec nice chroot "$0" "$@"'  # objtool reads a limit in /proc
            )
            run([
                need("unshare", "util-linux"), "--mount", "--propagation", "private", "sh", "-c", inside, tree,
                "/usr/bin/env", "-i", "PATH=/usr/bin:/usr/sbin",
                "make", "-j2", "-C", headers, f"M=/{place}", "AWK=gawk", "modules",
            ])  # fmt: skip
            for source in sources:
                shutil.copy(work / f"{source.stem}.ko", directory)
        finally:
            shutil.rmtree(work)

    key = content_key(tree.parent.name, release, *sources)
    built = artefact("vnode-modules", key, make, "building the drivers of simulated GPUs and switches")
    return sorted(built.glob("*.ko"))


def dependencies(listing: str, names: Iterable[str]) -> list[str]:
    """Files of modules and of what they need, in the order of loading, from the text of modules.dep.

    Built-in modules are not listed there and need no file.
    """
    needs: dict[str, list[str]] = {}
    files: dict[str, str] = {}
    for line in listing.splitlines():
        file, _, rest = line.partition(":")
        needs[file] = rest.split()
        files[Path(file).name.partition(".")[0].replace("-", "_")] = file
    order: dict[str, None] = {}
    for name in names:
        module = files.get(name.replace("-", "_"))
        if module is not None:
            for one in (*reversed(needs[module]), module):  # modules.dep names the direct needs first
                order.setdefault(one)
    return list(order)


def cpio(entries: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive of files, path to mode and data, as the kernel unpacks it.

    The format is that of the kernel's Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    packed = bytearray()
    for inode, (path, (mode, data)) in enumerate([*entries.items(), ("TRAILER!!!", (0, b""))], start=1):
        name = path.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
        packed += b"070701" + b"".join(b"%08X" % value for value in fields) + name
        packed += bytes(-len(packed) % 4) + data
        packed += bytes(-len(packed) % 4)
    return bytes(packed)


def _initrd(kernel: Path, release: str) -> Path:
    guest = guest_tree()
    key = content_key(kernel.parent.name, release, guest.parent.name, GUEST_FILES, *_BOOT_MODULES)

    def make(directory: Path) -> None:
        modules = kernel / "usr/lib/modules" / release
        if not (modules / "modules.dep").exists():  # the package's installation would have made it
            run(["chroot", kernel, "depmod", release])
        wanted = dependencies((modules / "modules.dep").read_text(), _BOOT_MODULES)
        entries: dict[str, tuple[int, bytes]] = {}

        def add(path: str, data: bytes, mode: int = stat.S_IFREG | 0o644) -> None:
            for parent in reversed(Path(path).parents[:-1]):
                entries.setdefault(str(parent), (stat.S_IFDIR | 0o755, b""))
            entries[path] = (mode, data)

        add("init", (GUEST_FILES / "initrd-init").read_bytes(), stat.S_IFREG | 0o755)
        add("bin/busybox", (guest / "usr/bin/busybox").read_bytes(), stat.S_IFREG | 0o755)
        for file in wanted:
            data = (modules / file).read_bytes()
            name = Path(file).name.removesuffix(".xz")
            add(f"modules/{name}", lzma.decompress(data) if file.endswith(".xz") else data)
        add("modules/order", "\n".join(Path(file).name.removesuffix(".xz") for file in wanted).encode())
        for path in sorted(GUEST_FILES.iterdir()):
            if path.is_file() and path.suffix != ".c":
                add(f"vnode/{path.name}", path.read_bytes(), stat.S_IFREG | stat.S_IMODE(path.stat().st_mode))
        (directory / "initrd").write_bytes(cpio(entries))

    return artefact("vnode-initrd", key, make, "writing the node's initial RAM disk") / "initrd"


def _disk(kernel: Path, release: str, own: Sequence[Path]) -> Path:
    guest, packages = guest_tree(), _packages()
    key = content_key(
        guest.parent.name,
        kernel.parent.name,
        *(module.parent.name for module in own),
        packages.parent.name,
        _DISK_SIZE,
        _COMMAND,
        *_DIRECTORIES,
    )

    def make(directory: Path) -> None:
        root = directory / "root"
        run(["cp", "-a", "--reflink=auto", guest, root])
        for pattern in ("var/cache/apt/*", "var/lib/apt/lists/*", "var/log/*"):
            for path in root.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        modules = root / "usr/lib/modules" / release
        modules.parent.mkdir(exist_ok=True)
        run(["cp", "-a", "--reflink=auto", kernel / "usr/lib/modules" / release, modules])
        for name in ("vmlinuz", "build", "source"):
            (modules / name).unlink(missing_ok=True)
        (modules / "updates").mkdir(exist_ok=True)
        for module in own:
            shutil.copy(module, modules / "updates")
        run(["chroot", root, "depmod", release])
        target = root / PACKAGES_DIR.lstrip("/")
        target.parent.mkdir(parents=True)
        run(["cp", "-a", "--reflink=auto", packages, target])
        for name in _DIRECTORIES:
            (root / name).mkdir(parents=True, exist_ok=True)
        command = root / "usr/local/bin/railmate"
        command.write_text(_COMMAND)
        command.chmod(0o755)
        (root / "etc/resolv.conf").write_text("")
        (root / "etc/hosts").write_text("127.0.0.1 localhost vnode\n::1 localhost\n")
        write_disk(directory / "root.ext4", root, _DISK_SIZE)
        shutil.rmtree(root)

    return artefact("vnode-disk", key, make, "writing the node's root disk") / "root.ext4"


def write_disk(out: Path, tree: Path, size: str) -> None:
    """An ext4 disk with a tree's files in it. Without a journal: no disk of the node outlives it."""
    mke2fs = need("mke2fs", "e2fsprogs")
    run(
        [
            mke2fs,
            "-q",
            "-t",
            "ext4",
            "-O",
            "^has_journal",
            "-m",
            "0",
            "-E",
            "root_owner=0:0",
            "-d",
            tree,
            out,
            size,
        ]
    )


def _packages() -> Path:
    """The driver's locked dependencies for the Python of the node."""
    guest = guest_tree()
    version = python_version(guest)

    def make(directory: Path) -> None:
        target = directory / "packages"
        run([
            sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--require-hashes",
            "--only-binary=:all:", "--no-compile", "--implementation=cp", f"--python-version={version}",
            f"--target={target}", "--requirement", _LOCK,
        ])  # fmt: skip
        shutil.rmtree(target / "kubernetes/aio", ignore_errors=True)  # the asyncio copy of the client: 68 MiB
        compile_tree(guest, target, PACKAGES_DIR, r"/kubernetes/client/(models|api)/[^_]")

    key = content_key(_LOCK, version)
    return (
        artefact("vnode-packages", key, make, "fetching the locked dependencies for the node's Python")
        / "packages"
    )


def own_code() -> Path:
    """railmate and railmate_api as they are in the tree now, compiled for the node's Python."""
    guest = guest_tree()
    sources = [
        path
        for package in (ROOT / "driver/railmate", ROOT / "api/railmate_api")
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    names = [str(path.relative_to(ROOT)) for path in sources]

    def make(directory: Path) -> None:
        own = directory / "own"
        for path, name in zip(sources, names, strict=True):
            copy = own / name.partition("/")[2]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        compile_tree(guest, own, OWN_DIR)

    parts = [part for path, name in zip(sources, names, strict=True) for part in (name, path)]
    return artefact("vnode-own", content_key(guest.parent.name, *parts), make, "compiling railmate") / "own"


def python_version(tree: Path) -> str:
    """Version of a tree's Python, as in 3.13."""
    for path in sorted((tree / "usr/bin").iterdir()):
        if match := re.fullmatch(r"python(3\.\d+)", path.name):
            return match[1]
    raise HarnessError(f"{tree} has no Python; delete vnode-root-* in the cache and repeat")


def compile_tree(guest: Path, tree: Path, place: str, but: str = "^$") -> None:
    """Compiles a tree that will be at `place` in the node, by the node's Python, but here: there it takes minutes."""
    python = through_loader(guest, f"usr/bin/python{python_version(guest)}")
    run(
        [*python, "-s", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-x", but, "-s", tree,
         "-p", place, tree],
        env={"PYTHONHOME": str(guest / "usr"), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""},
    )  # fmt: skip
    if not any(tree.rglob("__pycache__")):
        raise HarnessError(f"nothing in {os.fspath(tree)} was compiled")
