"""A thin client for the few API objects that the node plugin reads and writes.

Objects are plain JSON dicts: the slices are compared field by field with what was sent, and a typed
model would drop fields it does not know. Authentication, TLS and kubeconfig are the ``kubernetes``
package's. Calls block and are safe to make from several threads.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote, urlencode

import urllib3
import yaml
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, load_kube_config

from railmate.errors import UsageError
from railmate.kube.errors import ApiError
from railmate.kube.token import configure_in_pod

#: A JSON object of the API.
Object = dict[str, Any]

_RESOURCE = "/apis/resource.k8s.io/v1"
#: Connect and read timeout in seconds: well inside the kubelet's 45 s for a prepare call.
_TIMEOUT = (3.0, 10.0)
_APPLY = "application/apply-patch+yaml"
#: A server that is gone without a word (its machine lost power, a firewall forgot the connection) is noticed after half
#: a minute, also by a watch, which may hear nothing for minutes (tcp(7)).
_KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Linux; `railmate explain` runs elsewhere, too
    *([(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)] if hasattr(socket, "TCP_KEEPIDLE") else []),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


#: What the loader raises for a file that is no kubeconfig, beside its own exception.
_BAD_CONFIG = (ConfigException, yaml.YAMLError, OSError, TypeError, ValueError, AttributeError, LookupError)


class KubeClient:
    """The calls of the node plugin. Every method raises ApiError."""

    def __init__(self, configuration: Configuration) -> None:
        # urllib3's own three retries would multiply the time-outs past the kubelet's; who calls tries again.
        configuration.retries = False
        configuration.socket_options = _KEEPALIVE
        self._api = ApiClient(configuration)

    @classmethod
    def connect(cls, kubeconfig: str | None = None) -> KubeClient:
        """From a kubeconfig file, or from the pod's ServiceAccount when none is given."""
        configuration = Configuration()
        try:
            if kubeconfig:
                load_kube_config(config_file=kubeconfig, client_configuration=configuration)
            else:
                configure_in_pod(configuration)
        except _BAD_CONFIG as error:
            where = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
            words = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"{where} cannot be used: {words}. Outside a pod, give --kubeconfig.") from error
        return cls(configuration)

    # --- what is used
    def read(self, path: str) -> Object:
        """Any object or list, for commands that only look."""
        return self._call("GET", path)

    def get_claim(self, namespace: str, name: str) -> Object:
        return self._call("GET", f"{_RESOURCE}/namespaces/{quote(namespace)}/resourceclaims/{quote(name)}")

    def get_node(self, name: str) -> Object:
        return self._call("GET", f"/api/v1/nodes/{quote(name)}")

    def list_slices(self, driver: str, node: str) -> tuple[list[Object], str]:
        """The driver's slices of one node, and the list's resource version to watch from."""
        answer = self._call("GET", f"{_RESOURCE}/resourceslices", query=_own_slices(driver, node))
        return answer["items"], answer["metadata"]["resourceVersion"]

    def create_slice(self, body: Object) -> Object:
        return self._call("POST", f"{_RESOURCE}/resourceslices", body=body)

    def try_slice(self, body: Object) -> Object:
        """The slice as the server would keep it; nothing is written."""
        return self._call("POST", f"{_RESOURCE}/resourceslices", query={"dryRun": "All"}, body=body)

    def update_slice(self, body: Object) -> Object:
        return self._call("PUT", f"{_RESOURCE}/resourceslices/{quote(body['metadata']['name'])}", body=body)

    def delete_slice(self, existing: Object) -> None:
        """Delete exactly this version of the slice; one that is gone already is fine."""
        metadata = existing["metadata"]
        preconditions = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        try:
            self._call("DELETE", f"{_RESOURCE}/resourceslices/{quote(metadata['name'])}", body=options)
        except ApiError as error:
            if not error.not_found:
                raise

    def watch_slices(self, driver: str, node: str, resource_version: str, seconds: int) -> Iterator[Object]:
        """Watch events (``type``, ``object``) for at most ``seconds``; ends when the server ends it."""
        query = _own_slices(driver, node)
        query |= {"watch": "true", "resourceVersion": resource_version, "timeoutSeconds": str(seconds)}
        response = self._open("GET", f"{_RESOURCE}/resourceslices", query, None, (3.0, seconds + 5.0))
        try:
            pending = b""
            for chunk in response.stream(65536, decode_content=True):
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield json.loads(line)
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ApiError(f"watch of ResourceSlices of node {node}: broke off ({error})") from error
        finally:
            response.close()
            response.release_conn()

    def apply_claim_status(self, namespace: str, name: str, body: Object) -> None:
        """Server-side apply of the claim's status, under our own field manager."""
        path = f"{_RESOURCE}/namespaces/{quote(namespace)}/resourceclaims/{quote(name)}/status"
        self._call("PATCH", path, query={"fieldManager": "railmate", "force": "true"}, apply=body)

    def create_event(self, namespace: str, event: Object) -> None:
        self._call("POST", f"/api/v1/namespaces/{quote(namespace)}/events", body=event)

    # --- plumbing
    def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        apply: Object | None = None,
    ) -> Object:
        if apply is None:
            response = self._open(method, path, query or {}, body, _TIMEOUT)
        else:  # JSON is YAML; the client passes a string on as it is
            response = self._open(method, path, query or {}, json.dumps(apply), _TIMEOUT, _APPLY)
        try:
            return cast(Object, json.loads(response.data))
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ApiError(f"{method} {path}: the API server's answer broke off ({error})") from error

    def _open(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | str | None,
        timeout: tuple[float, float],
        content_type: str = "application/json",
    ) -> urllib3.BaseHTTPResponse:
        serialized = self._api.param_serialize(
            method=method,
            resource_path=f"{path}?{urlencode(query)}" if query else path,
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._api.call_api(*serialized, _request_timeout=timeout)
        except (urllib3.exceptions.HTTPError, ApiException) as error:
            raise ApiError(f"{method} {path}: the API server is not reachable ({error})") from error
        response = cast(urllib3.BaseHTTPResponse, answer.response)
        if response.status >= 400:
            raise _api_error(method, path, response)
        return response


def _own_slices(driver: str, node: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.driver={driver},spec.nodeName={node}"}


def _api_error(method: str, path: str, response: urllib3.BaseHTTPResponse) -> ApiError:
    raw = response.data
    try:
        status = json.loads(raw)
        message, reason = str(status["message"]), str(status.get("reason", ""))
    except (ValueError, KeyError, TypeError):
        message, reason = raw.decode(errors="replace")[:200], ""
    return ApiError(f"{method} {path}: {message} (HTTP {response.status})", response.status, reason)
