"""What the driver publishes from the virtual node's own /sys, /dev and netlink."""

from __future__ import annotations

import json

from e2e.vnode.lab import VnodeLab
from harness.vnode_machine import Settings

SWITCH, NUMA = "railmate.dev/pcieSwitch", "resource.kubernetes.io/numaNode"
ADDRESS, ROOT = "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot"
GPU, NIC = "railmate.dev/gpuPciBusID", "railmate.dev/nicPciBusID"


def test_eight_gpus_are_published_with_their_switch_and_numa_node(vlab: VnodeLab) -> None:
    published = {one[ADDRESS]: (one[SWITCH], one[NUMA]) for one in vlab.of_kind("gpu").values()}
    assert published == {
        gpu: (switch.address, switch.numa_node) for switch in vlab.switches for gpu in switch.gpus
    }


def test_the_gpus_are_what_their_kernel_driver_says(vlab: VnodeLab) -> None:
    gpus = list(vlab.of_kind("gpu").values())
    assert {one["railmate.dev/product"] for one in gpus} == {"NVIDIA H100 80GB HBM3"}
    assert len({one["railmate.dev/uuid"] for one in gpus}) == 8


def test_every_vf_is_published_in_a_pair_or_alone_with_its_switch_and_numa_node(vlab: VnodeLab) -> None:
    alone = {one[ADDRESS]: (one[SWITCH], one[NUMA]) for one in vlab.of_kind("rdma-vf").values()}
    paired = {one[NIC]: (one[SWITCH], one[NUMA]) for one in vlab.of_kind("pair").values()}
    assert paired | alone == {
        switch.vf(index): (switch.address, switch.numa_node)
        for switch in vlab.switches
        for index in range(Settings().vfs)
    }
    assert len(paired) == 8
    assert not paired.keys() & alone.keys()


def test_each_gpu_has_a_vf_of_its_own_below_its_switch(vlab: VnodeLab) -> None:
    pairs = list(vlab.of_kind("pair").values())
    assert {one["railmate.dev/distance"] for one in pairs} == {"PIX"}
    assert {one[GPU]: (one[SWITCH], one[NIC]) for one in pairs} == {
        gpu: (switch.address, switch.vf(index))
        for switch in vlab.switches
        for index, gpu in enumerate(switch.gpus)
    }


def test_the_two_gpus_of_a_switch_are_offered_together_with_a_vf_of_its_nic(vlab: VnodeLab) -> None:
    """Four NICs for eight GPUs: a group is two GPUs and the NIC that is theirs."""
    groups = list(vlab.of_kind("group").values())
    assert {one["railmate.dev/distance"] for one in groups} == {"PIX"}
    assert {one["railmate.dev/topologySource"] for one in groups} == {"sysfs"}
    assert {one[SWITCH]: (one[GPU], one[NIC]) for one in groups} == {
        switch.address: (",".join(switch.gpus), switch.vf(0)) for switch in vlab.switches
    }


def test_the_node_keeps_rdma_devices_apart_and_says_so(vlab: VnodeLab) -> None:
    modes = {one.get("railmate.dev/rdmaNetnsMode") for one in vlab.of_kind("rdma-vf").values()}
    assert modes == {"exclusive"}


def test_the_topology_command_in_the_node_agrees_with_what_is_published(vlab: VnodeLab) -> None:
    said = json.loads(vlab.guest.run("railmate", "topology", "-o", "json", timeout=300))
    published = {one[ADDRESS]: (one[SWITCH], one[NUMA], one[ROOT]) for one in vlab.of_kind("gpu").values()}
    assert {
        one["pciBusID"]: (one["pcieSwitch"], one["numaNode"], one["pcieRoot"]) for one in said["gpus"]
    } == published


def test_the_nodes_own_nic_is_not_offered(vlab: VnodeLab) -> None:
    (own,) = vlab.guest.run("sh", "-c", "basename $(readlink -f /sys/class/net/eth0/device/..)").split()
    assert own.startswith("0000:00:")
    assert own not in json.dumps(vlab.devices)
