"""The quality report for people: a table, and a picture that is read at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

if TYPE_CHECKING:
    from jaxsqueeze.report.quality.sensitivity import WeightCost

_COLUMNS = {
    "positions": ("positions", "{:,}"),
    "reference perplexity": ("ref_perplexity", "{:.3f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "KL mean": ("kl_mean", "{:.5f}"),
    "p50": ("kl_p50", "{:.5f}"),
    "p99": ("kl_p99", "{:.4f}"),
    "p99.9": ("kl_p99.9", "{:.3f}"),
    "max": ("kl_max", "{:.2f}"),
    "same top token": ("agreement", "{:.2%}"),
    "sure": ("sure", "{:,}"),
    "of these flipped": ("flips", "{:.2%}"),
}


def headline_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """The headline's figures. Changes and flips are shares, KL is in nats."""
    every = report["all"]
    return {
        "reference": report["reference"],
        "tokens": report["tokens"],
        "perplexity_change": every["perplexity"] / every["ref_perplexity"] - 1,
        "kl_p99.9": every["kl_p99.9"],
        "rare_flips": report["rare"].get("flips"),  # None: no rare token of which the reference was sure
    }


def headline(report: Mapping[str, Any]) -> str:
    """One line: what a model costs in quality."""
    f = headline_figures(report)
    flips = f["rare_flips"]
    rare_flips = "no sure rare token" if flips is None else f"{flips:.2%} of sure rare tokens flipped"
    return f"perplexity {f['perplexity_change']:+.2%}, KL p99.9 {f['kl_p99.9']:.3f} nats, {rare_flips}"


def table(report: Mapping[str, Any]) -> Table:
    """All figures: rows are slices of the text."""
    title = f"{report['candidate']} against {report['reference']}: {headline(report)}"
    table = Table("text", *_COLUMNS, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in (("all", report["all"]), ("rare", report["rare"])):
        table.add_row(name, *_cells(part))
    for group, label in (("by_rarity", "{}"), ("by_context", "{} tokens before")):
        table.add_section()
        for name, part in report[group].items():
            table.add_row(label.format(name), *_cells(part))
    return table


def costs_table(costs: Sequence[WeightCost], most: int = 10) -> Table:
    """The first of ``costs``."""
    title = f"What each weight costs by itself: the worst {min(most, len(costs))} of {len(costs)}"
    table = Table("weight", "stored in", "MB", "KL mean", "p99", title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for cost in costs[:most]:
        table.add_row(
            cost.name, cost.scheme, f"{cost.num_bytes / 1e6:.2f}", f"{cost.kl_mean:.5f}", f"{cost.kl_p99:.4f}"
        )
    return table


def _cells(part: Mapping[str, Any]) -> list[str]:
    values = ((part.get(key), form) for key, form in _COLUMNS.values())
    return ["-" if value is None else form.format(value) for value, form in values]


def plot(path: Path, report: Mapping[str, Any], kl: np.ndarray, groups: Mapping[str, np.ndarray]) -> None:
    """Writes a PNG: quantile curves of the KL (nats, logarithmic) of all tokens and of the ``groups`` (masks by name),
    and for each rarity bucket the mean KL and the share of flips."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    share = 1 - np.geomspace(1, 1e-4, 200)
    for name, mask in {"all": np.ones(len(kl), bool), **groups}.items():
        if mask.any():
            curves.plot(1 / (1 - share), np.maximum(np.quantile(kl[mask], share), 1e-7), label=name)
    curves.set(xscale="log", yscale="log", title="KL to the reference", ylabel="nats, or more, in one token of ...")
    curves.set(xlabel="so many tokens (10: the worst tenth, 1000: p99.9)")
    curves.legend()
    curves.grid(alpha=0.3)
    buckets = report["by_rarity"]
    place = np.arange(len(buckets))
    bars.bar(place - 0.2, [b.get("kl_mean", 0) for b in buckets.values()], 0.4, label="mean KL, nats")
    bars.set(title="by rarity of the token: from the most frequent to the rarest", ylabel="mean KL, nats")
    bars.set_xticks(place, [name.removeprefix("decile ") for name in buckets])
    flips = bars.twinx()
    flips.bar(
        place + 0.2, [100 * (b.get("flips") or 0) for b in buckets.values()], 0.4, color="tab:red", label="flips, %"
    )
    flips.set(ylabel="flips where the reference was sure, %")
    handles = [*bars.get_legend_handles_labels()[0], *flips.get_legend_handles_labels()[0]]
    bars.legend(handles, ["mean KL (left)", "flips (right)"])
    figure.suptitle(f"{report['candidate']} against {report['reference']}: {headline(report)}", fontsize=10)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
