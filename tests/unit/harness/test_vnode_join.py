"""What the virtual node is given when it joins a control plane, and the state of it that tests compare."""

from __future__ import annotations

import stat
import subprocess
import tomllib

import pytest

from e2e.vnode.lab import flatten, paragraphs
from harness.vnode_disk import GUEST_FILES
from harness.vnode_images import PAUSE_IMAGE
from harness.vnode_join import give_probes_time, kubelet_configuration


def test_the_kubelet_lets_in_only_who_shows_the_certificate_or_a_token_with_rights() -> None:
    configuration = kubelet_configuration(4321)
    assert configuration["port"] == 4321
    assert configuration["authentication"]["anonymous"] == {"enabled": False}
    assert configuration["authentication"]["x509"]["clientCAFile"] == "/etc/kubernetes/clients.crt"
    assert configuration["authorization"]["mode"] == "Webhook"


def test_probes_get_time_and_keep_what_they_ask() -> None:
    ready = {
        "exec": {"command": ["probe", "socket", "/readyz", "7"]},
        "periodSeconds": 10,
        "timeoutSeconds": 10,
    }
    alive = {
        "exec": {"command": ["probe", "socket", "/healthz", "2"]},
        "periodSeconds": 20,
        "initialDelaySeconds": 15,
    }
    started = {"exec": {"command": ["probe", "socket", "/healthz", "7"]}, "timeoutSeconds": 10}
    container = {"name": "driver", "startupProbe": started, "readinessProbe": ready, "livenessProbe": alive}
    give_probes_time([container, {"name": "other"}])
    assert ready["exec"] == {"command": ["probe", "socket", "/readyz", "280"]}
    assert started["exec"] == {"command": ["probe", "socket", "/healthz", "280"]}
    assert alive["exec"] == {"command": ["probe", "socket", "/healthz", "2"]}
    assert alive["initialDelaySeconds"] == 300
    assert started["periodSeconds"] == ready["periodSeconds"] == 30
    assert started["timeoutSeconds"] == ready["timeoutSeconds"] == alive["timeoutSeconds"] == 290


def test_the_runtime_takes_the_sandbox_image_that_is_on_the_disk() -> None:
    configuration = tomllib.loads((GUEST_FILES / "containerd.toml").read_text())
    assert configuration["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == PAUSE_IMAGE


@pytest.mark.parametrize("name", ["init", "devices", "node"])
def test_the_nodes_scripts_are_executable_and_a_shell_can_read_them(name: str) -> None:
    path = GUEST_FILES / name
    assert path.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_a_state_has_a_path_for_each_field_and_none_for_what_always_changes() -> None:
    link = {
        "ifname": "rail0v0",
        "ifindex": 7,
        "flags": ["UP"],
        "addr_info": [{"local": "fe80::1", "valid_life_time": 9}],
    }
    assert flatten({"link": {"rail0v0": link}, "files": []}) == {
        "link.rail0v0.ifname": "rail0v0",
        "link.rail0v0.flags": ["UP"],
        "link.rail0v0.addr_info.0.local": "fe80::1",
        "files": [],
    }


def test_what_ethtool_says_of_the_rails_is_kept_by_its_first_line() -> None:
    said = "Features for eth0:\nrx: on\nFeatures for rail0:\nrx: on\n\ttx-a: off\n\nFeatures for rail1:\nrx: off\n"
    assert paragraphs(said) == {
        "Features for rail0:": ["rx: on", "\ttx-a: off"],
        "Features for rail1:": ["rx: off"],
    }
