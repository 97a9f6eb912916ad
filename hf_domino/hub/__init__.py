"""The Hub: stage a drafter's repo, check it, publish it, fetch others'."""

from ..drafter.finding_domino import FoundDrafter, find_drafters
from .adapters import inspect_staged_adapter, stage_adapter
from .cards import adapter_card, dataset_card, drafter_card
from .checks import FolderReport, inspect_folder, inspect_staged
from .fetching import fetch_drafter
from .publishing import Push, plan_push, push
from .staging import complete, stage
from .trial import Trial, try_drafter

__all__ = [
    "FolderReport",
    "FoundDrafter",
    "Push",
    "Trial",
    "adapter_card",
    "complete",
    "dataset_card",
    "drafter_card",
    "fetch_drafter",
    "find_drafters",
    "inspect_folder",
    "inspect_staged",
    "inspect_staged_adapter",
    "plan_push",
    "push",
    "stage",
    "stage_adapter",
    "try_drafter",
]
