"""What an administrator may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from railmate.errors import UsageError
from railmate.node.settings import Settings


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.write_bytes(b"\x7fELF one")
    return path


def settings(gate: Path, **more: Any) -> Settings:
    return Settings(
        **({"node_name": "node1", "gate_binary": gate, "kubelet_dir": gate.parent / "kubelet"} | more)
    )


def test_paths_follow_the_drivers_name(gate: Path) -> None:
    one = settings(gate, driver_name="other.example.com")
    assert one.plugin_dir == gate.parent / "kubelet/plugins/other.example.com"
    assert one.installed_gate.parent == one.plugin_dir


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"node_name": ""}, "--node-name"),
        ({"driver_name": ""}, "--driver-name"),
        ({"driver_name": "Railmate.dev"}, "--driver-name"),
        ({"driver_name": "a..b"}, "--driver-name"),
        ({"driver_name": "-a.dev"}, "--driver-name"),
        ({"driver_name": "a.dev\n"}, "--driver-name"),
        ({"driver_name": "../../etc"}, "--driver-name"),
        ({"driver_name": "d" * 64}, "--driver-name"),
        ({"gate_binary": Path("/nonexistent/gate")}, "--gate-binary"),
    ],
)
def test_bad_setting_names_its_option(gate: Path, bad: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        settings(gate, **bad)
