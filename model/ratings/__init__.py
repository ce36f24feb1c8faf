"""Explicit ratings: models that predict the value of a rating, learned in batch over epochs; one a file."""

from model.ratings.base import RatingModel
from model.ratings.biases import Biases
from model.ratings.gnn import GraphConvolution, GraphConvolutionWithSide
from model.ratings.mf import BiasedFactorisation
from model.ratings.mlp import Perceptron, PerceptronWithSide

MODELS: dict[str, type[RatingModel]] = {
    model.name: model
    for model in (
        Biases,
        BiasedFactorisation,
        Perceptron,
        PerceptronWithSide,
        GraphConvolution,
        GraphConvolutionWithSide,
    )
}
