"""Who may ask, how much, and what becomes of those who hang up."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tools.serving import TINY, Server, serving
from trilobite.errors import SettingError
from trilobite.serve.settings import Settings

ASK = {"prompt": "The sea is", "max_tokens": 4}
LONG = {"prompt": "The sea is", "max_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(talking: Path) -> Iterator[Server]:
    """One slot, one place in the queue, an API key, one page from elsewhere."""
    options = ("--slots", 1, "--queue", 1, "--api-key", "secret", "--cors", "https://example.org")
    with serving(TINY, *options) as server:
        yield server


@pytest.fixture
def http(small: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=small.url, headers=headers, timeout=60) as found:
        yield found


def figure(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"trilobite_{name} ")).split()[1])


def wait_for(http: httpx.Client, name: str, value: float) -> None:
    end = time.monotonic() + 20
    while figure(http, name) != value:
        assert time.monotonic() < end, f"{name} is {figure(http, name)}, not {value}"
        time.sleep(0.02)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions"])
@pytest.mark.parametrize("key", [None, "", "Bearer wrong", "Bearer secret2", "secret"])
def test_without_the_key_nothing_is_told(small: Server, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key}
    ask = httpx.post if path == "/v1/completions" else httpx.get
    answer = ask(f"{small.url}{path}", headers=headers)
    assert answer.status_code == 401
    assert "key" in answer.json()["error"]["message"]


def test_the_page_and_health_need_no_key(small: Server) -> None:
    assert httpx.get(small.url).status_code == 200
    assert httpx.get(f"{small.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/load_model"),
        ("POST", "/reset"),
        ("POST", "/v1/systemone"),
        ("POST", "/v1/audio/transcriptions"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/redoc"),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd"),
    ],
)
def test_what_is_not_offered(http: httpx.Client, method: str, path: str) -> None:
    body = {"model": "x"} if method == "POST" else None
    assert http.request(method, path, json=body).status_code == 404


def test_pages_of_others_may_not_ask_unless_they_were_named(http: httpx.Client) -> None:
    for origin, status in (("https://evil.example", 403), ("null", 403), ("https://example.org", 200)):
        answer = http.post("/v1/completions", json=ASK, headers={"Origin": origin})
        assert answer.status_code == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == (origin if status == 200 else None)
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = http.options("/v1/completions", headers={"Origin": "https://example.org", **ask})
    assert preflight.status_code == 200
    assert (
        http.options("/v1/completions", headers={"Origin": "https://evil.example", **ask}).status_code == 403
    )


def test_a_name_that_points_here_is_not_enough(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/v1/models", headers={"Host": "localhost:1234"}).status_code == 200


def test_bodies(http: httpx.Client) -> None:
    kind = {"Content-Type": "application/json"}
    assert http.post("/v1/completions", content=b"{", headers=kind).status_code == 400
    assert http.post("/v1/completions", content=b"[]", headers=kind).status_code == 400
    assert http.post("/v1/completions", content=b"[" * 100_000, headers=kind).status_code == 400
    assert (
        http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    )
    large = b'{"prompt": "' + b"a" * 2**20 + b'"}'
    assert http.post("/v1/completions", content=large, headers=kind).status_code == 413
    parts = (large[i : i + 65536] for i in range(0, len(large), 65536))  # chunked: no length is told
    assert http.post("/v1/completions", content=parts, headers=kind).status_code == 413


@pytest.mark.parametrize("length", ["Content-Length: 4000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("key", "status"), [("secret", 413), ("wrong", 401)])
def test_who_still_sends_reads_why_it_was_refused(
    http: httpx.Client, length: str, key: str, status: int
) -> None:
    """All of a large body is taken off the line: else closing would reset it, and the answer would be lost."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    )
    part = b"F4240\r\n" + b"a" * 1_000_000 + b"\r\n" if "chunked" in length else b"a" * 1_000_000
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=30) as s:
        s.sendall(head.encode())
        for _ in range(4):
            s.sendall(part)
            time.sleep(0.1)
        if "chunked" in length:
            s.sendall(b"0\r\n\r\n")
        answer = b"".join(iter(lambda: s.recv(65536), b""))
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert answer.endswith(b"}}")


def test_who_hangs_up_frees_the_slot(http: httpx.Client) -> None:
    for stream in (True, False):
        before = figure(http, "generated_tokens_total")
        with socket.create_connection((http.base_url.host, http.base_url.port)) as s:
            s.sendall(_raw(LONG | {"stream": stream}))
            wait_for(http, "texts", 1.0)
        wait_for(http, "texts", 0.0)
        assert figure(http, "generated_tokens_total") - before < 480
        assert figure(http, "requests_running") == 0


def _raw(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    return (head + "Content-Type: application/json\r\nAuthorization: Bearer secret\r\n\r\n").encode() + data


def test_a_full_queue_says_come_again(http: httpx.Client) -> None:
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(http.post, "/v1/completions", json=LONG | {"seed": i}) for i in range(2)]
        wait_for(http, "texts", 2.0)
        assert figure(http, "requests_waiting") == 1
        refused = http.post("/v1/completions", json=ASK)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert [r.result().status_code for r in running] == [200, 200]
    assert http.post("/v1/completions", json=ASK).status_code == 200


def test_other_machines_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(SettingError, match="api-key"):
            Settings(host=host)
        assert not Settings(host=host, api_key="k").local
    for host in ("localhost", "127.0.0.1", "127.8.0.1", "::1", "[::1]"):
        assert Settings(host=host).local
