"""What kind is told: the cluster's configuration, and the pod network of our own node image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from harness.shell import HarnessError

NAME = "railmate"
_CAP_SYS_RESOURCE = 24  # linux/capability.h

_KUBELET_PATCH = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "failCgroupV1": False,  # since 1.35 the kubelet refuses cgroup v1 hosts unless told otherwise
    # The tests kill the driver again and again; by default its container would be started after 10 s, 20 s, 40 s…
    "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
}


def cluster_config(own_image: bool, api_port: int | None, bounding: int) -> str:
    """kind's configuration file: one control plane, two workers, CDI and NRI on.

    `own_image`: the node image of nodeimage.py, which has no CNI daemon, instead of kind's.
    `api_port`: fixed port of the API server on 127.0.0.1; kind picks one without it.
    `bounding`: capability bounding set of this machine, one bit a capability.
    """
    cri: dict[str, Any] = {"cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"]}
    if not bounding >> _CAP_SYS_RESOURCE & 1:
        # Nobody here may lower a process's oom_score_adj, which containers of critical pods ask for.
        cri["restrict_oom_score_adj"] = True
    networking: dict[str, Any] = {"kubeProxyMode": "nftables"}
    if api_port is not None:
        networking |= {"apiServerAddress": "127.0.0.1", "apiServerPort": api_port}
    if own_image:
        networking["disableDefaultCNI"] = True
    return yaml.safe_dump(
        {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "name": NAME,
            "networking": networking,
            "nodes": [{"role": role} for role in ("control-plane", "worker", "worker")],
            "kubeadmConfigPatches": [yaml.safe_dump(_KUBELET_PATCH, sort_keys=False)],
            "containerdConfigPatches": [
                _toml_table('plugins."io.containerd.grpc.v1.cri"', cri),
                _toml_table('plugins."io.containerd.nri.v1.nri"', {"disable": False}),
            ],
        },
        sort_keys=False,
    )


def _toml_table(name: str, values: Mapping[str, Any]) -> str:
    # JSON's scalars and lists of strings are TOML's.
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])


@dataclass(frozen=True)
class NodeNetwork:
    """A node's address and the range of its pods."""

    name: str
    address: str
    pod_cidr: str


def node_networks(node_list: Mapping[str, Any]) -> list[NodeNetwork]:
    """From `kubectl get nodes -o json`. Raises HarnessError for a node without address or pod range."""
    found = []
    for node in node_list["items"]:
        name = node["metadata"]["name"]
        addresses = [a["address"] for a in node["status"].get("addresses", ()) if a["type"] == "InternalIP"]
        cidr = node["spec"].get("podCIDR")
        if not addresses or not cidr:
            raise HarnessError(
                f"node {name} has no {'pod range' if addresses else 'address'} yet; repeat hack/cluster up"
            )
        found.append(NodeNetwork(name, addresses[0], cidr))
    return found


def cni_config(node: NodeNetwork) -> str:
    """The CNI configuration of one node: a bridge, with addresses from the node's pod range."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni-ipam",  # gone with the node's boot, as the pods are
            "ranges": [[{"subnet": node.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": NAME, "plugins": [bridge]}, indent=2)


def network_script(node: NodeNetwork, nodes: list[NodeNetwork]) -> str:
    """Shell script for one node: writes the CNI configuration and routes to the other nodes' pods. Repeatable."""
    routes = [f"ip route replace {other.pod_cidr} via {other.address}" for other in nodes if other != node]
    # The kubelet looks at the directory at any time, so the file appears complete.
    write = f"cat > .new <<'END'\n{cni_config(node)}\nEND\nmv .new 10-{NAME}.conflist"
    return "\n".join(["set -e", "mkdir -p /etc/cni/net.d", "cd /etc/cni/net.d", write, *routes])
