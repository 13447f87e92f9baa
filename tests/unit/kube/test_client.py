"""The client against a server that misbehaves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kubernetes.client.configuration import Configuration

import railmate.kube.client as module
from railmate.errors import UsageError
from railmate.kube.client import KubeClient
from railmate.kube.errors import ApiError

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers every request by ``answer`` and remembers it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[Any] = []
        self.answer: Answer = lambda handler: send(handler, 200, {})
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.requests.append((self.command, self.path, body))
                outer.headers.append(self.headers)
                outer.answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any

            def log_message(self, *arguments: Any) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: Any, length: int | None = None) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)
    if length is not None:
        handler.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.fixture
def client(server: Server) -> KubeClient:
    return KubeClient(configuration(server.url))


def configuration(url: str) -> Configuration:
    one = Configuration()
    one.host = url
    one.api_key = {"authorization": "Bearer secret-token"}
    one.no_proxy = "127.0.0.1"
    return one


def test_claim_is_read_by_namespace_and_name(server: Server, client: KubeClient) -> None:
    server.answer = lambda handler: send(handler, 200, {"metadata": {"name": "c"}, "unknown": {"kept": 1}})
    assert client.get_claim("team", "c") == {"metadata": {"name": "c"}, "unknown": {"kept": 1}}
    assert server.requests == [("GET", "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c", None)]
    assert server.headers[0]["Authorization"] == "Bearer secret-token"


def test_slices_are_asked_for_by_driver_and_node(server: Server, client: KubeClient) -> None:
    server.answer = lambda handler: send(handler, 200, {"items": [1], "metadata": {"resourceVersion": "7"}})
    assert client.list_slices("railmate.dev", "node1") == ([1], "7")
    assert "fieldSelector=spec.driver%3Drailmate.dev%2Cspec.nodeName%3Dnode1" in server.requests[0][1]


def test_deletion_is_of_exactly_what_was_seen(server: Server, client: KubeClient) -> None:
    client.delete_slice({"metadata": {"name": "s", "uid": "u", "resourceVersion": "7"}})
    method, path, body = server.requests[0]
    assert (method, path) == ("DELETE", "/apis/resource.k8s.io/v1/resourceslices/s")
    assert body["preconditions"] == {"uid": "u", "resourceVersion": "7"}


def test_what_is_deleted_already_is_fine_and_a_conflict_is_not(server: Server, client: KubeClient) -> None:
    existing = {"metadata": {"name": "s", "uid": "u", "resourceVersion": "7"}}
    server.answer = lambda handler: send(handler, 404, {"message": "not found"})
    client.delete_slice(existing)
    server.answer = lambda handler: send(handler, 409, {"message": "changed", "reason": "Conflict"})
    with pytest.raises(ApiError) as caught:
        client.delete_slice(existing)
    assert caught.value.conflict


def test_error_carries_the_servers_words(server: Server, client: KubeClient) -> None:
    status = {"message": 'resourceclaims "c" not found', "reason": "NotFound"}
    server.answer = lambda handler: send(handler, 404, status)
    with pytest.raises(ApiError, match='resourceclaims "c" not found') as caught:
        client.get_claim("team", "c")
    assert (caught.value.status, caught.value.reason, caught.value.not_found) == (404, "NotFound", True)


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"", b"null", b"[]", b'"x"', b"\xff\xfe"])
def test_error_without_a_status_object_is_an_error_all_the_same(
    server: Server, client: KubeClient, body: bytes
) -> None:
    server.answer = lambda handler: send(handler, 502, body)
    with pytest.raises(ApiError, match="502"):
        client.get_node("node1")


@pytest.mark.parametrize("body", [b"<html>", b"", b"\xff"])
def test_answer_that_is_no_json_is_an_error(server: Server, client: KubeClient, body: bytes) -> None:
    server.answer = lambda handler: send(handler, 200, body)
    with pytest.raises(ApiError, match="broke off"):
        client.get_node("node1")


def test_answer_that_breaks_off_is_an_error(server: Server, client: KubeClient) -> None:
    server.answer = lambda handler: send(handler, 200, b'{"metadata', length=500)
    with pytest.raises(ApiError):
        client.get_node("node1")


def test_unreachable_server_is_an_error_that_says_so() -> None:
    with pytest.raises(ApiError, match="not reachable") as caught:
        KubeClient(configuration("http://127.0.0.1:1")).get_node("node1")
    assert caught.value.status == 0


def test_tls_trouble_is_an_error_that_says_so(server: Server) -> None:
    with pytest.raises(ApiError, match="not reachable"):
        KubeClient(configuration(server.url.replace("http:", "https:"))).get_node("node1")


def test_slow_server_costs_one_timeout(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare has 45 s in all: a call that is quietly repeated three times would use them up."""
    monkeypatch.setattr(module, "_TIMEOUT", (0.3, 0.3))
    server.answer = lambda handler: server.released.wait(10)
    with pytest.raises(ApiError):
        KubeClient(configuration(server.url)).get_claim("team", "c")
    assert len(server.requests) == 1


# --- watch
def stream(*chunks: bytes, broken: bool = False) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            handler.wfile.flush()
        if not broken:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer


def test_events_come_whole_however_they_are_cut(server: Server, client: KubeClient) -> None:
    text = b'{"type":"ADDED","object":{"a":1}}\n{"type":"DELETED","object":{}}\n'
    server.answer = stream(*(text[i : i + 7] for i in range(0, len(text), 7)))
    events = list(client.watch_slices("railmate.dev", "node1", "7", 30))
    assert [event["type"] for event in events] == ["ADDED", "DELETED"]
    assert "resourceVersion=7" in server.requests[0][1]
    assert "timeoutSeconds=30" in server.requests[0][1]


def test_event_comes_at_once_and_not_when_the_watch_ends(server: Server, client: KubeClient) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        line = b'{"type":"DELETED","object":{}}\n'
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        handler.wfile.flush()
        server.released.wait(10)
        handler.close_connection = True

    server.answer = answer
    watch = client.watch_slices("railmate.dev", "node1", "7", 30)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(next(watch)))
    thread.start()
    thread.join(5)
    assert [event["type"] for event in got] == ["DELETED"]
    server.released.set()
    watch.close()  # type: ignore[attr-defined]


def test_broken_watch_is_an_error(server: Server, client: KubeClient) -> None:
    server.answer = stream(b'{"type":"ADDED","object":{}}\n', broken=True)
    with pytest.raises(ApiError, match="watch of ResourceSlices"):
        list(client.watch_slices("railmate.dev", "node1", "7", 30))


def test_watch_line_that_is_no_json_is_an_error(server: Server, client: KubeClient) -> None:
    server.answer = stream(b"<html>\n")
    with pytest.raises(ApiError):
        list(client.watch_slices("railmate.dev", "node1", "7", 30))


def test_refused_watch_is_an_error(server: Server, client: KubeClient) -> None:
    server.answer = lambda handler: send(handler, 410, {"message": "too old resource version"})
    with pytest.raises(ApiError, match="too old"):
        list(client.watch_slices("railmate.dev", "node1", "7", 30))


def test_a_server_that_is_gone_without_a_word_is_noticed_within_half_a_minute(
    server: Server, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a watch would hear nothing of slices that are wiped until it has lasted its time."""
    made: list[socket.socket] = []
    real = urllib3.util.connection.create_connection

    def create_connection(*arguments: Any, **more: Any) -> socket.socket:
        made.append(real(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(urllib3.util.connection, "create_connection", create_connection)
    server.answer = lambda handler: send(handler, 200, {})
    client.get_node("node1")
    (one,) = made
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, count = (
        one.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + interval * count <= 30


# --- kubeconfig
@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "- a",
        "5",
        "apiVersion: v1\nkind: Config",
        "current-context: x\ncontexts: []",
        "contexts: 5",
    ],
)
def test_bad_kubeconfig_is_bad_usage(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=str(path)) as caught:
        KubeClient.connect(str(path))
    assert "\n" not in str(caught.value)


def test_kubeconfig_that_is_a_directory_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        KubeClient.connect(str(tmp_path))


def test_outside_a_pod_a_kubeconfig_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="--kubeconfig"):
        KubeClient.connect()
