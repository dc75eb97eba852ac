"""What `dspark bench collectives` is asked for; read where no kernel can be."""

from dataclasses import dataclass

from dspark.errors import ConfigError
from dspark.serving.settings import RANKS

__all__ = ["SKEWS", "CollectiveOptions"]

SKEWS = (0, 20, 100)


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """What is exchanged, and how late ranks are.

    Raises:
        ConfigError: a number is out of range.
    """

    ranks: int = 4
    hidden: int = 2560
    skew: tuple[int, ...] = SKEWS
    """Looks that a program is late at most, one after the other; a look is about a microsecond."""
    repeats: int = 50
    rounds: int = 0
    """Exchanges that are checked to the bit, for each ``skew``."""
    vocabulary: int = 157184
    """Rows of the embedding."""

    def __post_init__(self) -> None:
        if self.ranks not in RANKS[1:]:
            raise ConfigError(f"--tp must be one of {RANKS[1:]}, got {self.ranks}")
        if self.hidden < 16 or self.hidden % 16:
            raise ConfigError(f"--hidden must be a multiple of 16, got {self.hidden}")
        if self.rounds < 0:
            raise ConfigError(f"--rounds must be >= 0, got {self.rounds}")
        if self.vocabulary < 1:
            raise ConfigError(f"--vocabulary must be >= 1, got {self.vocabulary}")
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be >= 1, got {self.repeats}")
        if any(one < 0 for one in self.skew):
            raise ConfigError(f"--skew must be >= 0, got {min(self.skew)}")
