"""The GPU vendors' own CDI specs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from railmate.cdi.vendor import VendorSpecs

NVIDIA_YAML = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
- name: GPU-1
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
- name: all
  containerEdits: {}
"""


def test_yaml_and_json_specs_are_read(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(NVIDIA_YAML)
    (tmp_path / "amd.json").write_text(
        json.dumps({"kind": "amd.com/gpu", "devices": [{"name": "abc"}, {"name": 3}]})
    )
    found = VendorSpecs([tmp_path]).devices()
    assert found["GPU-1"] == "nvidia.com/gpu=GPU-1"
    assert found["abc"] == "amd.com/gpu=abc"
    assert found["3"] == "amd.com/gpu=3"


def test_other_kinds_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nic.json").write_text(
        json.dumps({"kind": "nic.example.com/nic", "devices": [{"name": "GPU-1"}]})
    )
    (tmp_path / "mentions.json").write_text(
        json.dumps({"kind": "x.example.com/y", "devices": [{"name": "nvidia.com/gpu"}]})
    )
    (tmp_path / "nvidia.yaml.bak").write_text(NVIDIA_YAML)
    (tmp_path / ".nvidia-abc").write_text(NVIDIA_YAML)
    assert VendorSpecs([tmp_path]).devices() == {}


@pytest.mark.parametrize(
    "text",
    [
        "nvidia.com/gpu: [",
        "nvidia.com/gpu",
        "- nvidia.com/gpu",
        "kind: nvidia.com/gpu",
        "kind: nvidia.com/gpu\ndevices:",
        "kind: nvidia.com/gpu\ndevices: 5",
        "kind: nvidia.com/gpu\ndevices: [5]",
        "kind: nvidia.com/gpu\ndevices: [{path: x}]",
        "kind: [nvidia.com/gpu]\ndevices: [{name: x}]",
        "kind: {nvidia.com/gpu: x}\ndevices: [{name: x}]",
    ],
)
def test_malformed_spec_is_left_out_with_a_word(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    (tmp_path / "good.yaml").write_text(NVIDIA_YAML)
    assert VendorSpecs([tmp_path]).devices()["GPU-1"] == "nvidia.com/gpu=GPU-1"
    assert "bad.yaml" in caplog.text


def test_binary_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"nvidia.com/gpu \xff\xfe")
    assert VendorSpecs([tmp_path]).devices() == {}


def test_directory_named_like_a_spec_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "dir.json").mkdir()
    assert VendorSpecs([tmp_path]).devices() == {}


def test_missing_directories_are_fine(tmp_path: Path) -> None:
    assert VendorSpecs([tmp_path / "none"]).devices() == {}
