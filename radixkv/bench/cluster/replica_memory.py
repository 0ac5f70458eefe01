"""`radixkv bench replica-memory`: how much memory replicas on one machine take, with their own weights and with shared ones.

Measured after all replicas have answered, by the kernel's count of each process's pages (``smaps_rollup``): private ones,
those that other processes have mapped, too, and the proportional set, in which a page mapped by n processes counts as an nth.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console

from radixkv.bench.cluster.replica_process import cluster
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table

_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class ProcessMemory:
    """MiB of a process.

    Attributes:
        private: that no other process has mapped.
        shared: that other processes have mapped, too.
        proportional: each page divided by the number of processes that have mapped it.
    """

    private: float
    shared: float
    proportional: float


def process_memory(pid: int) -> ProcessMemory:
    """What a process takes now.

    Raises:
        OSError: there is no such process, or the system does not report this.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    pages: Mapping[str, float] = {line.split()[0].rstrip(":"): int(line.split()[1]) / 1024 for line in lines}
    return ProcessMemory(
        private=pages["Private_Clean"] + pages["Private_Dirty"],
        shared=pages["Shared_Clean"] + pages["Shared_Dirty"],
        proportional=pages["Pss"],
    )


def run_replica_memory(console: Console, model: str | None, num_replicas: int, json_path: Path | None) -> None:
    """Measure and print.

    Args:
        model: to serve; None: the default one.
        num_replicas: how many run side by side.
        json_path: where to write the figures, too.

    Raises:
        ValueError: a process did not start.
    """
    rows = []
    columns = ("", "weights", "private", "shared", "proportional")
    table = figure_table(*columns, title=f"MiB of one of {num_replicas} replicas, medians", num_labels=2)
    for dtype in _DTYPES:
        for weights, option in (("own", "--no-share-weights"), ("shared", "--share-weights")):
            with console.status(f"{dtype}, {weights} weights"):
                each = _measure(model, num_replicas, "--dtype", dtype, option)
            rows.append({"dtype": dtype, "weights": weights, "replicas": [asdict(memory) for memory in each]})
            medians = [
                statistics.median(values)
                for values in zip(
                    *((memory.private, memory.shared, memory.proportional) for memory in each), strict=True
                )
            ]
            table.add_row(dtype, weights, *(f"{value:,.0f}" for value in medians))
    console.print(table)
    figures = {
        "machine": describe_machine("torch", "transformers"),
        "model": model,
        "num_replicas": num_replicas,
        "rows": rows,
    }
    write_figures(json_path, figures)


def _measure(model: str | None, num_replicas: int, *options: str) -> list[ProcessMemory]:
    with cluster(num_replicas, model, *options) as (replicas, ingress):
        with httpx.Client(base_url=ingress.address, timeout=600.0) as client:
            for number in range(8 * num_replicas):  # unlike each other, so that the router spreads them
                body = {"prompt": f"{number} is a number that", "max_tokens": 8, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()
        return [process_memory(replica.pid) for replica in replicas.values()]
