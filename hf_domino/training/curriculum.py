"""The base-anchored curriculum: λ, the base loss's share of `(1 - λ) · L_final + λ · L_base`, over training.

Source: arXiv:2605.29707, section 3.4.
"""

from dataclasses import dataclass


@dataclass
class Curriculum:
    """Two phases: the backbone alone (λ = 1), then a linear hand-over to the corrected distribution.

    `Curriculum(0, 0, 0)` trains the final loss alone, `Curriculum(0, 0, λ)` a fixed mix, `Curriculum(1)` the base
    loss alone.

    Args:
        base_share: share of the steps with λ = 1.
        handover_share: share of the steps over which λ falls from 1 to `end`.
        end: λ from then on.

    Raises:
        ValueError: a value outside 0 to 1, or shares that add up to more than 1.
    """

    base_share: float = 0.2
    handover_share: float = 0.5
    end: float = 0.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise ValueError(f"The curriculum's {name} must lie between 0 and 1, got {value}.")
        if self.base_share < 1 and self.base_share + self.handover_share > 1 + 1e-9:
            raise ValueError(
                f"The curriculum's base_share ({self.base_share}) and handover_share ({self.handover_share}) add up to "
                "more than the whole training; lower one of them."
            )

    def weight(self, progress: float) -> float:
        """λ at `progress` (0 to 1) through training."""
        if progress < self.base_share or self.base_share == 1:
            return 1.0
        if self.handover_share == 0:
            return self.end
        done = min(1.0, (progress - self.base_share) / self.handover_share)
        return 1.0 + (self.end - 1.0) * done
