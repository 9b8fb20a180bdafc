"""Where metric events go besides the object store and Prometheus: one interface, one file each.

`open_sinks("jsonl=/var/log/vla.jsonl,mlflow=http://mlflow:5000")` opens those that are named.
"""

from vla_platform.metrics.sinks.base import MemorySink, Sink, numbers_of, open_sinks

__all__ = ["MemorySink", "Sink", "numbers_of", "open_sinks"]
