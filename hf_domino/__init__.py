"""Domino: speculative decoding with a parallel backbone and a light causal head, for Hugging Face transformers.

Importing the package registers its classes with transformers' Auto classes and installs the generation hook, so that
`model.generate(**inputs, assistant_model=drafter)` works.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .drafter.configuration_domino import DominoConfig
from .drafter.finding_domino import find_drafters
from .drafter.integration_domino import install, offer_to_pipelines, uninstall
from .drafter.modeling_domino import DominoDraftModel

__version__ = "0.1.0"
__all__ = ["DominoConfig", "DominoDraftModel", "find_drafters", "install", "uninstall"]

AutoConfig.register("domino", DominoConfig, exist_ok=True)
AutoModel.register(DominoConfig, DominoDraftModel, exist_ok=True)
AutoModelForCausalLM.register(DominoConfig, DominoDraftModel, exist_ok=True)
offer_to_pipelines(DominoDraftModel)
install()
