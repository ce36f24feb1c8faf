"""Plots of an evaluation, with matplotlib where it is there."""

from collections.abc import Sequence
from pathlib import Path

from worker.evaluate.rows import Row

_SIZE = (8.0, 4.5)


def available() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(out: Path, rows: Sequence[Row]) -> list[Path]:
    """Recall over time, and accuracy beside coverage, one picture each for every data set; the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    made = []
    for number, name in enumerate(dict.fromkeys(row["dataset"] for row in rows), 1):
        of = [row for row in rows if row["dataset"] == name]
        place = out.with_suffix("") if number == 1 else out.with_name(f"{out.stem}-{number}")
        made += [_over_time(place, name, of), _beside(place, name, of)]
    return made


def _over_time(place: Path, name: str, rows: Sequence[Row]) -> Path:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    for row in rows:
        windows = row["over_time"]
        style = "-" if row["kind"] == "freshet" else "--"
        axes.plot([w["until"] for w in windows], [w["recall_at_10"] for w in windows], style, label=_label(row))
    axes.set(title=f"{name}: Recall@10 over the stream", xlabel="events", ylabel="Recall@10, each part of the stream")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _saved(figure, place.with_name(f"{place.name}-over-time.png"))


def _beside(place: Path, name: str, rows: Sequence[Row]) -> Path:
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(14, 4), layout="constrained", sharey=True)
    for axes, field in zip(panels, ("coverage", "novelty_bits", "repetition", "diversity"), strict=True):
        for row in rows:
            marker = "o" if row["kind"] == "freshet" else "x"
            axes.plot(row[field], row["recall_at_10"], marker, label=_label(row))
        axes.set_xlabel(field.replace("_", ", "))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("Recall@10")
    panels[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{name}: accuracy and what the lists are like")
    return _saved(figure, place.with_name(f"{place.name}-lists.png"))


def _label(row: Row) -> str:
    return f"{row['name']}, seed {row['seed']}" if row["seed"] else str(row["name"])


def _saved(figure, path: Path) -> Path:  # type: ignore[no-untyped-def]
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
