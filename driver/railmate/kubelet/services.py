"""The gRPC services that the kubelet calls.

DRAPlugin v1 and v1beta1 carry the same calls; v1 comes first in what we announce, and the kubelet
takes the first that it knows. An answer holds every claim that was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from railmate.claims.records import ClaimRef
from railmate.claims.state import PreparedClaim
from railmate.errors import RailmateError
from railmate.kubelet.calls import Call, Calls
from railmate.kubelet.workers import Workers
from railmate_api.proto import dra_v1_pb2, dra_v1beta1_pb2, pluginregistration_pb2

log = logging.getLogger(__name__)

#: In the order of preference. These names are not the wire services' names.
SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")


class ClaimVerbs(Protocol):
    def prepare(self, ref: ClaimRef, *, given_up: threading.Event) -> PreparedClaim:
        """``given_up``: set when nobody waits for the answer any more."""
        ...

    def unprepare(self, ref: ClaimRef) -> None: ...


class DraPlugin:
    """One version of the service; ``messages`` is the module compiled from its description.

    The verbs block, prepare for up to half a minute, so they run in ``workers``: threads of their own,
    which leave others free for the runtime's calls.
    """

    def __init__(
        self, verbs: ClaimVerbs, workers: Workers, messages: ModuleType, calls: Calls | None = None
    ) -> None:
        self._verbs, self._workers, self._messages = verbs, workers, messages
        self._calls = calls or Calls()

    async def NodePrepareResources(self, request: Any, context: Call) -> Any:
        self._calls.begin(context)
        answer = self._messages.NodePrepareResourcesResponse()
        claims = _named(request)
        # By the kubelet, whose time is over, whose pod is deleted, or which ends. It may ask another instance of the
        # driver to give the claim back, which knows nothing of a prepare that waits here.
        given_up = threading.Event()
        verb = partial(self._verbs.prepare, given_up=given_up)
        try:
            outcomes = await asyncio.gather(*(self._call(self._workers.prepare, verb, ref) for ref in claims))
        except asyncio.CancelledError:
            given_up.set()
            raise
        for ref, outcome in zip(claims, outcomes, strict=True):
            one = answer.claims[ref.uid]
            if isinstance(outcome, str):
                one.error = outcome
                continue
            for device in outcome.devices:
                told = one.devices.add(
                    request_names=[device.request],
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=outcome.cdi_ids[device.key],
                )
                if (
                    device.share_id is not None and "share_id" in told.DESCRIPTOR.fields_by_name
                ):  # not in v1beta1
                    told.share_id = device.share_id
        return answer

    async def NodeUnprepareResources(self, request: Any, context: Call) -> Any:
        self._calls.begin(context)
        answer = self._messages.NodeUnprepareResourcesResponse()
        claims = _named(request)
        outcomes = await asyncio.gather(
            *(self._call(self._workers.unprepare, self._verbs.unprepare, ref) for ref in claims)
        )
        for ref, outcome in zip(claims, outcomes, strict=True):
            answer.claims[ref.uid].error = outcome if isinstance(outcome, str) else ""
        return answer

    @staticmethod
    async def _call(workers: Executor, verb: Callable[[ClaimRef], Any], ref: ClaimRef) -> Any:
        """The verb's result, or the error's text: one claim's trouble is not another's."""
        try:
            return await asyncio.get_running_loop().run_in_executor(workers, verb, ref)
        except RailmateError as error:
            log.warning("%s", error)
            return str(error)
        except Exception as error:
            log.exception("%s: unexpected error", ref)
            return f"{ref}: unexpected {type(error).__name__}: {error}. This is a bug in railmate; its log has more."


def _named(request: Any) -> list[ClaimRef]:
    """The claims of a request, each once."""
    return list(dict.fromkeys(ClaimRef(claim.uid, claim.namespace, claim.name) for claim in request.claims))


def v1(verbs: ClaimVerbs, workers: Workers, calls: Calls | None = None) -> DraPlugin:
    return DraPlugin(verbs, workers, dra_v1_pb2, calls)


def v1beta1(verbs: ClaimVerbs, workers: Workers, calls: Calls | None = None) -> DraPlugin:
    return DraPlugin(verbs, workers, dra_v1beta1_pb2, calls)


class Registration:
    """Tells the kubelet who we are, and hears how it went."""

    def __init__(
        self,
        driver: str,
        endpoint: str,
        on_change: Callable[[bool], None],
        versions: Sequence[str] = SUPPORTED_VERSIONS,
    ) -> None:
        """``versions``: of the services that are served on ``endpoint``."""
        self._driver, self._endpoint, self._on_change, self._versions = driver, endpoint, on_change, versions

    async def GetInfo(self, request: object, context: object) -> Any:
        return pluginregistration_pb2.PluginInfo(
            type="DRAPlugin",
            name=self._driver,
            endpoint=self._endpoint,
            supported_versions=self._versions,
        )

    async def NotifyRegistrationStatus(self, request: Any, context: object) -> Any:
        if request.plugin_registered:
            log.info("registered with the kubelet as %s", self._driver)
        else:
            log.error("the kubelet refused %s: %s. It tries again by itself.", self._driver, request.error)
        self._on_change(request.plugin_registered)
        return pluginregistration_pb2.RegistrationStatusResponse()
