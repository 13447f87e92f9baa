"""Everything an administrator may say to ``railmate node``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from railmate.errors import UsageError
from railmate.publish.slices import check_names
from railmate_api.attributes import DRIVER_NAME
from railmate_api.override import TopologyOverride


@dataclass(frozen=True, slots=True)
class Settings:
    """Paths are the node's: what is written into CDI specs and hooks is read by the runtime there."""

    node_name: str
    pod_uid: str = ""
    driver_name: str = DRIVER_NAME
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    dev_root: Path = Path("/dev")
    kubelet_dir: Path = Path("/var/lib/kubelet")
    cdi_dir: Path = Path("/var/run/cdi")
    nri_socket: Path = Path("/var/run/nri/nri.sock")
    gate_binary: Path = Path("/usr/libexec/railmate/gate")
    kubeconfig: str | None = None
    http_address: str = ""  # "", "host:port" or "unix:/path"
    share_pair_vfs: bool = False
    override: TopologyOverride | None = None

    def __post_init__(self) -> None:
        check_names(self.driver_name, self.node_name)
        if not self.gate_binary.is_file():
            raise UsageError(
                f"--gate-binary {self.gate_binary}: no such file. The image has it; outside, build driver/gate."
            )

    @property
    def plugin_dir(self) -> Path:
        return self.kubelet_dir / "plugins" / self.driver_name

    @property
    def installed_gate(self) -> Path:
        """Where the runtime on the node finds the hook."""
        return self.plugin_dir / "gate"
