"""Image archives: readable by docker and containerd, and the same bytes for the same content."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from harness.ociimage import tree_of_binaries, write_image
from harness.shell import HarnessError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "name").write_text("x\n")
    (root / "bin").mkdir()
    (root / "bin" / "tool").write_text("#!/bin/sh\n")
    (root / "bin" / "tool").chmod(0o755)
    (root / "bin" / "link").symlink_to("tool")
    (root / "lib").symlink_to("usr/lib")
    return root


def read(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


def layer_entries(files: dict[str, bytes]) -> dict[str, tarfile.TarInfo]:
    manifest = json.loads(files["manifest.json"])[0]
    data = files[manifest["Layers"][0]]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {entry.name: entry for entry in tar}


def blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    data = files["blobs/" + descriptor["digest"].replace(":", "/")]
    assert len(data) == descriptor["size"]
    assert "sha256:" + hashlib.sha256(data).hexdigest() == descriptor["digest"]
    return data


def test_oci_layout_leads_to_the_layer_and_the_configuration(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "image.tar"
    image = write_image(out, "railmate.local/thing:1", [tree], ["/bin/tool"], {"A": "b"}, user="65534")
    files = read(out)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(files["index.json"])
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "railmate.local/thing:1"
    manifest = json.loads(blob(files, index["manifests"][0]))
    assert manifest["config"]["digest"] == image
    configuration = json.loads(blob(files, manifest["config"]))
    assert configuration["config"]["Entrypoint"] == ["/bin/tool"]
    assert "A=b" in configuration["config"]["Env"]
    assert configuration["config"]["User"] == "65534"
    layer = gzip.decompress(blob(files, manifest["layers"][0]))
    assert configuration["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]


def test_docker_manifest_names_the_same_blobs(tree: Path, tmp_path: Path) -> None:
    image = write_image(tmp_path / "image.tar", "railmate.local/thing:1", [tree], [])
    manifest = json.loads(read(tmp_path / "image.tar")["manifest.json"])[0]
    assert manifest["RepoTags"] == ["railmate.local/thing:1"]
    assert manifest["Config"] == "blobs/" + image.replace(":", "/")


def test_name_without_host_is_left_for_containerd_to_complete(tree: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "image.tar", "busybox:stable", [tree], [])
    files = read(tmp_path / "image.tar")
    assert "index.json" not in files
    assert json.loads(files["manifest.json"])[0]["RepoTags"] == ["busybox:stable"]


def test_same_content_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "one.tar", "railmate.local/thing:1", [tree], [])
    (tree / "etc" / "name").unlink()  # made again: another time, another place in the directory
    (tree / "etc" / "name").write_text("x\n")
    os.utime(tree / "etc" / "name", (1, 1))
    write_image(tmp_path / "two.tar", "railmate.local/thing:1", [tree], [])
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_layer_keeps_modes_and_links_and_belongs_to_root(tree: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "image.tar", "railmate.local/thing:1", [tree], [])
    entries = layer_entries(read(tmp_path / "image.tar"))
    assert entries["bin/tool"].mode == 0o755
    assert entries["bin/link"].linkname == "tool"
    assert entries["lib"].issym()
    assert list(entries) == ["lib", "bin", "bin/link", "bin/tool", "etc", "etc/name"]
    assert {(entry.uid, entry.gid, entry.mtime, entry.uname) for entry in entries.values()} == {(0, 0, 0, "")}


def test_layer_of_single_files_has_their_directories(tree: Path, tmp_path: Path) -> None:
    layer = tree_of_binaries({"tool": tree / "bin" / "link"})
    write_image(tmp_path / "image.tar", "railmate.local/thing:1", [layer], [])
    entries = layer_entries(read(tmp_path / "image.tar"))
    assert list(entries) == ["usr", "usr/local", "usr/local/bin", "usr/local/bin/tool"]
    assert entries["usr/local/bin/tool"].isreg()


def test_failure_leaves_no_archive(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="absent"):
        write_image(tmp_path / "image.tar", "railmate.local/thing:1", [{"/a": tmp_path / "absent"}], [])
    with pytest.raises(HarnessError, match="has no tag"):
        write_image(tmp_path / "image.tar", "localhost:5000/thing", [], [])
    assert list(tmp_path.iterdir()) == []
