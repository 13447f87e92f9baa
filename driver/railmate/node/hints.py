"""Variables that tell a job's libraries which NICs are its own, for claims that ask for them (``envHints``). Pure.

Given per container through NRI and not in the CDI spec: only there it is seen what the user has set, and what a user
has set is never replaced. Sources: NCCL's environment variables page, ``ucx_info -c -f`` (UCX_NET_DEVICES).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from railmate.attach.rdmamodel import SeenNic
from railmate.claims.records import Entry
from railmate.claims.runtime_files import NCCL_TOPOLOGY
from railmate.claims.seen import seen_now


def environment(entries: Iterable[Entry], present: Mapping[str, str]) -> dict[str, str]:
    """For a container that references these claims and has ``present`` already.

    All its RDMA NICs are named when one claim asks: a list of some would keep the library from the others.
    """
    entries = list(entries)
    if not any(device.env_hints for entry in entries for device in entry.devices):
        return {}
    nics = [nic for entry in entries for device in entry.devices for nic in seen_now(entry, device)]
    topology = any(device.nccl_topology for entry in entries for device in entry.devices)
    hints = {"NCCL_TOPO_FILE": NCCL_TOPOLOGY} if topology else {}
    hints |= _devices(nics)
    return {name: value for name, value in hints.items() if name not in present}


def _devices(nics: Sequence[SeenNic]) -> dict[str, str]:
    names = list(dict.fromkeys(nic.rdma_device for nic in nics if nic.rdma_device))
    if not names:
        return {}
    ports = ",".join(f"{name}:1" for name in names)
    hints = {"NCCL_IB_HCA": f"={ports}", "UCX_NET_DEVICES": ports}
    # one number for all NICs: where they differ, NCCL (2.21 and newer) finds each by itself
    indices = {nic.gid.index if nic.gid else None for nic in nics if nic.link_layer == "Ethernet"}
    if len(indices) == 1 and (index := indices.pop()) is not None:
        hints["NCCL_IB_GID_INDEX"] = str(index)
    return hints
