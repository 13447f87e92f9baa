"""``railmate node``: the kubelet plugin."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from railmate.cli.offers import add_offer_flags, shared_pfs
from railmate.cli.overrides import add_override_flags, override_from
from railmate_api.attributes import DRIVER_NAME


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "node",
        help="run the kubelet plugin of this node",
        description="Publish this node's devices and prepare claims for its pods. Paths are the node's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--node-name", default=os.environ.get("NODE_NAME", ""), help="the Kubernetes node (NODE_NAME)")
    add(
        "--pod-uid", default=os.environ.get("POD_UID", ""), help="this pod's UID (POD_UID); names the sockets"
    )
    add("--driver-name", default=DRIVER_NAME, help="the DRA driver's name")
    add("--sysfs-root", type=Path, default=Path("/sys"), help="where the kernel's sysfs is")
    add("--proc-root", type=Path, default=Path("/proc"), help="where driver/nvidia of procfs is")
    add(
        "--host-proc",
        type=Path,
        default=Path("/proc"),
        help="procfs with the node's processes, as the container runtime numbers them",
    )
    add("--dev-root", type=Path, default=Path("/dev"), help="where the node's device nodes are")
    add("--kubelet-dir", type=Path, default=Path("/var/lib/kubelet"), help="the kubelet's root directory")
    add("--cdi-dir", type=Path, default=Path("/var/run/cdi"), help="where CDI specs are written")
    add(
        "--cni-bin-dir",
        type=Path,
        default=Path("/opt/cni/bin"),
        help="where the node's CNI IPAM plugins are",
    )
    add(
        "--nri-socket",
        type=Path,
        default=Path("/var/run/nri/nri.sock"),
        help="the container runtime's NRI socket",
    )
    add(
        "--gate-binary",
        type=Path,
        default=Path("/usr/libexec/railmate/gate"),
        help="the hook executable to install",
    )
    add("--kubeconfig", default=None, help="for use outside a pod")
    add("--http-address", default="", help="where /healthz and /readyz are served: host:port or unix:/path")
    add(
        "--grace-period",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="what this pod has to end (terminationGracePeriodSeconds): calls of the kubelet in progress go on for as "
        "long but the last 10",
    )
    add_offer_flags(parser)
    add(
        "--without-counters",
        choices=["pairs", "parts"],
        default="pairs",
        help="what is published of a GPU or NIC that would have several names, where the API server knows no counters",
    )
    add(
        "--device-plugins",
        choices=["withhold", "ignore"],
        default="withhold",
        help="whether GPUs that a device plugin on this node hands out are withheld",
    )
    add_override_flags(parser)
    add(
        "--vf-provisioning",
        type=Path,
        metavar="FILE",
        help="a VfProvisioning in YAML: which NICs get how many VFs, made before they are published",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="what is logged")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    """A number of seconds, not negative."""
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


def run(args: argparse.Namespace) -> int:
    # Imported here: the other commands need neither gRPC nor the API client.
    from railmate.kube.client import KubeClient
    from railmate.node.agent import Agent
    from railmate.node.settings import Settings
    from railmate.provision.file import load_provisioning
    from railmate.publish.exclusive import Preference

    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )  # fmt: skip
    settings = Settings(
        node_name=args.node_name,
        pod_uid=args.pod_uid,
        driver_name=args.driver_name,
        sysfs_root=args.sysfs_root,
        proc_root=args.proc_root,
        host_proc=args.host_proc,
        dev_root=args.dev_root,
        kubelet_dir=args.kubelet_dir,
        cdi_dir=args.cdi_dir,
        cni_bin_dir=args.cni_bin_dir,
        nri_socket=args.nri_socket,
        gate_binary=args.gate_binary,
        kubeconfig=args.kubeconfig,
        http_address=args.http_address,
        grace_period=args.grace_period,
        nics_only=args.publish == "nics",
        share_pair_vfs=args.share_pair_vfs,
        lone_vfs=args.lone_vfs,
        switch_groups=args.switch_groups,
        all_attributes=args.attributes == "all",
        shared_pfs=shared_pfs(args.shared_pfs),
        without_counters=Preference(args.without_counters),
        ignore_device_plugins=args.device_plugins == "ignore",
        override=override_from(args.override, args.roles),
        provisioning=load_provisioning(args.vf_provisioning) if args.vf_provisioning else None,
    )
    # The first process of a container does not end at SIGTERM by itself, and to look at the machine, or to make VFs,
    # may take long; a kill is no harm there. Afterwards the agent has its own way.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    asyncio.run(Agent(settings, KubeClient.connect(settings.kubeconfig)).run())
    return 0
