"""`trainer.document_masking`: the model gets the token that documents begin with, or None (`models.documents`)."""

from models import DeepSeek
from trainer.config import TrainerConfig
from trainer.data import Prepared


def set_document_masking(model: DeepSeek, config: TrainerConfig, data: Prepared) -> None:
    """From now on attention stays within documents, if the config says so; data: which the model is to read."""
    model.end_of_text = data.train.sidecar.end_of_text if config.document_masking else None
