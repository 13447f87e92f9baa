"""Debian packages of the virtual node: its root file system, its kernel with a compiler, the QEMU that runs it.

All are trees in the cache, made by mmdebstrap from the archive that the machine itself uses; nothing is installed on
the machine. The node is always Debian 13, whatever the machine is: its kernel moves soft-RoCE devices between
network namespaces and its QEMU has vfio-user devices, which those of Debian 12 and 13 proper have not.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from harness import debian
from harness.cache import artefact, content_key, log_file
from harness.shell import HarnessError, run

SUITE, BACKPORTS = "trixie", "trixie-backports"
MIRROR_VARIABLE = "RAILMATE_DEBIAN_MIRROR"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
GUEST_PACKAGES = (
    "bash", "busybox-static", "ca-certificates", "e2fsprogs", "ethtool", "ibverbs-providers", "ibverbs-utils",
    "iproute2", "iptables", "kmod", "libnuma1", "mount", "nftables", "pciutils", "perftest", "procps", "python3",
    "rdma-core", "tini", "util-linux",
)  # fmt: skip
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
# The compiler comes with the kernel, so that headers and kernel are of one version.
_KERNEL_PACKAGES = (
    "base-files", "bash", "coreutils", "dash", "diffutils", "findutils", "gawk", "gcc", "grep", "kmod", "make", "sed",
    "linux-headers-amd64", "linux-image-amd64",
)  # fmt: skip
_QEMU_PACKAGES = ("qemu-system-x86",)
_FROM_BACKPORTS = ("--variant=extract", f'--aptopt=APT::Default-Release "{BACKPORTS}"')


class UnavailableError(HarnessError):
    """There can be no virtual node on this machine now; the message says what it lacks."""


def mirror() -> str:
    """The Debian archive to take packages from: RAILMATE_DEBIAN_MIRROR, else the one the machine is configured with.

    Raises UnavailableError where the machine is no x86-64 Debian and the variable is not set.
    """
    if platform.machine() != "x86_64":
        raise UnavailableError(
            f"the virtual node is an x86-64 machine and cannot be built on {platform.machine()}"
        )
    if configured := os.environ.get(MIRROR_VARIABLE):
        return configured
    system = debian.distribution()
    if system.id != "debian":
        raise UnavailableError(
            f"the virtual node is made from Debian packages and this machine uses an archive of {system.id}; "
            f"set {MIRROR_VARIABLE} to the URI of a Debian archive"
        )
    return system.mirror


def guest_tree() -> Path:
    """The node's root file system: installed packages, no kernel (1 to 2 minutes)."""
    options = ["--variant=minbase", *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT)]
    return _tree("vnode-root", GUEST_PACKAGES, options, "installing the node's packages into a directory")


def kernel_tree() -> Path:
    """The kernel, its modules, its headers and a compiler, unpacked: also a root to build further modules in."""
    what = "fetching the node's kernel and a compiler for it"
    return _tree("vnode-kernel", _KERNEL_PACKAGES, _FROM_BACKPORTS, what)


def qemu_tree() -> Path:
    """QEMU and every library it needs, unpacked; `qemu_command` runs it."""
    return _tree("vnode-qemu", _QEMU_PACKAGES, _FROM_BACKPORTS, "fetching QEMU")


def _tree(name: str, packages: Sequence[str], options: Sequence[str], doing: str) -> Path:
    key = content_key(SUITE, BACKPORTS, *packages, *options)

    def make(directory: Path) -> None:
        if os.geteuid() != 0:
            raise HarnessError("the virtual node's file systems are made by root: run the command as root")
        archive = mirror()
        if not _KEYRING.exists():
            raise HarnessError(f"{_KEYRING} is missing; install it (apt-get install debian-archive-keyring)")
        tool = debian.unpacked("mmdebstrap", ("mmdebstrap",))
        environment = {variable: tool.environment()[variable] for variable in ("PATH", "PERL5LIB")}
        sources = [f"deb [signed-by={_KEYRING}] {archive} {suite} main" for suite in (SUITE, BACKPORTS)]
        try:
            run(
                ["nice", "mmdebstrap", "--mode=root", *options, f"--include={','.join(packages)}",
                 '--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Languages "none"',
                 SUITE, directory / "root", *sources],
                env={**environment, "TMPDIR": "/tmp"}, log=log_file(name),
            )  # fmt: skip
        except HarnessError as error:
            raise UnavailableError(f"packages of {SUITE} cannot be had from {archive}: {error}") from error

    return artefact(name, key, make, doing) / "root"


def through_loader(tree: Path, program: str) -> list[str | Path]:
    """A command that runs a program of a tree with the tree's own C library, on a machine that may be older."""
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    return [tree / "usr/lib64/ld-linux-x86-64.so.2", "--library-path", libraries, tree / program]


def qemu_command() -> tuple[list[str | Path], dict[str, str]]:
    """QEMU's command, to be followed by its arguments, and its environment."""
    tree = qemu_tree()
    data = [
        item for name in ("qemu", "seabios", "ipxe/qemu") for item in ("-L", str(tree / "usr/share" / name))
    ]
    environment = {"QEMU_MODULE_DIR": str(tree / "usr/lib/x86_64-linux-gnu/qemu")}
    return [*through_loader(tree, "usr/bin/qemu-system-x86_64"), *data], environment


def kernel_release(tree: Path) -> str:
    """The kernel's version, as `uname -r` prints it."""
    found = [path.name for path in (tree / "usr/lib/modules").iterdir() if (path / "kernel").is_dir()]
    if len(found) != 1:
        raise HarnessError(f"{tree} has {len(found)} kernels; delete vnode-kernel-* in the cache and repeat")
    return found[0]
