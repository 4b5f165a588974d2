"""Figures of a running server in the text form that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from kvconvert.runtime.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


class Histogram:
    """How many values were at most as large as each of some bounds, and their sum."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        """Its samples; a bucket counts the values of all smaller ones as well."""
        lines, total = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """What the server counts beside its Engine.

    Attributes:
        responses: by path and status; paths that do not exist are one.
        first_token: seconds from a request's arrival to its first token.
        between_tokens: seconds from one step of a choice to its next.
        whole: seconds from a request's arrival to the end of the answer.
        gone: requests that were cancelled because the client went away or did not take the answer.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.first_token, self.between_tokens, self.whole = Histogram(), Histogram(), Histogram()
        self.gone = 0

    def text(self, stats: EngineStats) -> str:
        """Everything, with the counts of the Engine."""
        ended = ("finished", "cancelled", "failed", "refused")
        families: list[tuple[str, str, str, list[str]]] = []

        def add(kind: str, name: str, description: str, samples: Mapping[str, float]) -> None:
            name = f"kvconvert_{name}"
            families.append((kind, name, description, [f"{name}{labels} {n}" for labels, n in samples.items()]))

        add("gauge", "requests_running", "Requests that have a row of the batch.", {"": stats.running})
        add("gauge", "requests_waiting", "Requests in the queue.", {"": stats.waiting})
        outcomes = {f'{{outcome="{name}"}}': getattr(stats, name) for name in ended}
        add("counter", "requests_total", "Requests of the engine that ended, one for each choice.", outcomes)
        add("counter", "prompt_tokens_total", "Prompt tokens read.", {"": stats.prompt_tokens})
        cached = "Prompt tokens taken from stored prefixes instead of being read."
        add("counter", "cached_tokens_total", cached, {"": stats.cached_tokens})
        add("counter", "generated_tokens_total", "Tokens generated.", {"": stats.generated_tokens})
        add("counter", "steps_total", "Steps of the engine.", {"": stats.steps})
        add("counter", "step_seconds_total", "Seconds spent in steps.", {"": stats.seconds})
        add("gauge", "pages_reserved", "Cache pages of a layer set aside for requests.", {"": stats.pages_reserved})
        if stats.pages_free is not None:
            add("gauge", "pages_free", "Cache pages of a layer that hold nothing.", {"": stats.pages_free})
        add("gauge", "state_bytes", "Bytes of the recurrent states of a full batch.", {"": stats.state_bytes})
        add("gauge", "prefix_pages", "Cache pages of a layer that stored prefixes hold.", {"": stats.prefix_pages})
        evicted = "Stored prefixes dropped to make room."
        add("counter", "prefixes_evicted_total", evicted, {"": stats.prefixes_evicted})
        add("counter", "clients_gone_total", "Requests whose client went away or stopped reading.", {"": self.gone})
        responses = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(self.responses.items())}
        add("counter", "http_responses_total", "Responses by path and status.", responses)
        for name, description, histogram in (
            ("first_token_seconds", "From a request's arrival to its first token.", self.first_token),
            ("token_seconds", "From one step of a choice to its next.", self.between_tokens),
            ("request_seconds", "From a request's arrival to the end of its answer.", self.whole),
        ):
            families.append(("histogram", f"kvconvert_{name}", description, histogram.lines(f"kvconvert_{name}")))
        lines = []
        for kind, name, description, samples in families:
            lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}", *samples]
        return "\n".join(lines) + "\n"
