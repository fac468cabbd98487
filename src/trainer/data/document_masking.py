"""`trainer.document_masking`: sets the token that documents begin with on the model, or None (`models.documents`)."""

from models import DeepSeek
from trainer.config import TrainerConfig
from trainer.data import Prepared


def set_document_masking(model: DeepSeek, config: TrainerConfig, data: Prepared) -> None:
    """Keep attention within documents from now on, if the config asks for it. data: that the model will read."""
    model.end_of_text = data.train.sidecar.end_of_text if config.document_masking else None
