"""What /metrics says, in the text format of Prometheus."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from transformers import PreTrainedModel

from trilobite.runtime.offload.streaming import streaming
from trilobite.serve.batching import Batching
from trilobite.serve.call import Call

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SPEEDS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """Figures of one server."""

    def __init__(self, model: PreTrainedModel, batching: Batching, slots: int) -> None:
        """All at zero. slots: texts at a time."""
        self.registry = CollectorRegistry()
        self.running = 0
        new: dict[str, Any] = {"namespace": "trilobite", "registry": self.registry}
        self.requests = Counter("requests", "Requests answered", ["path", "status"], **new)
        running = Gauge("requests_running", "Requests for text that run", **new)
        waiting = Gauge("requests_waiting", "Requests for text that wait for a slot", **new)
        running.set_function(lambda: min(self.running, slots))
        waiting.set_function(lambda: max(0, self.running - slots))
        Gauge("texts", "Texts in the batch or before it", **new).set_function(lambda: batching.texts)
        self.prompt = Counter("prompt_tokens", "Tokens of prompts", **new)
        self.cached = Counter("cached_prompt_tokens", "Of these, tokens that were in the cache", **new)
        self.generated = Counter("generated_tokens", "Tokens of answers", **new)
        self.first = Histogram("time_to_first_token_seconds", "From the request on", buckets=SECONDS, **new)
        self.speed = Histogram(
            "tokens_per_second", "Of an answer, after its first token", buckets=SPEEDS, **new
        )
        self.registry.register(ExpertCache(model))

    def answered(self, call: Call) -> None:
        """Note a request that is over."""
        answer = call.answer
        if answer is None:
            return
        self.prompt.inc(call.prompt)
        self.cached.inc(max(0, call.cached))
        self.generated.inc(answer.total_tokens)
        if answer.first:
            self.first.observe(answer.first - call.started)
        if answer.total_tokens > 1 and answer.last > answer.first:
            self.speed.observe((answer.total_tokens - 1) / (answer.last - answer.first))

    def text(self) -> bytes:
        """Everything, as /metrics says it."""
        return generate_latest(self.registry)


class ExpertCache(Collector):
    """Hits and misses of experts that stream from the disk; nothing where none do."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Of one model."""
        self.model = model

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The counters as they are now."""
        found = streaming(self.model)
        if found is None or found.cache is None:
            return
        now = found.counters
        yield CounterMetricFamily("trilobite_expert_cache_hits", "Experts that were in a slot", now.hits)
        yield CounterMetricFamily("trilobite_expert_cache_misses", "Experts that had to be read", now.misses)
        yield CounterMetricFamily("trilobite_expert_bytes_read", "Bytes read from the disk", now.bytes)
