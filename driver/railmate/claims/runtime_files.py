"""Writes and removes what the container runtime reads for a claim: the CDI spec and metadata files.

Everything comes from the ledger entry, so it can be written again at any time: the CDI directory is
usually a tmpfs, and gone after a reboot.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from railmate import files
from railmate.cdi import spec
from railmate.claims import metadata
from railmate.claims.records import Entry, is_claim_uid
from railmate.errors import not_written

#: Where a container finds the node's NCCL topology file.
NCCL_TOPOLOGY = "/var/run/railmate/nccl-topology.xml"


class RuntimeFiles:
    def __init__(self, driver: str, plugin_dir: Path, cdi_dir: Path, gate: Path) -> None:
        """``gate`` is the hook executable; all paths are the node's as well as ours."""
        self._driver, self._cdi_dir, self._gate = driver, cdi_dir, gate
        self._attached_dir = plugin_dir / "attached"
        self.nccl_topology = plugin_dir / "nccl-topology.xml"
        self._metadata_dir = plugin_dir / "dra-device-metadata"

    def write(self, entry: Entry) -> None:
        """Metadata first: a spec must not name a file that is not there. Raises RailmateError when the disk refuses."""
        try:
            self._write(entry)
        except OSError as error:
            raise not_written(str(entry.claim), self._spec_file(entry.claim.uid), error) from error

    def _write(self, entry: Entry) -> None:
        for request in metadata.requests(entry.devices):
            path = self._metadata_file(entry.claim.uid, request)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            files.write_bytes(path, metadata.render(entry, request, self._driver), mode=0o644, durable=False)
        self._cdi_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        # no fsync: after a power cut the pod's sandbox is made again, and the claim prepared again before it
        files.write_json(self._spec_file(entry.claim.uid), self._spec(entry), mode=0o644, durable=False)

    def write_nccl_topology(self, text: str) -> None:
        """The node's file for claims that ask for hints. Never removed: specs of prepared claims name it."""
        data = text.encode()
        try:
            if not self.nccl_topology.exists() or self.nccl_topology.read_bytes() != data:
                files.write_bytes(self.nccl_topology, data, mode=0o644, durable=False)
        except OSError as error:
            raise not_written("the NCCL topology file", self.nccl_topology, error) from error

    def complete(self, entry: Entry) -> bool:
        """Whether all files are there with the contents that ``write`` would give them."""
        wanted = {
            self._metadata_file(entry.claim.uid, request): metadata.render(entry, request, self._driver)
            for request in metadata.requests(entry.devices)
        }
        wanted[self._spec_file(entry.claim.uid)] = files.json_bytes(self._spec(entry))
        try:
            return all(path.read_bytes() == data for path, data in wanted.items())
        except OSError:
            return False

    def claims(self) -> set[str]:
        """UIDs of the claims that files of ours are there for."""
        prefix, suffix = spec.file_name(self._driver, "*").split("*")
        specs = self._cdi_dir.glob(f"{prefix}*{suffix}")
        found = {path.name.removeprefix(prefix).removesuffix(suffix) for path in specs}
        if self._metadata_dir.is_dir():
            found |= {path.name for path in self._metadata_dir.iterdir()}
        return {uid for uid in found if is_claim_uid(uid)}

    def remove_temporaries(self) -> int:
        """Remove what killed writers of ours left; return how many."""
        found = 0
        if self._cdi_dir.is_dir():
            found += files.remove_temporaries(self._cdi_dir, Path(spec.file_name(self._driver, "")).stem)
        return found + sum(files.remove_temporaries(path) for path in self._metadata_dir.glob("*/*"))

    def remove(self, claim_uid: str) -> None:
        if not is_claim_uid(claim_uid):
            return  # it is part of a path that is removed whole
        files.remove(self._spec_file(claim_uid))
        shutil.rmtree(self._metadata_dir / claim_uid, ignore_errors=True)

    def cdi_ids(self, entry: Entry) -> dict[str, list[str]]:
        """A device's key to the CDI IDs that the kubelet passes to containers using it."""
        ours = {device.name for device in self._cdi_devices(entry) if not device.is_empty}
        ids: dict[str, list[str]] = {}
        for device in entry.devices:
            name = spec.device_name(entry.claim.uid, device.key)
            own = [spec.device_id(self._driver, name)] if name in ours else []
            # the vendor's first: its hooks set up what ours only adds to
            ids[device.key] = [*device.vendor_cdi_ids, *own]
        return ids

    def _spec(self, entry: Entry) -> dict[str, Any]:
        return spec.render(self._driver, self._cdi_devices(entry))

    def _cdi_devices(self, entry: Entry) -> list[spec.CdiDevice]:
        devices = []
        seen: set[str] = set()
        gate = spec.Gate(self._gate, self._attached_dir, entry.claim.uid, self._driver, entry.nodes_word)
        for device in entry.devices:
            # A container gets all devices of a request or none, so one mount and one gate a request do. A request
            # for a GPU alone is gated too where another holds a NIC: the pod is not whole without it.
            first = device.request not in seen
            seen.add(device.request)
            devices.append(
                spec.CdiDevice(
                    name=spec.device_name(entry.claim.uid, device.key),
                    nodes=device.nodes,
                    metadata_file=self._metadata_file(entry.claim.uid, device.request) if first else None,
                    metadata_mount=metadata.container_path(entry, device.request, self._driver)
                    if first
                    else None,
                    gate=gate if first and entry.nics else None,
                    topology_file=self.nccl_topology if first and device.nccl_topology else None,
                    topology_mount=NCCL_TOPOLOGY if first and device.nccl_topology else None,
                )
            )
        return devices

    def _spec_file(self, claim_uid: str) -> Path:
        return self._cdi_dir / spec.file_name(self._driver, claim_uid)

    def _metadata_file(self, claim_uid: str, request: str) -> Path:
        return self._metadata_dir / claim_uid / request / "metadata.json"
