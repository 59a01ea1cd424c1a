"""The models, in plain torch: they download nothing, and depend on nothing else."""

from .bert import Bert
from .gpt import GPT, add_lora
from .resnet import ResNet
from .small import Gan, LanguageLSTM, mlp, small_linears

__all__ = ["GPT", "Bert", "Gan", "LanguageLSTM", "ResNet", "add_lora", "mlp", "small_linears"]
