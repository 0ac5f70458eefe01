"""`radixkv simulate`: hit rates by policy and size, with bounds, a plot and a recommendation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from radixkv.cache import POLICIES
from radixkv.cache.counted import counted
from radixkv.observe.simulate.bounds import belady, block_lru, unlimited
from radixkv.observe.simulate.replay import replay
from radixkv.observe.simulate.synthetic import SYNTHETIC
from radixkv.observe.simulate.tiers import TieredRun, draw_tiers, parse_tiers, simulate_tiers
from radixkv.observe.simulate.trace import Trace, read_trace

BLOCK_LRU, BELADY = "LRU by blocks", "Belady's bound"
_TOLERANCE = 0.005  # hit rates that differ by less count as equal


@dataclass(slots=True)
class Report:
    """Hit rates: blocks hit over blocks requested.

    Attributes:
        rates: by policy or bound, one entry per entry of ``num_blocks``.
        tiers: what tiers would bring, one entry per entry of ``num_blocks``; empty if none were given.
    """

    trace: str
    num_requests: int
    num_asked_blocks: int
    num_distinct_blocks: int
    block_size: int
    num_blocks: list[int]
    unlimited: float
    rates: dict[str, list[float]] = field(default_factory=dict)
    advice: str = ""
    tiers: list[TieredRun] = field(default_factory=list)

    def plot(self, path: Path) -> None:
        """Plot hit rate against size, one line per policy."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for policy, rates in self.rates.items():
            (line,) = axes.plot(self.num_blocks, rates, marker="o", label=policy)
            if policy not in POLICIES:
                line.set(color="black", linestyle=":" if policy == BELADY else "--")
        axes.axhline(self.unlimited, color="grey", linewidth=0.8, label="unlimited")
        axes.set_xscale("log")
        axes.set_xticks(self.num_blocks, [f"{size:,}" for size in self.num_blocks])
        axes.minorticks_off()
        axes.set_xlabel(f"blocks of {self.block_size} tokens")
        axes.set_ylabel("blocks hit / blocks requested")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path)

    def print_to(self, console: Console) -> None:
        """Print hit rates, the recommendation and what tiers would bring."""
        console.print(self._table())
        console.print(self.advice, highlight=False)
        if self.tiers:
            first_policy = next(iter(self.rates))
            console.print(draw_tiers(self.tiers, first_policy, self.num_distinct_blocks))

    def _table(self) -> Table:
        table = Table(
            title=f"hit rate of {counted(self.num_asked_blocks, 'block')} requested, {self.num_distinct_blocks:,} distinct"
        )
        table.add_column("policy")
        for size in self.num_blocks:
            table.add_column(f"{size:,}\n{size / self.num_distinct_blocks:.0%}", justify="right")
        for policy, rates in self.rates.items():
            if policy == BLOCK_LRU:
                table.add_section()
            table.add_row(policy, *(f"{rate:.3f}" for rate in rates))
        table.add_row("unlimited", *([f"{self.unlimited:.3f}"] * len(self.num_blocks)))
        return table


def load(name: str) -> Trace:
    """Read a trace file, or generate a synthetic trace by its name.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such file, or it is not a trace.
    """
    if name in SYNTHETIC:
        return SYNTHETIC[name]()
    path = Path(name)
    if not name or not path.exists():
        raise ValueError(f"trace: expected a file or one of {', '.join(SYNTHETIC)}, got {name!r}")
    return read_trace(path)


def parse_sizes(text: str, num_distinct_blocks: int, option: str = "--blocks") -> list[int]:
    """Cache sizes from ``1000,2000`` or, as shares of the distinct blocks, ``2%,5%``; a share is at least one block.

    Raises:
        ValueError: an entry is neither.
    """
    sizes = []
    for part in text.split(","):
        try:
            share = float(part.strip().removesuffix("%")) / 100 if part.strip().endswith("%") else None
            size = int(part) if share is None else max(int(share > 0), round(share * num_distinct_blocks))
        except (ValueError, OverflowError):
            size = 0
        if size < 1:
            raise ValueError(f"{option}: expected numbers of blocks, or shares such as 5%, above 0, got {part!r}")
        sizes.append(size)
    return sorted(set(sizes))


def parse_names(option: str, text: str, known: Collection[str]) -> list[str]:
    """Names from ``one,another``, or all that are known from ``all``.

    Raises:
        ValueError: there is no such name; the message names the option.
    """
    names = list(known) if text == "all" else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: expected all or some of {', '.join(known)}, got {name!r}")
    return names


def simulate(name: str, trace: Trace, sizes: Sequence[int], policies: Sequence[str], console: Console) -> Report:
    """Replay a trace under every policy and size."""
    report = Report(
        name,
        len(trace.requests),
        trace.num_asked_blocks,
        trace.num_distinct_blocks,
        trace.block_size,
        list(sizes),
        unlimited(trace),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=len(trace.requests) * len(sizes) * len(policies))
        for policy in policies:
            rates = report.rates[policy] = []
            for size in sizes:
                progress.update(task, description=f"{policy}, {counted(size, 'block')}")
                num_hits = 0
                for count in replay(trace, size, POLICIES[policy]()):
                    num_hits += count
                    progress.advance(task)
                rates.append(num_hits / max(1, report.num_asked_blocks))
    report.rates[BLOCK_LRU] = [block_lru(trace, size) for size in sizes]
    report.rates[BELADY] = [belady(trace, size) for size in sizes]
    return report


def advise(report: Report, bytes_per_token: int | None) -> str:
    """A recommendation in one sentence: another policy, more memory, or no change."""
    policies = [name for name in report.rates if name in POLICIES]
    name = "lru" if "lru" in policies else policies[0]
    rates = report.rates[name]
    best = max(policies, key=lambda policy: report.rates[policy][0])
    sizes = report.num_blocks
    gain = next((index for index, rate in enumerate(rates) if rate >= rates[0] + _TOLERANCE), None)
    if report.unlimited - rates[0] < _TOLERANCE:
        is_enough = "is enough" if sizes[0] == 1 else "are enough"
        return f"{counted(sizes[0], 'block')} {is_enough}: no cache of any size would hit more than {report.unlimited:.2f}."
    if gain is None:
        falls = min(rates) < rates[0] - _TOLERANCE
        stays = "gains nothing" if falls else f"stays near {rates[0]:.2f}"
        sentence = f"{name} {stays} up to {counted(sizes[-1], 'block')}"
        more = ""
    else:
        # The first size that gains at least half of what the best one does, which need not be the largest: a larger cache
        # admits scans that a smaller one has no room for.
        most = max(rates)
        index = next(i for i, rate in enumerate(rates) if rate - rates[0] >= (most - rates[0]) / 2)
        blocks = sizes[index] - sizes[0]
        memory = "" if bytes_per_token is None else f" ({blocks * report.block_size * bytes_per_token / 2**30:.1f} GiB)"
        sentence = (
            f"{counted(blocks, 'block')} more{memory} would raise the hit rate of {name} "
            f"from {rates[0]:.2f} to {rates[index]:.2f}"
        )
        more = f"; {best} gets there without" if report.rates[best][0] >= rates[index] - _TOLERANCE else ""
    if not more and report.rates[best][0] >= rates[0] + _TOLERANCE:
        more = f"; {best} reaches {report.rates[best][0]:.2f} with {sizes[0]:,}"
    return f"{sentence}{more}."


def simulate_trace(
    console: Console,
    name: str,
    blocks: str,
    policy: str,
    bytes_per_token: int | None,
    tiers: Sequence[str],
    token_seconds: float,
) -> Report:
    """Read a trace and replay it.

    Args:
        console: shows the progress.
        name: of the trace, see `load`.
        blocks: see `parse_sizes`.
        policy: names from `POLICIES`, see `parse_names`; tiers lie below a pool under the first of them.
        bytes_per_token: of keys and values, to advise in GiB; None: in blocks.
        tiers: see `parse_tiers`.
        token_seconds: to compute a token of a prompt, against which a tier's loads count.

    Raises:
        OSError, ValueError: an argument is invalid, or no prompt of the trace fills a block.
    """
    policies = parse_names("--policy", policy, POLICIES)
    trace = load(name)
    if not trace.num_asked_blocks:
        raise ValueError(f"{name}: no prompt of this trace fills a block of {trace.block_size} tokens")
    num_distinct = trace.num_distinct_blocks
    specs = parse_tiers(tiers, lambda text: parse_sizes(text, num_distinct, "--tier")[0])
    report = simulate(name, trace, parse_sizes(blocks, num_distinct), policies, console)
    if specs:
        with console.status("tiers"):
            report.tiers = simulate_tiers(trace, report.num_blocks, POLICIES[policies[0]], specs, token_seconds)
    report.advice = advise(report, bytes_per_token)
    return report
