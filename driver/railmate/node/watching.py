"""Everything on this node that looks whether the devices work: sysfs, the kernel's word on links, NVIDIA's library."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from railmate import files
from railmate.health import memory
from railmate.health.damping import Damped
from railmate.health.links import LinkWatch
from railmate.health.monitor import HealthMonitor
from railmate.health.nvml import NvmlWatch
from railmate.inventory.model import GpuVendor, Inventory
from railmate.inventory.nvml import find_library
from railmate.inventory.scan import LIVE_SYSFS
from railmate.node.machine import View
from railmate.node.settings import Settings
from railmate.topology.model import MachineClass

log = logging.getLogger(__name__)

_HEALTH = "health.json"


class DeviceWatch:
    """``loops`` block until ``stop``, each for a thread of its own, by the thread's name."""

    def __init__(
        self,
        settings: Settings,
        view: View,
        boot_id: str,
        on_change: Callable[[Mapping[str, str]], None],
        changing: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self._path, self._boot_id = settings.plugin_dir / _HEALTH, boot_id
        self._kept: bytes | None = None
        # under another root than the live /sys the library would speak of another machine
        live = str(settings.sysfs_root) == LIVE_SYSFS
        self._nvml = (
            NvmlWatch(find_library(), _nvidia(view.inventory), lambda: self.monitor.recheck())
            if live
            else None
        )
        self.monitor = HealthMonitor(
            settings.sysfs_root,
            view.offer,
            view.inventory,
            pcie_links=view.topology.machine_class is not MachineClass.VIRTUAL,
            on_change=on_change,
            lost=self._nvml.lost if self._nvml else frozenset,
            changing=changing,
            before=recalled(self._path, boot_id),
            remember=self._remember,
        )
        self._links = LinkWatch(self.monitor.recheck)
        self.loops: dict[str, Callable[[], None]] = {
            "health": self.monitor.run,
            "taints": self.monitor.deliver,
            "links": self._links.run,
        }
        if self._nvml:
            self.loops["nvml"] = self._nvml.run

    def update(self, view: View) -> None:
        self.monitor.update(view.offer, view.inventory)
        if self._nvml:
            self._nvml.update(_nvidia(view.inventory))

    def stop(self) -> None:
        self.monitor.stop()
        self._links.stop()
        if self._nvml:
            self._nvml.stop()

    def _remember(self, states: Mapping[str, Damped]) -> None:
        """For the next process: without it a restart would end the hold of a link that flaps."""
        record = memory.to_json(states, self._boot_id)
        data = files.json_bytes(record)
        if data == self._kept or (self._kept is None and not record["states"] and not self._path.exists()):
            return
        try:
            files.write_bytes(self._path, data, durable=False)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)
        self._kept = data


def recalled(path: Path, boot_id: str) -> dict[str, Damped]:
    """What an earlier process of this boot kept; nothing where it kept none, or nothing that can be read."""
    try:
        return memory.from_json(json.loads(path.read_bytes()), boot_id)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", path, error)
        return {}


def _nvidia(inventory: Inventory) -> list[str]:
    """GPUs that NVIDIA's driver holds."""
    return [
        gpu.address
        for gpu in inventory.gpus
        if gpu.vendor is GpuVendor.NVIDIA and gpu.function.driver == "nvidia"
    ]
