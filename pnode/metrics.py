"""Prometheus metrics of a PNode, read from its own state when they are asked for. Off unless a port is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wire.errors import UsageError

if TYPE_CHECKING:
    from pnode.daemon import Daemon


class Collector:
    """Reads the daemon; asked from the metrics server's thread, it only reads."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
        daemon = self._daemon
        yield GaugeMetricFamily("dcnr_loop_lag_p99_seconds", "Lag of the event loop", daemon.lag.percentile(0.99))
        status = daemon.compute_status()
        state = GaugeMetricFamily("dcnr_compute_state", "1 for the state the compute thread is in", labels=["state"])
        for name in ("idle", "busy", "stalled", "dead"):
            state.add_metric([name], float(status.state == name))
        yield state
        steps = CounterMetricFamily("dcnr_steps", "Steps applied here", labels=["session"])
        sent = CounterMetricFamily("dcnr_hop_bytes", "Bytes of tensors sent to other PNodes", labels=["session"])
        for name, session in list(daemon.sessions.items()):
            steps.add_metric([name], session.core.applied)
            sent.add_metric([name], sum(list(session.bytes_out.values())))
        yield steps
        yield sent
        refused = CounterMetricFamily("dcnr_refused", "Messages refused", labels=["code"])
        for code, count in list(daemon.hub.counters.items()):
            refused.add_metric([code.removeprefix("refused_")], count)
        for session in list(daemon.sessions.values()):
            for code, count in list(session.core.refused.items()):
                refused.add_metric([code], count)
        yield refused


def serve(daemon: Daemon, port: int) -> None:
    """Answer on http://127.0.0.1:port/metrics. Raises UsageError if the port is taken."""
    registry = CollectorRegistry()
    registry.register(Collector(daemon))
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise UsageError(f"can't serve metrics on port {port}: {error.strerror}", hint="choose another port") from error
