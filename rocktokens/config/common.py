"""What every section of the configuration shares: refusing a bad setting with the remedy."""

from __future__ import annotations

from rocktokens.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Refuse a setting, saying what would work."""
    if not condition:
        raise ConfigError(message)
