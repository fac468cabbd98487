from models.config import ModelConfig as ModelConfig
from models.config import NormPosition as NormPosition
from models.config import RouterScoring as RouterScoring
from models.config import YarnConfig as YarnConfig
from models.deepseek import DeepSeek as DeepSeek
from models.loss import Losses as Losses
