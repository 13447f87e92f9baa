"""The node plugin's process: looks at the machine, publishes it, serves kubelet and runtime, ends cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from railmate.attach.elsewhere import Elsewhere
from railmate.attach.rdmalook import char_devices
from railmate.cdi.vendor import VendorSpecs
from railmate.claims.attempt import attempt
from railmate.claims.holdings import Holdings
from railmate.claims.ledger import Ledger, boot_id
from railmate.claims.nodeview import NodeView
from railmate.claims.observation import Observations
from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimState
from railmate.claims.surroundings import Surroundings
from railmate.errors import RailmateError
from railmate.inventory.net import netdev_of
from railmate.kube.client import KubeClient
from railmate.kubelet.server import KubeletServer, probe
from railmate.kubelet.sockets import sockets
from railmate.node.attached import AttachedClaims
from railmate.node.deviceplugins import DevicePlugins
from railmate.node.ending import Ending
from railmate.node.events import RuntimeEvents
from railmate.node.gateinstall import GateInstaller
from railmate.node.health import HealthServer
from railmate.node.instances import Instances
from railmate.node.machine import MachineWatch, View, first_look
from railmate.node.memlock import Memlock
from railmate.node.newest import Newest
from railmate.node.provisioning import Provisioner
from railmate.node.rdmacgroup import RdmaCgroup
from railmate.node.reports import Reports
from railmate.node.settings import Settings
from railmate.node.watching import DeviceWatch
from railmate.nri.plugin import NriPlugin
from railmate.provision.unfinished import Unfinished
from railmate.publish.controller import SliceController
from railmate.topology.ncclwrite import nccl_topology

log = logging.getLogger(__name__)

#: Our place among the runtime's plugins; nothing depends on it.
_NRI_INDEX = "10"
#: Seconds in which calls that were told not to wait any longer are answered.
_TELLING = 1.0
#: Seconds that calls get which are in flight even then, to be ended in order.
_GRACE = 3.0
#: Seconds of the pod's grace period that are kept for the end itself: these two, and up to 5 s of the runtime's side.
_ENDING = 10.0
#: Seconds between two rounds of repairs.
_RECONCILE_EVERY = 60.0
#: Seconds that the ledger's lock may be asked for or held; what takes longer is stuck in the kernel.
_LOCK_PATIENCE = 40.0
#: Seconds that a claim's addresses may be asked for, or its functions bound: ten NICs whose plugins or drivers all take
#: as long as they may (20 and 25 s) are done by then.
_LEASE_PATIENCE = 300.0
#: Seconds in which the kubelet's threads come to a new task. Each prepare waits half a minute at most; more than a node
#: has pods may do so at the same time.
_WORKERS_PATIENCE = 180.0


class Agent:
    """One instance of the node plugin. ``run`` returns after SIGTERM or SIGINT."""

    def __init__(self, settings: Settings, kube: KubeClient) -> None:
        self._settings = settings
        self._registered = self._published = False
        self._reports = Reports(kube, settings.driver_name, settings.node_name)
        self._gate = GateInstaller(
            settings, lambda message: self._reports.node_event("GateNotInstalled", message)
        )
        self._gate.look()
        ledger = Ledger(
            settings.plugin_dir, lambda message: self._reports.node_event("ClaimRecordDamaged", message)
        )
        runtime_files = RuntimeFiles(
            settings.driver_name, settings.plugin_dir, settings.cdi_dir, settings.installed_gate
        )
        self._ledger, self._runtime_files = ledger, runtime_files
        boot = boot_id()
        holdings = Holdings(ledger, boot)
        provisioner = Provisioner(
            settings.provisioning,
            settings.sysfs_root,
            lambda message: self._reports.node_event("VfsNotProvisioned", message),
            holdings.kept_from_claims,
            Unfinished(settings.plugin_dir / "provisioning", boot),
        )
        if not settings.ignore_device_plugins:
            plugins = DevicePlugins(
                kube, settings.node_name, lambda message: self._reports.node_event("GpusWithheld", message)
            )
            settings = replace(settings, handed_out=plugins.handed_out)
        view = first_look(settings, holdings.now, provisioner)
        self._offered = view.offer
        self._vendor_specs = VendorSpecs([Path("/etc/cdi"), settings.cdi_dir])
        observations = Observations(ledger, runtime_files, settings.sysfs_root, settings.dev_root)
        self._attached = AttachedClaims(ledger, observations, self._reports)
        self._reports.on_told = self._attached.told
        self._attached.catch_up(ledger.entries().values())
        self._repairs: Counter[str] = Counter()
        around = Surroundings(
            observer=self._attached,
            repaired=self._count_repair,
            elsewhere=Elsewhere(settings.host_proc),
            on_bus=self._on_bus,
            refreshed=observations.refreshed,
        )
        self._state = ClaimState(kube, self._node_view(view), ledger, runtime_files, boot, around)
        self._reconciler = Reconciler(
            kube,
            ledger,
            runtime_files,
            self._state.moves,
            partial(self._state.unprepare, inherited=True),
            self._live_sandboxes,
            self._state.answered,
            lambda address: netdev_of(settings.sysfs_root, address) is not None,
        )
        self._devices = DeviceWatch(
            settings,
            view,
            boot,
            lambda taints: self._controller.set_taints(taints),
            self._state.changing,
        )
        self._monitor = self._devices.monitor
        self._monitor.look()  # so that what does not work is never published without its taint
        self._instances = Instances(settings.plugin_dir)
        self._controller = SliceController(
            kube,
            settings.driver_name,
            settings.node_name,
            view.offer,
            self._on_published,
            self._on_refused,
            self._monitor.taints,
            lambda message: self._reports.node_event("FeatureGateOff", message),
            settings.without_counters,
            self._instances.outdone,
        )
        self._offers = Newest(self._controller.update, last=view.offer)
        self._watch = MachineWatch(
            settings,
            view,
            holdings.now,
            self._on_changed,
            self._on_gone,
            provisioner,
            self._on_device_event,
        )
        self._paths = sockets(settings.kubelet_dir, settings.driver_name, settings.pod_uid)
        self._kubelet = KubeletServer(
            settings.driver_name,
            self._paths,
            self._state,
            self._on_registered,
            self._monitor,
            settings.node_name,
        )
        self._memlock = Memlock(
            settings.plugin_dir,
            lambda message: self._reports.node_event("MemlockNotRaised", message),
            settings.host_proc,
        )
        self._rdma_cgroup = RdmaCgroup(
            settings.driver_name,
            settings.plugin_dir,
            lambda message: self._reports.node_event("RdmaNotLimited", message),
        )
        self._rdma_cgroup.update(view.inventory, view.offer)
        self._events = RuntimeEvents(
            settings.driver_name, self._state, self._attached, self._memlock, self._rdma_cgroup
        )
        self._ending = Ending(settings.plugin_dir)
        self._nri = NriPlugin(settings.driver_name, _NRI_INDEX, settings.nri_socket, self._events)
        checks = {"/healthz": self._dead, "/readyz": self._missing}
        self._health = HealthServer(settings.http_address, checks) if settings.http_address else None
        self._stopping, self._look_soon = threading.Event(), threading.Event()
        ledger.on_stray = self._look_soon.set
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("slices", self._controller.run),
                ("offers", self._offers.run),
                ("machine", self._watch.run),
                *self._devices.loops.items(),
                ("attached", self._attached.run),
                ("reports", self._reports.run),
                ("reconcile", self._reconcile),
            )
        ]

    async def run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        for thread in self._threads:
            thread.start()
        runtime = asyncio.create_task(self._serve_runtime(), name="nri")
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

    async def _serve_runtime(self) -> None:
        if not await self._ending.ended(self._settings.grace_period):
            log.warning("another instance is still ending after its grace period; going on beside it")
        await self._nri.run_forever()

    async def _end(self, runtime: asyncio.Task[None]) -> None:
        log.info("ending; slices, prepared claims and attached devices stay as they are")
        self._ending.begin()
        # A prepare that is refused is asked again only after 60 to 90 s. What it waits for is noticed here too.
        if not await self._kubelet.answered(self._settings.grace_period - _ENDING):
            log.warning("calls of the kubelet are still waiting, and there is no time left for them")
        self._controller.stop()
        self._offers.stop()
        self._stopping.set()
        self._look_soon.set()
        self._watch.stop()
        self._devices.stop()
        self._state.stop()
        await self._kubelet.answered(_TELLING)
        await self._kubelet.stop(_GRACE)
        self._instances.leave()
        runtime.cancel()
        await asyncio.wait({runtime})
        self._events.close()
        self._attached.stop()
        self._reports.stop()
        if self._health:
            await self._health.stop()

    # --- what is asked from outside
    async def _missing(self) -> list[str]:
        """What a node still lacks before pods with claims may come."""
        missing = []
        if not self._published and not (self._registered and self._controller.left_to_another):
            missing.append("the ResourceSlices are not published")
        if not self._registered:
            missing.append("the kubelet has not registered the driver")
        if not self._nri.connected:
            missing.append(f"the container runtime is not connected ({self._settings.nri_socket})")
        return missing

    async def _dead(self) -> list[str]:
        """What only a restart mends. Goes the kubelet's way: socket, service; then threads, where a task may wait."""
        dead = [f"thread {thread.name} has ended" for thread in self._threads if not thread.is_alive()]
        if self._ledger.busy_for() > _LOCK_PATIENCE:
            dead.append(f"the ledger has been locked for more than {_LOCK_PATIENCE:.0f} s")
        if self._ledger.leasing_for() > _LEASE_PATIENCE:
            dead.append(
                f"a claim's addresses or functions are being changed for more than {_LEASE_PATIENCE:.0f} s"
            )
        dead += [
            f"no {verb} has begun for more than {_WORKERS_PATIENCE:.0f} s though some wait; all threads are stuck"
            for verb, seconds in self._kubelet.stuck_for().items()
            if seconds > _WORKERS_PATIENCE
        ]
        try:
            await probe(self._paths.service)
        except RailmateError as error:
            dead.append(str(error))
        return dead

    # --- what happens inside
    def _reconcile(self) -> None:
        due = 0.0
        while not self._stopping.is_set():
            self._look_soon.clear()
            if time.monotonic() >= due:
                self._reconciler.run()
                self._attached.retry()
                attempt(lambda: self._attached.take_over(self._ledger.entries().values()))
                attempt(self._gate.look)
                self._memlock.look()
                self._rdma_cgroup.look()
                if self._controller.left_to_another:
                    self._offers.repeat()  # nobody tells when that has ended
                due = time.monotonic() + _RECONCILE_EVERY
            # nobody tells when a netdev comes home after its namespace's end, or when a force-deleted pod has ended
            pause = self._reconciler.await_ends()
            left = max(0.0, due - time.monotonic())
            self._look_soon.wait(left if pause is None else min(pause, left))

    def _node_view(self, view: View) -> NodeView:
        settings = self._settings
        return NodeView(
            driver=settings.driver_name,
            pool=settings.node_name,
            offer=view.offer,
            inventory=view.inventory,
            dev_root=settings.dev_root,
            node_exists=Path.exists,
            netdev_of=partial(netdev_of, settings.sysfs_root),
            vendor_cdi=self._vendor_specs.devices,
            cni_dir=settings.cni_bin_dir,
            nccl_topology=self._write_nccl_topology(view),
            char_devices=partial(char_devices, settings.sysfs_root),
            sysfs_root=settings.sysfs_root,
            on_bus=self._on_bus,
        )

    def _on_bus(self, address: str) -> bool:
        return (self._settings.sysfs_root / "bus/pci/devices" / address).exists()

    def _write_nccl_topology(self, view: View) -> bool:
        text = nccl_topology(view.inventory, view.topology)
        return text is not None and attempt(lambda: self._runtime_files.write_nccl_topology(text))

    def _on_changed(self, view: View) -> None:
        self._state.update(self._node_view(view))
        self._devices.update(view)
        self._rdma_cgroup.update(view.inventory, view.offer)
        if view.offer != self._offered:
            self._offered = view.offer
            self._offers.put(view.offer)
        # of what claims hold alone the watch tells by itself
        self._on_gone(self._state.holdings.sharers().keys() - view.inventory.functions.keys())

    def _on_device_event(self) -> None:
        self._monitor.recheck()
        self._look_soon.set()  # a driver that was bound anew has taken its NIC from a pod

    def _on_gone(self, addresses: Set[str]) -> None:
        holdings = self._state.holdings
        holders = {address: [claim] for address, claim in holdings.owners().items()} | holdings.sharers()
        for address in sorted(addresses & holders.keys()):
            message = (
                f"{address} is no longer in node {self._settings.node_name}, and this claim holds it. "
                "Look at the kernel's log on the node; delete the pod to move it to working devices."
            )
            for claim in holders[address]:
                log.error("%s: %s", claim, message)
                self._reports.claim_event(claim, "DeviceGone", message)

    def _live_sandboxes(self) -> Mapping[str, Sandbox] | None:
        return self._events.sandboxes() if self._nri.connected else None

    def _count_repair(self, kind: str) -> None:
        self._repairs[kind] += 1
        log.info("repaired: %s (%d since start)", kind, self._repairs[kind])

    def _on_published(self) -> None:
        self._published = True
        self._instances.kept()

    def _on_registered(self, registered: bool) -> None:
        self._registered = registered
        if registered:
            self._instances.registered()
            self._offers.repeat()  # the slices may have been left to another until now
        else:
            self._instances.withdraw()

    def _on_refused(self, message: str) -> None:
        self._instances.withdraw()
        self._reports.node_event("ResourceSlicesRefused", message)
