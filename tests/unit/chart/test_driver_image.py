"""The driver's image: what its name depends on, and how it is made with and without an engine."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from harness import driverimage
from harness.cache import content_key
from harness.shell import HarnessError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with all that the image is made of, and a cache of its own."""
    root = tmp_path / "tree"
    for name in ("api/railmate_api/proto", "driver/railmate", "driver/gate", "driver/probe"):
        (root / name).mkdir(parents=True)
    files = (
        "pyproject.toml README.md LICENSE api/build_hook.py driver/requirements.lock driver/Containerfile "
        "driver/railmate/cli.py driver/gate/gate.c driver/probe/probe.c"
    )
    for name in files.split():
        (root / name).write_text(name)
    monkeypatch.setattr(driverimage, "ROOT", root)
    monkeypatch.setenv("RAILMATE_CACHE", str(tmp_path / "cache"))
    return root


@pytest.fixture
def layers(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Stand-ins for the three layers, as artefacts in the cache are: <name>-<key>/root."""
    made = {name: tmp_path / f"{name}-1" / "root" for name in ("base", "packages", "own")}
    for path in made.values():
        path.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(driverimage, "_has_packages", lambda: True)
    monkeypatch.setattr(driverimage, "_base_layer", lambda: made["base"])
    monkeypatch.setattr(driverimage, "_packages_layer", lambda base: made["packages"])
    monkeypatch.setattr(driverimage, "_own_layer", lambda base: made["own"])
    return made


@pytest.mark.parametrize("changed", ["base", "packages", "own"])
def test_a_change_of_any_layer_gives_the_image_another_tag(layers: dict[str, Path], changed: str) -> None:
    first = driverimage.build()
    assert driverimage.build().ref == first.ref
    layers[changed] = layers[changed].parent.with_name(f"{changed}-2") / "root"
    layers[changed].mkdir(parents=True)
    second = driverimage.build()
    assert second.tag != first.tag
    assert second.archive.exists()


@pytest.mark.parametrize("name", ["driver/railmate/cli.py", "driver/gate/gate.c", "driver/requirements.lock"])
def test_a_change_of_the_code_is_noticed(tree: Path, name: str) -> None:
    key = content_key(*driverimage._source_parts())
    (tree / name).write_text("changed")
    assert content_key(*driverimage._source_parts()) != key


def test_what_builds_leave_in_the_tree_does_not_count(tree: Path) -> None:
    before = driverimage._source_parts()
    (tree / "driver/gate/gate").write_text("a program")
    (tree / "api/railmate_api/proto/dra_v1_pb2.py").write_text("generated")
    (tree / "driver/railmate/__pycache__").mkdir()
    (tree / "driver/railmate/__pycache__/cli.cpython-313.pyc").write_text("compiled")
    assert driverimage._source_parts() == before


def test_without_root_the_engine_builds_the_containerfile(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != save ] || echo image > "$3"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    image = driverimage.build()
    assert driverimage.build() == image
    build, save = (tmp_path / "calls").read_text().splitlines()
    assert build == f"build --file {tree}/driver/Containerfile --tag {image.ref} {tree}"
    assert save.startswith("save --output ")
    assert save.endswith(image.ref)
    assert image.archive.read_text() == "image\n"


def test_a_missing_part_of_the_tree_is_named(tree: Path) -> None:
    (tree / "driver/gate/gate.c").unlink()
    (tree / "driver/gate").rmdir()
    with pytest.raises(HarnessError, match="needs driver/gate from the tree"):
        driverimage.build()


def test_console_scripts_of_the_wheel_become_programs(tmp_path: Path) -> None:
    wheel, target = tmp_path / "railmate-1-py3-none-any.whl", tmp_path / "own"
    target.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("railmate/__init__.py", "")
        archive.writestr(
            "railmate-1.dist-info/entry_points.txt", "[console_scripts]\nrailmate = railmate.cli.main:main\n"
        )
    driverimage._install_wheel(wheel, target)
    script = target / "bin/railmate"
    assert os.access(script, os.X_OK)
    assert "from railmate.cli.main import main\n" in script.read_text()
    assert (target / "railmate/__init__.py").exists()
