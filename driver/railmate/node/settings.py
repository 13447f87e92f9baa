"""Everything an administrator may say to ``railmate node``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from railmate.errors import UsageError
from railmate.inventory.model import GpuVendor
from railmate.publish.devices import OfferOptions
from railmate.publish.exclusive import Preference
from railmate.publish.model import OfferedDevice
from railmate.publish.shared import SharedPfs
from railmate.publish.slices import check_names
from railmate_api.attributes import DRIVER_NAME
from railmate_api.override import TopologyOverride
from railmate_api.provisioning import VfProvisioning


@dataclass(frozen=True, slots=True)
class Settings:
    """Paths are the node's: what is written into CDI specs and hooks is read by the runtime there."""

    node_name: str
    pod_uid: str = ""
    driver_name: str = DRIVER_NAME
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    host_proc: Path = Path("/proc")  # the node's processes, as the container runtime numbers them
    dev_root: Path = Path("/dev")
    kubelet_dir: Path = Path("/var/lib/kubelet")
    cdi_dir: Path = Path("/var/run/cdi")
    cni_bin_dir: Path = Path("/opt/cni/bin")
    nri_socket: Path = Path("/var/run/nri/nri.sock")
    gate_binary: Path = Path("/usr/libexec/railmate/gate")
    kubeconfig: str | None = None
    http_address: str = ""  # "", "host:port" or "unix:/path"
    grace_period: float = 30.0  # seconds from SIGTERM to SIGKILL
    nics_only: bool = False
    share_pair_vfs: bool = False
    lone_vfs: int | None = None  # None: all
    switch_groups: bool = False
    all_attributes: bool = False
    shared_pfs: tuple[SharedPfs, ...] = ()
    without_counters: Preference = Preference.PAIRS
    ignore_device_plugins: bool = False
    override: TopologyOverride | None = None
    provisioning: VfProvisioning | None = None
    #: What is found beside the machine: vendors whose GPUs a device plugin hands out, and under which name.
    handed_out: Callable[[], Mapping[GpuVendor, str]] = dict

    def __post_init__(self) -> None:
        check_names(self.driver_name, self.node_name)
        if not self.gate_binary.is_file():
            raise UsageError(
                f"--gate-binary {self.gate_binary}: no such file. The image has it; outside, build driver/gate."
            )

    def offer_options(
        self,
        excluded: frozenset[str],
        held: Sequence[OfferedDevice] = (),
        awaiting_vfs: frozenset[str] = frozenset(),
    ) -> OfferOptions:
        """``excluded``: addresses that are never offered. ``held``: what pods have. ``awaiting_vfs``: physical
        functions that are about to get VFs."""
        return OfferOptions(
            nics_only=self.nics_only,
            share_pair_vfs=self.share_pair_vfs,
            excluded=excluded,
            lone_vfs=self.lone_vfs,
            switch_groups=self.switch_groups,
            all_attributes=self.all_attributes,
            held=held,
            awaiting_vfs=awaiting_vfs,
            shared_pfs=self.shared_pfs,
            handed_out=self.handed_out(),
        )

    @property
    def plugin_dir(self) -> Path:
        return self.kubelet_dir / "plugins" / self.driver_name

    @property
    def installed_gate(self) -> Path:
        """Where the runtime on the node finds the hook."""
        return self.plugin_dir / "gate"
