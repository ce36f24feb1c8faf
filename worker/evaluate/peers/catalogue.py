"""Which peers there are, and how each is made; a library is imported when its peer is asked for."""

from collections.abc import Callable, Sequence

from worker.evaluate.dataset import EvaluationError
from worker.evaluate.peers.base import Peer
from worker.evaluate.peers.popular import Popular
from worker.evaluate.stream import EventStream

BASELINE = "popularity"
_Maker = Callable[[int, int], Peer]  # from the numbers of users and items


def _item_knn(_users: int, items: int) -> Peer:
    from worker.evaluate.peers.item_knn import RecencyItemKnn

    return RecencyItemKnn(items)


def _isgd(users: int, items: int) -> Peer:
    from worker.evaluate.peers.isgd import Isgd

    return Isgd(users, items)


def _als(users: int, items: int) -> Peer:
    from worker.evaluate.peers.implicit_peers import ImplicitAls

    return ImplicitAls(users, items)


def _bm25(users: int, items: int) -> Peer:
    from worker.evaluate.peers.implicit_peers import ImplicitBm25

    return ImplicitBm25(users, items)


def _biased_mf(_users: int, items: int) -> Peer:
    from worker.evaluate.peers.river_peers import RiverBiasedMf

    return RiverBiasedMf(items)


PEERS: dict[str, _Maker] = {
    BASELINE: lambda _users, items: Popular(items),
    "item_knn_recency": _item_knn,
    "isgd_negatives": _isgd,
    "implicit_als": _als,
    "implicit_bm25": _bm25,
    "river_biased_mf": _biased_mf,
}


def chosen(everything: bool, names: Sequence[str]) -> list[str]:
    """The peers that are to run; the most popular items are always among them. EvaluationError for one unknown."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise EvaluationError(f"--peer {unknown[0]}: there is no such peer; there are {', '.join(PEERS)}")
    wanted = [name for name in PEERS if everything or name in names or name == BASELINE]
    for name in wanted:
        _check_library(name)
    return wanted


def _check_library(name: str) -> None:
    """Fail before the first hour of an evaluation, not after it."""
    library = name.partition("_")[0]
    if library not in ("implicit", "river"):
        return
    try:
        __import__(library)
    except ImportError as error:
        raise EvaluationError(
            f"{name} needs a library that is not there ({error}): pip install 'freshet[peers]'"
        ) from None


def made(name: str, stream: EventStream) -> Peer:
    """A peer for a stream."""
    return PEERS[name](len(stream.user_ids), len(stream.item_ids))
