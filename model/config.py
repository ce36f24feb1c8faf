"""Everything that shapes what is learned. A checkpoint carries it; a change of it is a change of model."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ModelConfig(BaseModel):
    """Settings of the model family and of the learner around it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    family: Literal["two_tower", "mf", "mlp", "gnn", "attention", "cooccurrence"] = Field(
        "two_tower", description="model family"
    )
    dim: int = Field(64, ge=1, le=1024, description="width of an embedding; what is published may be wider")
    history: int = Field(50, ge=1, le=500, description="newest clicks of a user that make its vector")
    seen_items: int = Field(
        1000, ge=1, le=32_000, description="newest clicks of a user that are never recommended again"
    )
    user_capacity: int = Field(1_000_000, ge=1, description="users kept; past it the least recently active are evicted")
    item_capacity: int = Field(100_000, ge=1, description="items kept; past it the least recently clicked are evicted")

    batch_size: int = Field(128, ge=1, le=65_536, description="events in one optimizer step")
    micro_batch_size: int = Field(0, ge=0, description="samples on the device at once; 0 = the whole mini-batch")
    replay: int = Field(2, ge=0, le=16, description="past events learned again beside each new one")
    replay_mean_age: int = Field(10_000, ge=1, description="mean age in events of what is replayed")
    negatives: int = Field(512, ge=1, le=65_536, description="sampled negatives shared by a mini-batch")
    negative_power: float = Field(
        0.75, ge=0, le=1, description="negatives are drawn by clicks to this power, logQ-corrected"
    )
    learning_rate: float = Field(0.1, gt=0, le=10, description="row-wise Adagrad, embeddings")
    init_std: float = Field(0.1, ge=0, le=10, description="spread of a new embedding's components")
    dense_learning_rate: float = Field(1e-3, gt=0, le=1, description="Adam, dense weights")
    fusion: bool = Field(
        True, description="join the family's score with counts of clicks, by weights that are learned online"
    )
    fusion_share: float = Field(
        1.0, gt=0, le=1, description="share of the events that the weights of the fusion learn from"
    )
    neighbours: int = Field(1024, ge=8, le=65_536, description="places for the items that were clicked with an item")
    codes: int = Field(
        64, ge=1, le=1024, description="components of a published vector that carry what the fusion adds to the family"
    )
    item_features: int = Field(
        4096, ge=0, le=1_000_000, description="hashed features of described items; 0 = unclicked items get no vector"
    )
    popularity_half_life: int = Field(10_000, ge=1, description="half-life of a click's popularity, in events")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random choice")

    @model_validator(mode="after")
    def _a_batch_fits_the_tables(self) -> "ModelConfig":
        # The rows of the events that are still to be learned must never be evicted.
        smallest = min(self.user_capacity, self.item_capacity)
        if smallest < 2 * self.batch_size:
            raise ValueError(
                f"user_capacity and item_capacity must be at least twice batch_size "
                f"({2 * self.batch_size}); the smaller is {smallest}"
            )
        if self.seen_items < self.history:
            raise ValueError(f"seen_items ({self.seen_items}) must be at least history ({self.history})")
        return self
