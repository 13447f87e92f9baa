"""Packages of the machine's own Debian or Ubuntu, unpacked into the cache and never installed.

Installing docker.io would start a daemon in the machine's own namespaces and change its firewall; unpacked, its
programs run where the bench wants them and nothing of them is left.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cache import artefact, content_key
from harness.shell import HarnessError, need, progress, run

_APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root")  # the _apt user cannot write into root's cache


@dataclass(frozen=True)
class Distribution:
    """What /etc/os-release and apt say about the machine."""

    id: str  # debian or ubuntu (or a derivative's own name)
    codename: str
    mirror: str  # URI of the archive the machine itself uses
    components: str  # comma-separated
    keyring: str


@dataclass(frozen=True)
class Unpacked:
    """A tree of unpacked packages, and the environment in which its programs run."""

    root: Path

    def environment(self) -> dict[str, str]:
        library = [self.root / part / library_triplet() for part in ("usr/lib", "lib")]
        return {
            "PATH": ":".join([f"{self.root}/railmate-bin", f"{self.root}/usr/sbin", f"{self.root}/usr/bin",
                              f"{self.root}/sbin", f"{self.root}/bin", "/usr/local/sbin", "/usr/local/bin",
                              "/usr/sbin", "/usr/bin", "/sbin", "/bin"]),
            "LD_LIBRARY_PATH": ":".join(str(path) for path in library),
            # Where a program was built to look for its own parts below /usr.
            "XTABLES_LIBDIR": self._own_or_host(f"usr/lib/{library_triplet()}/xtables"),
            "PERL5LIB": str(self.root / "usr/share/perl5"),
        }  # fmt: skip

    def _own_or_host(self, part: str) -> str:
        own = self.root / part
        return str(own) if own.is_dir() else f"/{part}"


def library_triplet() -> str:
    """The directory name under /usr/lib of this machine's architecture."""
    return f"{platform.machine()}-linux-gnu"


def unpacked(name: str, packages: Sequence[str], optional: Sequence[str] = ()) -> Unpacked:
    """The packages, with what they depend on and the machine lacks, unpacked into the cache.

    `optional` packages are left out where the distribution does not have them.
    Raises HarnessError when apt cannot find or fetch them.
    """
    key = content_key(os_release().get("VERSION_CODENAME", ""), platform.machine(), *packages, *optional)

    def make(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".deb-") as scratch:
            for archive in _download(packages, optional, Path(scratch)):
                run(["dpkg", "-x", archive, directory])
        _commands_behind_alternatives(directory)

    return Unpacked(
        artefact(f"deb-{name}", key, make, f"fetching {', '.join(packages)} and their dependencies")
    )


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The fields of os-release; empty where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition("=") for line in lines if "=" in line)
    return {name: value.strip().strip('"') for name, _, value in fields}


def distribution(apt_dir: Path = Path("/etc/apt"), release: Mapping[str, str] | None = None) -> Distribution:
    """The machine's distribution and the archive that it is configured to use.

    Raises HarnessError where the machine is no Debian or Ubuntu.
    """
    release = os_release() if release is None else release
    family = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    codename = release.get("UBUNTU_CODENAME") or release.get("VERSION_CODENAME", "")
    ubuntu = "ubuntu" in family
    if not (ubuntu or "debian" in family) or not codename:
        raise HarnessError(
            f"a node image is made from Debian or Ubuntu packages and this machine is {release.get('ID', 'unknown')}; "
            "start a Docker engine that can pull the kind node image and run the command again"
        )
    for uri, suites, components in _apt_sources(apt_dir):
        if codename in suites and "main" in components:
            return Distribution(
                id="ubuntu" if ubuntu else "debian",
                codename=codename,
                mirror=uri,
                components="main,universe" if ubuntu else "main",
                keyring=f"/usr/share/keyrings/{'ubuntu' if ubuntu else 'debian'}-archive-keyring.gpg",
            )
    raise HarnessError(
        f"no apt source in {apt_dir} offers {codename} main; restore the distribution's own source"
    )


def _apt_sources(apt_dir: Path) -> list[tuple[str, list[str], list[str]]]:
    """(URI, suites, components) of every binary package source: deb822 files and one-line lists."""
    found = []
    for file in sorted(apt_dir.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", file.read_text()):
            lines = [line for line in stanza.splitlines() if not line.startswith("#")]
            fields = {
                name.lower(): value.split()
                for name, value in re.findall(
                    r"^(\S+):((?:.*)(?:\n[ \t].*)*)", "\n".join(lines), re.MULTILINE
                )
            }
            if "deb" in fields.get("types", []) and fields.get("enabled") != ["no"]:
                for uri in fields.get("uris", []):
                    found.append((uri, fields.get("suites", []), fields.get("components", [])))
    for file in [apt_dir / "sources.list", *sorted(apt_dir.glob("sources.list.d/*.list"))]:
        if not file.exists():
            continue
        for line in file.read_text().splitlines():
            if match := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)", line):
                found.append((match[1], [match[2]], match[3].split()))
    return found


def _download(packages: Sequence[str], optional: Sequence[str], directory: Path) -> list[Path]:
    need("apt-get", "apt")
    try:
        return _try_download(packages, optional, directory)
    except HarnessError as first:
        if os.geteuid() != 0:
            raise HarnessError(
                f"{first}\nif the package lists are old or empty: apt-get update, as root"
            ) from first
        progress("apt", "package lists are missing or old, updating them")
        try:
            run([*_APT, "update"])
        except HarnessError:
            pass  # one unreachable third-party source fails the update; the next attempt decides
        return _try_download(packages, optional, directory)


def _try_download(packages: Sequence[str], optional: Sequence[str], directory: Path) -> list[Path]:
    existing = [name for name in optional if _candidate(name)]
    plan = run([*_APT, "-s", "install", "--no-install-recommends", *packages, *existing])
    wanted = missing_packages(plan)
    if wanted:
        run([*_APT, "download", *wanted], cwd=directory)
    return sorted(directory.glob("*.deb"))


def _candidate(name: str) -> bool:
    policy = run(["apt-cache", "policy", name])
    return "Candidate:" in policy and "Candidate: (none)" not in policy


def missing_packages(plan: str) -> list[str]:
    """name=version of everything that `apt-get -s install` would install or upgrade."""
    return [f"{m[1]}={m[2]}" for m in re.finditer(r"^Inst (\S+) (?:\[[^]]*\] )?\((\S+) ", plan, re.MULTILINE)]


def _commands_behind_alternatives(root: Path) -> None:
    """iptables is a link that only the package's installation makes; here it is one in a directory of our own."""
    directory = root / "railmate-bin"
    directory.mkdir()
    for multi in (root / "usr/sbin/xtables-nft-multi", root / "sbin/xtables-nft-multi"):
        if multi.exists():
            for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save",
                         "ip6tables-restore"):  # fmt: skip
                (directory / name).symlink_to(os.path.relpath(multi, directory))
            return
