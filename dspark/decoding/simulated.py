"""Acceptance that is SIMULATED: a schedule says how many proposals every step keeps.

For weights that mean nothing, whose proposals nobody would accept: what a step takes does not
depend on which tokens it emits.
"""

from dspark.errors import ConfigError

__all__ = ["accept_schedule"]


def accept_schedule(accept_length: float, proposals: int, length: int = 512) -> list[int]:
    """Accepted proposals of each step in turn, with this mean accept length (bonus included).

    Raises:
        ConfigError: the mean is outside 1..``proposals`` + 1.
    """
    if not 1 <= accept_length <= proposals + 1:
        raise ConfigError(
            f"accept length must lie in 1..{proposals + 1} ({proposals} proposals and the "
            f"target's own token), got {accept_length}"
        )
    wanted = accept_length - 1
    schedule, total = [], 0
    for step in range(1, length + 1):
        kept = round(wanted * step) - total
        schedule.append(kept)
        total += kept
    return schedule
