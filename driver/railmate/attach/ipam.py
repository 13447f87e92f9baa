"""Addresses from a CNI IPAM plugin, asked as a CNI plugin asks (CNI specification 1.1.0, sections 2 and 4).

The plugin is asked when the claim is prepared, before the pod has a network namespace, so plugins that look into the
namespace (dhcp) cannot be used.

ADD must not come twice for one owner and interface without a DEL between, and DEL may come any number of times
(section 2, ADD and DEL). So DEL comes once for each address that was lent, and beside that only where it is not known
what a plugin has done: when ADD has failed (section 4), and after a process that was ended before it could note the
outcome of its call.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from railmate.attach.errors import AttachError
from railmate.attach.settings import Route

#: The network that the plugins keep their books under: one for all, so that no address is given twice.
_NETWORK = "railmate"
_VERSION = "1.0.0"
_PATIENCE = 20.0  # seconds; the kubelet gives a prepare 45


@dataclass(frozen=True, slots=True)
class IpamRequest:
    """``config`` is the ``ipam`` section as the user wrote it. ``owner`` and ``interface`` together name the lease."""

    config: Mapping[str, Any]
    owner: str
    interface: str
    pod_namespace: str = ""
    pod_name: str = ""

    def __str__(self) -> str:
        return f"IPAM plugin {self.config.get('type')}"


@dataclass(frozen=True, slots=True)
class Lease:
    addresses: tuple[str, ...]
    routes: tuple[Route, ...]


def obtain(request: IpamRequest, plugins: Path, *, asked_before: bool) -> Lease:
    """Ask for addresses (ADD). ``asked_before``: an earlier attempt may have got some; it is undone first (DEL).

    Raises AttachError with what the plugin said. What a failed ADD has left was given back then, if the plugin could.
    """
    if asked_before:
        release(request, plugins)
    try:
        return _asked(request, plugins)
    except AttachError:
        with suppress(AttachError):  # the first error is the one to tell; the claim's end releases once more
            release(request, plugins)
        raise


def _asked(request: IpamRequest, plugins: Path) -> Lease:
    answer = _run("ADD", request, plugins)
    try:
        return _lease(json.loads(answer))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AttachError(
            f"{request} answered what is no CNI result ({type(error).__name__}: {error})"
        ) from None


def release(request: IpamRequest, plugins: Path) -> None:
    """Give back (DEL) what this owner and interface have, if anything. Raises AttachError with what the plugin said."""
    _run("DEL", request, plugins)


def _lease(answer: Mapping[str, Any]) -> Lease:
    """The result of an IPAM plugin: ``ips`` and ``routes``; a route without ``gw`` goes to the address's gateway."""
    addresses: list[str] = []
    gateways: dict[int, str] = {}
    for one in answer.get("ips") or []:
        address = ipaddress.ip_interface(one["address"])
        addresses.append(str(address))
        if one.get("gateway"):
            gateways.setdefault(address.version, str(ipaddress.ip_address(one["gateway"])))
    routes = []
    for one in answer.get("routes") or []:
        to = ipaddress.ip_network(one["dst"], strict=False)
        gateway = str(ipaddress.ip_address(one["gw"])) if one.get("gw") else gateways.get(to.version)
        routes.append(Route(str(to), gateway, None, one.get("priority") or None, one.get("table") or None))
    if not addresses:
        raise ValueError("it has no ips")
    return Lease(tuple(addresses), tuple(routes))


def _run(command: str, request: IpamRequest, plugins: Path) -> str:
    name = str(request.config["type"])
    config = {"cniVersion": _VERSION, "name": _NETWORK, "type": "railmate", "ipam": dict(request.config)}
    arguments = {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": request.pod_namespace,
        "K8S_POD_NAME": request.pod_name,
        "K8S_POD_INFRA_CONTAINER_ID": request.owner,
    }
    environment = {
        **os.environ,
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": request.owner,
        "CNI_IFNAME": request.interface,
        # must be there, and must not be the plugin's own namespace; there is no pod's yet
        "CNI_NETNS": f"/var/run/netns/railmate-{request.owner}",
        "CNI_PATH": str(plugins),
        "CNI_ARGS": ";".join(f"{key}={value}" for key, value in arguments.items()),
    }
    try:
        done = subprocess.run(
            [str(plugins / name)], input=json.dumps(config), env=environment,
            capture_output=True, text=True, timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AttachError(f"{request} did not answer {command} within {_PATIENCE:.0f} s") from None
    except OSError as error:
        raise AttachError(f"{request} cannot be run as {plugins / name}: {error.strerror}") from None
    if done.returncode:
        raise AttachError(f"{request} refused {command}: {_reason(done.stdout, done.stderr)}")
    return done.stdout


def _reason(output: str, errors: str) -> str:
    """The specification's error object, or whatever there is, in one line."""
    try:
        said = json.loads(output)
        parts = [str(said[key]) for key in ("msg", "details") if said.get(key)]
    except (ValueError, LookupError, TypeError, AttributeError):
        parts = [output, errors]
    return " ".join(" ".join(parts).split())[:500] or "it said nothing"
