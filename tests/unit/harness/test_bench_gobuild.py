"""Go builds: what decides that a program is built again, in which order, and what a missing tool looks like."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import gobuild
from harness.shell import HarnessError

ETCD = gobuild.PROGRAMS["etcd"]


def test_control_plane_is_built_first_and_the_longest_build_of_it_starts() -> None:
    order = [program.name for program in gobuild.build_order(gobuild.PROGRAMS)]
    assert order[0] == "kube-apiserver"
    assert set(order[:4]) == set(gobuild.CONTROL_PLANE)
    costs = [program.cost for program in gobuild.build_order(gobuild.PROGRAMS)][4:]
    assert costs == sorted(costs, reverse=True)


def test_unknown_program_is_named() -> None:
    with pytest.raises(HarnessError, match="no Go program 'kubelett'"):
        gobuild.build_order(["kubelett"])


def test_every_program_is_pinned_by_its_go_mod() -> None:
    for program in gobuild.PROGRAMS.values():
        if not program.package.startswith("."):
            assert program.package in (program.module_dir / "go.mod").read_text(), program.name
    kubernetes = (gobuild.TOOLS / "kubernetes" / "go.mod").read_text()
    assert f"k8s.io/kubernetes {gobuild.KUBERNETES_VERSION}" in kubernetes


def test_key_changes_with_go_flags_and_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(gobuild.TOOLS / "runtime", tmp_path / "runtime")
    monkeypatch.setattr(gobuild, "TOOLS", tmp_path)
    key = gobuild.program_key(ETCD, "go1.26.8")
    assert gobuild.program_key(ETCD, "go1.26.8") == key
    assert gobuild.program_key(ETCD, "go1.26.9") != key
    assert gobuild.program_key(dataclasses.replace(ETCD, tags="other"), "go1.26.8") != key
    with (tmp_path / "runtime" / "go.sum").open("a") as file:
        file.write("example.com/new v1.0.0 h1:x=\n")
    assert gobuild.program_key(ETCD, "go1.26.8") != key


def test_missing_go_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gobuild.go_version.cache_clear()
    with pytest.raises(HarnessError, match="apt-get install golang-go"):
        gobuild.go_version(gobuild.TOOLS / "runtime")


def test_failed_build_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAILMATE_CACHE", str(tmp_path))
    fake = tmp_path / "bin" / "go"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n[ $1 = env ] && { echo go1.26.8; exit; }\necho 'x.go:1: no such thing'; exit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    gobuild.go_version.cache_clear()
    try:
        with pytest.raises(HarnessError, match=r"(?s)end of .*go-etcd\.log:.*no such thing"):
            gobuild.build(["etcd"])
    finally:
        gobuild.go_version.cache_clear()


@pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed")
def test_runtime_wrapper_passes_its_own_go_tests(tmp_path: Path) -> None:
    done = subprocess.run(
        ["go", "test", "./..."], cwd=gobuild.TOOLS / "bench", env={**os.environ, **gobuild.go_environment()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
