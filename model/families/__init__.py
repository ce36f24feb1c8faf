"""The model families: one a file, one line each here."""

from model.families.mf import MatrixFactorisation
from model.families.two_tower import TwoTower
from model.recommender import Recommender

FAMILIES: dict[str, type[Recommender]] = {
    TwoTower.name: TwoTower,
    MatrixFactorisation.name: MatrixFactorisation,
}
