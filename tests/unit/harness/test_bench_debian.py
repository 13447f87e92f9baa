"""What is read from the machine's apt configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.debian import distribution, missing_packages, os_release
from harness.shell import HarnessError

DEBIAN = {"ID": "debian", "VERSION_CODENAME": "trixie"}
UBUNTU = {"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_CODENAME": "noble"}


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_deb822_source_of_the_release_is_found_among_others(apt: Path) -> None:
    (apt / "sources.list.d" / "a-vendor.sources").write_text(
        "Types: deb\nURIs: http://vendor.example/deb\nSuites: trixie\nComponents: stable\n"
    )
    (apt / "sources.list.d" / "debian.sources").write_text(
        "# the archive\nTypes: deb-src\nURIs: http://sources.example/debian\nSuites: trixie\nComponents: main\n\n"
        "Types: deb\n# mirror\nURIs: http://mirror.example/debian\nSuites: trixie-updates\n trixie\nComponents: main\n"
    )
    found = distribution(apt, DEBIAN)
    assert (found.mirror, found.codename, found.components) == (
        "http://mirror.example/debian",
        "trixie",
        "main",
    )
    assert found.keyring.endswith("/debian-archive-keyring.gpg")


def test_one_line_source_is_read_and_ubuntu_adds_universe(apt: Path) -> None:
    (apt / "sources.list").write_text(
        "# deb http://old.example/ubuntu noble main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/ubuntu noble main restricted\n"
    )
    found = distribution(apt, UBUNTU)
    assert (found.id, found.mirror, found.components) == (
        "ubuntu",
        "http://mirror.example/ubuntu",
        "main,universe",
    )


def test_disabled_source_does_not_count(apt: Path) -> None:
    (apt / "sources.list.d" / "debian.sources").write_text(
        "Enabled: no\nTypes: deb\nURIs: http://mirror.example/debian\nSuites: trixie\nComponents: main\n"
    )
    with pytest.raises(HarnessError, match=r"no apt source in .* offers trixie main"):
        distribution(apt, DEBIAN)


def test_other_distributions_are_told_what_to_do(apt: Path) -> None:
    with pytest.raises(HarnessError, match="this machine is fedora; start a Docker engine"):
        distribution(apt, {"ID": "fedora", "VERSION_CODENAME": ""})


def test_packages_to_fetch_are_those_apt_would_install_or_upgrade() -> None:
    plan = (
        "Inst runc (1.1.5+ds1-1+deb12u1 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [amd64])\n"
        "Inst tini [0.18.0-1] (0.19.0-1+b3 Debian:12.15/oldstable [amd64])\n"
        "Conf runc (1.1.5+ds1-1+deb12u1 Debian:12.15/oldstable [amd64])\n"
    )
    assert missing_packages(plan) == ["runc=1.1.5+ds1-1+deb12u1", "tini=0.19.0-1+b3"]


def test_os_release_values_lose_their_quotes(tmp_path: Path) -> None:
    file = tmp_path / "os-release"
    file.write_text('NAME="Debian GNU/Linux"\nID=debian\n\n# x\n')
    assert os_release(file) == {"NAME": "Debian GNU/Linux", "ID": "debian"}
    assert os_release(tmp_path / "none") == {}
