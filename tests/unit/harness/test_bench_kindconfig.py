"""What kind, kubeadm, containerd and the nodes are told."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml

from harness.kindconfig import NodeNetwork, cluster_config, cni_config, network_script, node_networks
from harness.nodeimage import image_names
from harness.rootfs import containerd_config
from harness.shell import HarnessError

FULL = (1 << 41) - 1
NO_SYS_RESOURCE = FULL & ~(1 << 24)
A = NodeNetwork("a", "172.18.0.2", "10.244.0.0/24")
B = NodeNetwork("b", "172.18.0.3", "10.244.1.0/24")


def config(*arguments: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(cluster_config(*arguments)))


def containerd_tables(parsed: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for patch in parsed["containerdConfigPatches"]:
        merged |= tomllib.loads(patch)["plugins"]
    return merged


def test_cluster_has_one_control_plane_and_two_workers_with_cdi_and_nri() -> None:
    for own_image in (True, False):
        parsed = config(own_image, 6443, FULL)
        assert [node["role"] for node in parsed["nodes"]] == ["control-plane", "worker", "worker"]
        tables = containerd_tables(parsed)
        assert tables["io.containerd.grpc.v1.cri"]["cdi_spec_dirs"] == ["/etc/cdi", "/var/run/cdi"]
        assert tables["io.containerd.nri.v1.nri"] == {"disable": False}
        assert yaml.safe_load(parsed["kubeadmConfigPatches"][0])["failCgroupV1"] is False


def test_own_image_has_no_cni_daemon_and_its_own_dns() -> None:
    parsed = config(True, 6443, FULL)
    assert parsed["networking"]["disableDefaultCNI"] is True
    assert len(parsed["kubeadmConfigPatches"]) == 1, "no phase of kubeadm is left out"


def test_upstream_image_keeps_kinds_network_and_port() -> None:
    parsed = config(False, None, FULL)
    assert parsed["networking"] == {"kubeProxyMode": "nftables"}
    assert len(parsed["kubeadmConfigPatches"]) == 1


def test_oom_scores_are_restricted_only_where_the_capability_is_lacking() -> None:
    assert (
        "restrict_oom_score_adj" not in containerd_tables(config(True, 1, FULL))["io.containerd.grpc.v1.cri"]
    )
    lacking = containerd_tables(config(True, 1, NO_SYS_RESOURCE))["io.containerd.grpc.v1.cri"]
    assert lacking["restrict_oom_score_adj"] is True


def test_pods_of_other_nodes_are_reached_through_those_nodes() -> None:
    script = network_script(A, [A, B])
    assert "ip route replace 10.244.1.0/24 via 172.18.0.3" in script
    assert "10.244.0.0/24 via" not in script
    assert cni_config(A) in script
    bridge = json.loads(cni_config(A))["plugins"][0]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.244.0.0/24"}]]


def test_node_without_pod_range_is_named() -> None:
    node = {
        "metadata": {"name": "a"},
        "spec": {},
        "status": {"addresses": [{"type": "InternalIP", "address": "172.18.0.2"}]},
    }
    with pytest.raises(HarnessError, match="node a has no pod range yet"):
        node_networks({"items": [node]})
    node["spec"] = {"podCIDR": "10.244.0.0/24"}
    assert node_networks({"items": [node]}) == [A]


def test_image_names_are_kubeadms() -> None:
    listing = "r.example/kube-apiserver:v1.37.2\nr.example:5000/coredns/coredns:v1.14\nr.example/pause:3.10\n"
    assert image_names(listing) == {
        "kube-apiserver": "r.example/kube-apiserver:v1.37.2",
        "coredns": "r.example:5000/coredns/coredns:v1.14",
        "pause": "r.example/pause:3.10",
    }


def test_containerd_configuration_gets_our_pause_image_and_loses_the_fuse_plugin() -> None:
    text = (
        'version = 2\n[proxy_plugins]\n[proxy_plugins."f"]\n  type = "snapshot"\n\n'
        '[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "r.example/pause:3.1"\n'
    )
    parsed = tomllib.loads(containerd_config(text, "r.example/pause:3.10"))
    assert parsed == {
        "version": 2,
        "plugins": {"io.containerd.grpc.v1.cri": {"sandbox_image": "r.example/pause:3.10"}},
    }
    with pytest.raises(HarnessError, match="has changed"):
        containerd_config("version = 3\n", "r.example/pause:3.10")
