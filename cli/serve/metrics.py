"""The server's metrics for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """Prometheus metrics with their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.waiting = Gauge("qwenimg_waiting", "Requests that wait", registry=self.registry)
        self.drawing = Gauge("qwenimg_drawing", "Requests that are being drawn", registry=self.registry)
        self.jobs = Counter("qwenimg_requests", "Requests by how they ended", ["outcome"], registry=self.registry)
        self.pictures = Counter("qwenimg_pictures", "Pictures drawn", registry=self.registry)
        self.texts = Counter("qwenimg_texts", "Texts written", registry=self.registry)
        self.tokens = Counter("qwenimg_tokens", "Tokens of these texts", registry=self.registry)
        self.loras = Counter("qwenimg_loras", "LoRAs trained", registry=self.registry)
        self.training_steps = Counter("qwenimg_training_steps", "Steps of these", registry=self.registry)
        buckets = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
        self.seconds = Histogram(
            "qwenimg_picture_seconds", "Seconds to draw a picture", registry=self.registry, buckets=buckets
        )
        self.restarts = Counter("qwenimg_worker_restarts", "Workers started again", registry=self.registry)
        self.up = Gauge("qwenimg_worker_up", "1 if the worker is ready", ["worker"], registry=self.registry)
        self.peak = Gauge(
            "qwenimg_worker_peak_bytes", "Most memory that the worker has had", ["worker"], registry=self.registry
        )

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)
