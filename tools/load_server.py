"""Asks a server for many texts at once, hangs up on some, sends it nonsense, and looks whether all others were right.

    python tools/load_server.py --requests 1000 --clients 16

Starts `trilobite serve` on a model, makes its answers with `trilobite generate` first, and compares: greedy texts, of a
model in float32, whose best logits are further apart than rounding moves them. One request in five is aborted at a
random moment, one in twenty is malformed. Prints what went wrong; the last line is JSON. Exit status 1 where anything
did: a wrong or missing answer, a status of 500 or more, memory that grows, a text that stays in the batch.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.serving import Server, model_in_float32, serving

PROMPTS = ("The sea is", "Once upon a time", "It was a dark", "He said that", "My dear sir", "In the year")
TOKENS = (1, 7, 24, 60)
NONSENSE = (
    b"",
    b"{",
    b"[1, 2]",
    b'{"prompt": 3}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": 1e99}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b'{"prompt": "a", "model": "../../etc/passwd"}',
    b"\xff\xfe{}",
)
MEMORY = 0.05
"""Share by which memory may grow between the end of the first quarter of the requests and that of all."""

Expected = Mapping[tuple[str, int], str]


@dataclass
class Report:
    """outcomes: requests by what became of them    wrong: answers that were not the expected ones, and what came."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    warm: int = 0
    end: int = 0
    left: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not self.wrong and not self.left and self.end <= self.warm * (1 + MEMORY)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "outcomes": dict(sorted(self.outcomes.items())),
            "wrong": len(self.wrong),
            "memory_warm": self.warm,
            "memory_end": self.end,
            "texts_left": self.left,
            "good": self.good,
        }


class Load:
    """Clients that share a list of requests to be made."""

    def __init__(self, server: Server, expected: Expected, requests: int) -> None:
        """expected: what `expected_texts` makes of the server's model."""
        self.server, self.expected = server, expected
        self.requests, self.left = requests, 0
        self.random = random.Random(7)
        self.report = Report()

    async def run(self, clients: int) -> Report:
        """All requests, by so many clients at a time."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=300, limits=_limits(clients)) as http:
            self.report.warm = await self._burst(http, clients, self.requests // 4)
            self.report.end = await self._burst(http, clients, self.requests - self.requests // 4)
            metrics = (await http.get("/metrics")).text
            self.report.left = float(re.findall(r"^trilobite_texts (\S+)", metrics, re.MULTILINE)[0])
        return self.report

    async def _burst(self, http: httpx.AsyncClient, clients: int, requests: int) -> int:
        """Bytes of memory once all are answered and nobody asks."""
        self.left = requests
        await asyncio.gather(*(self._client(http) for _ in range(clients)))
        await asyncio.sleep(1)
        return self.server.resident()

    async def _client(self, http: httpx.AsyncClient) -> None:
        while self.left:
            self.left -= 1
            drawn = self.random.random()
            if drawn < 0.05:
                await self._malformed(http)
            else:
                await self._text(http, aborted=drawn < 0.25)

    async def _malformed(self, http: httpx.AsyncClient) -> None:
        body = self.random.choice(NONSENSE)
        answer = await http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        self._note("refused" if 400 <= answer.status_code < 500 else "", f"{body!r}: {answer.status_code}")

    async def _text(self, http: httpx.AsyncClient, aborted: bool) -> None:
        key = self.random.choice(list(self.expected))
        stream = self.random.random() < 0.5
        body = {"prompt": key[0], "max_tokens": key[1], "stream": stream}
        patience = self.random.uniform(0, 0.3) if aborted else None
        try:
            text = await asyncio.wait_for(_streamed(http, body) if stream else _whole(http, body), patience)
        except asyncio.TimeoutError:
            self.report.outcomes["aborted"] += 1
            return
        right = text == self.expected[key]
        self._note("right" if right else "", f"{key}, stream={stream}: {text!r} for {self.expected[key]!r}")

    def _note(self, outcome: str, what: str) -> None:
        self.report.outcomes[outcome or "wrong"] += 1
        if not outcome:
            self.report.wrong.append(what)


async def _whole(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return f"status {answer.status_code}: {answer.text}"
    return str(answer.json()["choices"][0]["text"])


async def _streamed(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    pieces = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                data = json.loads(line.removeprefix("data: "))
                pieces.append(data["choices"][0]["text"] if "choices" in data else line)
    return "".join(pieces)


def _limits(clients: int) -> httpx.Limits:
    return httpx.Limits(max_connections=clients)


def expected_texts(model: Path) -> Expected:
    """What `generate` makes of every prompt, greedily."""
    import trilobite
    from trilobite.runtime.generate.text import Sampling, generate
    from trilobite.runtime.load import load_tokenizer

    loaded, tokenizer = trilobite.load(str(model)), load_tokenizer(str(model))
    return {
        (prompt, tokens): generate(loaded, tokenizer, prompt, tokens=tokens, sampling=Sampling()).text
        for prompt in PROMPTS
        for tokens in TOKENS
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the bundled one, in float32")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    args = parser.parse_args()
    with TemporaryDirectory() as work:
        model = args.model or model_in_float32(Path(work) / "model")
        expected = expected_texts(model)
        with serving(model, "--slots", args.slots) as server:
            report = asyncio.run(Load(server, expected, args.requests).run(args.clients))
    for line in report.wrong[:20]:
        print(line)
    print(json.dumps(report.to_dict()))
    sys.exit(not report.good)


if __name__ == "__main__":
    main()
