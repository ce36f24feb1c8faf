"""The model families: one a file, one line each here."""

from model.families.attention import SelfAttention
from model.families.cooccurrence import CooccurrenceOnly
from model.families.gnn import NeighbourAggregation
from model.families.mf import MatrixFactorisation
from model.families.mlp import PairwiseNetwork
from model.families.two_tower import TwoTower
from model.recommender import Recommender

FAMILIES: dict[str, type[Recommender]] = {
    TwoTower.name: TwoTower,
    MatrixFactorisation.name: MatrixFactorisation,
    PairwiseNetwork.name: PairwiseNetwork,
    NeighbourAggregation.name: NeighbourAggregation,
    SelfAttention.name: SelfAttention,
    CooccurrenceOnly.name: CooccurrenceOnly,
}
