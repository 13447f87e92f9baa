"""From a NIC's config to what is changed of the PCI function itself: its driver, its GUID. Pure."""

from __future__ import annotations

from dataclasses import replace

from railmate.attach.functions import FunctionChange
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.attach.settings import VfSettings
from railmate.attach.sriov import stable_guid
from railmate.claims import nicplan
from railmate.claims.nicplan import SettingsError
from railmate.inventory.model import Inventory, PciFunction
from railmate_api import fields
from railmate_api.config import RdmaVfConfig

_KEEP, _STABLE = "keep", "stable"


def change_of(
    config: RdmaVfConfig,
    function: PciFunction,
    inventory: Inventory,
    alone: bool,
    netdev: bool,
    rdma: tuple[RdmaDeviceRef, ...],
) -> FunctionChange | None:
    """What is done to the function when the claim is prepared; None: nothing. ``alone``: the request has no other NIC;
    ``netdev``: the function has one.

    Raises SettingsError.
    """
    if config.driver is None and config.guid in (None, _KEEP):
        return None
    broken = fields.rule_problems(RdmaVfConfig, fields.said(config))
    if broken:
        raise SettingsError(f"class and claim together: {'; '.join(str(one) for one in broken)}")
    if function.physical_function is None:
        what = "driver" if config.driver else "guid"
        raise SettingsError(f"{what} is for virtual functions, and {function.address} is a physical one")
    if function.driver is None:
        raise SettingsError(f"{function.address} has no driver, so none could be given back to it")
    change = FunctionChange(
        driver=function.driver,
        own_driver=function.driver,
        netdev=netdev,
        rdma=rdma,
        physical=nicplan.physical_port(function, inventory),
    )
    if config.driver is not None:
        if nicplan.is_infiniband(function) and (config.mac or config.vlan):
            raise SettingsError(
                f"{function.address} is an InfiniBand port: it has no mac and no vlan of its own"
            )
        if config.mac and not alone:
            raise SettingsError("mac is for a request of one NIC, and this one has several")
        wanted = nicplan.vf_settings(config, function, inventory) or VfSettings()
        return replace(change, driver=config.driver, wanted=wanted)
    return replace(change, wanted=VfSettings(guid=_guid(config.guid or "", function, inventory, alone)))


def _guid(policy: str, function: PciFunction, inventory: Inventory, alone: bool) -> str:
    nicplan.refuse_ethernet("guid", function)
    port = nicplan.physical_port(function, inventory)
    if port is None:
        raise SettingsError(
            f"guid is set through a physical function's netdev, and {function.address} has none on this node. "
            "Load the module ib_ipoib there"
        )
    if policy != _STABLE:
        if not alone:
            raise SettingsError(
                "a GUID is for a request of one NIC, and this one has several. Use guid: stable, or give each NIC a "
                "request of its own"
            )
        return policy.lower()
    physical = inventory.functions[function.physical_function or ""]
    # as VFs are provisioned
    seed = next((one.node_guid for one in physical.rdma_devices if one.node_guid), None)
    return stable_guid(seed or physical.address, port.vf)
