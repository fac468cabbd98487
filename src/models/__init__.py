"""DeepSeek-style models: one mechanism of the papers a file, every GEMM and norm through `precision`."""

from models.config import ModelConfig, NormPosition, RouterScoring, YarnConfig
from models.deepseek import DeepSeek
from models.loss import Losses

__all__ = ["DeepSeek", "Losses", "ModelConfig", "NormPosition", "RouterScoring", "YarnConfig"]
