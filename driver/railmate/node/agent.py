"""The node plugin's process: looks at the machine, publishes it, serves kubelet and runtime, ends cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from functools import partial
from pathlib import Path

from railmate import files
from railmate.cdi.vendor import vendor_devices
from railmate.claims.ledger import Ledger, boot_id
from railmate.claims.plan import NodeView
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError
from railmate.inventory.model import Inventory
from railmate.inventory.net import netdev_of
from railmate.inventory.scan import scan
from railmate.inventory.uplinks import uplink_functions, uplink_names
from railmate.kube.client import KubeClient
from railmate.kubelet.server import KubeletServer
from railmate.kubelet.sockets import sockets
from railmate.node.events import RuntimeEvents
from railmate.node.health import HealthServer
from railmate.node.settings import Settings
from railmate.nri.plugin import NriPlugin
from railmate.publish.controller import SliceController
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze

log = logging.getLogger(__name__)

#: Our place among the runtime's plugins; nothing depends on it.
_NRI_INDEX = "10"
#: Seconds that calls in flight get at the end.
_GRACE = 5.0


class Agent:
    """One instance of the node plugin. ``run`` returns after SIGTERM or SIGINT."""

    def __init__(self, settings: Settings, kube: KubeClient) -> None:
        self._settings = settings
        self._registered = self._published = False
        inventory, offer = look_at_machine(settings)
        install_gate(settings)
        ledger = Ledger(settings.plugin_dir)
        view = NodeView(
            driver=settings.driver_name,
            pool=settings.node_name,
            offer=offer,
            inventory=inventory,
            dev_root=settings.dev_root,
            node_exists=Path.exists,
            netdev_of=partial(netdev_of, settings.sysfs_root),
            vendor_cdi=vendor_devices([Path("/etc/cdi"), settings.cdi_dir]),
        )
        runtime_files = RuntimeFiles(
            settings.driver_name, settings.plugin_dir, settings.cdi_dir, settings.installed_gate
        )
        state = ClaimState(kube, view, ledger, runtime_files, boot_id())
        self._controller = SliceController(
            kube, settings.driver_name, settings.node_name, offer, self._on_published
        )
        self._kubelet = KubeletServer(
            settings.driver_name,
            sockets(settings.kubelet_dir, settings.driver_name, settings.pod_uid),
            state,
            self._on_registered,
        )
        self._events = RuntimeEvents(settings.driver_name, state)
        self._nri = NriPlugin(settings.driver_name, _NRI_INDEX, settings.nri_socket, self._events)
        checks = {"/healthz": lambda: [], "/readyz": self._missing}
        self._health = HealthServer(settings.http_address, checks) if settings.http_address else None

    async def run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        publisher = threading.Thread(target=self._controller.run, name="slices", daemon=True)
        publisher.start()
        runtime = asyncio.create_task(self._nri.run_forever(), name="nri")
        try:
            if self._health:
                await self._health.start()
            await self._kubelet.start()
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({runtime, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if runtime.done():
                runtime.result()  # it never ends by itself: this raises what went wrong
        finally:
            await self._end(runtime)

    async def _end(self, runtime: asyncio.Task[None]) -> None:
        log.info("ending; slices, prepared claims and attached devices stay as they are")
        self._controller.stop()
        await self._kubelet.stop(_GRACE)
        runtime.cancel()
        await asyncio.wait({runtime})
        self._events.close()
        if self._health:
            await self._health.stop()

    def _missing(self) -> list[str]:
        missing = []
        if not self._published:
            missing.append("the ResourceSlices are not published")
        if not self._registered:
            missing.append("the kubelet has not registered the driver")
        if not self._nri.connected:
            missing.append(f"the container runtime is not connected ({self._settings.nri_socket})")
        return missing

    def _on_published(self) -> None:
        self._published = True

    def _on_registered(self, registered: bool) -> None:
        self._registered = registered


def look_at_machine(settings: Settings) -> tuple[Inventory, Offer]:
    """What is in the machine and what of it is offered."""
    inventory = scan(settings.sysfs_root, settings.proc_root)
    for warning in inventory.warnings:
        log.warning("%s", warning)
    topology = analyze(inventory)
    for note in topology.notes:
        log.info("%s", note)
    excluded = uplink_functions(inventory, uplink_names())
    offer = build_offer(inventory, topology, OfferOptions(settings.share_pair_vfs, excluded))
    log.info(
        "machine class %s: %d GPUs, %d NIC functions, %d pairs; %d devices offered",
        topology.machine_class, len(inventory.gpus), len(inventory.nics), len(topology.pairs), len(offer.devices),
    )  # fmt: skip
    return inventory, offer


def install_gate(settings: Settings) -> None:
    """Put the hook executable where the runtime on the node finds it; renamed into place, so that a
    container that starts at this moment runs the old or the new one, never half of it."""
    target = settings.installed_gate
    try:
        target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        wanted = settings.gate_binary.read_bytes()
        if not target.exists() or target.read_bytes() != wanted:
            files.write_bytes(target, wanted, mode=0o755)
    except OSError as error:
        raise RailmateError(
            f"the gate cannot be installed as {target} ({error}). Is {target.parent} mounted, and writable?"
        ) from error
