"""Variables that tell a job's libraries which NICs are its own, for claims that ask for them (``envHints``). Pure.

Given per container through NRI and not in the CDI spec: only there it is seen what the user has set, and what a user
has set is never replaced. Sources: NCCL's environment variables page, ``ucx_info -c -f`` (UCX_NET_DEVICES).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from railmate.attach.rdmamodel import SeenNic
from railmate.claims.records import Entry
from railmate.claims.runtime_files import NCCL_TOPOLOGY
from railmate.claims.seen import seen_now

#: Before the request's name.
FUNCTIONS = "PCIDEVICE_RAILMATE_DEV"


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
    hints |= _functions(entries)
    return {name: value for name, value in hints.items() if name not in present}


def _functions(entries: Sequence[Entry]) -> dict[str, str]:
    """Addresses of functions that a program drives by itself, a variable a request, as SR-IOV device plugins do."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for device in entry.devices:
            request = re.sub(r"[^A-Z0-9]", "_", device.request.upper())
            for nic in device.nics:
                if nic.passes_through:
                    found.setdefault(f"{FUNCTIONS}_{request}", []).append(nic.address)
    return {name: ",".join(addresses) for name, addresses in found.items()}


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
