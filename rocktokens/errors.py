"""What a user did wrong and what to do about it. The command line prints these without a traceback."""


class RockTokensError(ValueError):
    """Base of everything the user can mend."""


class ConfigError(RockTokensError):
    """A setting, flag or pair of models that cannot work; the message names the remedy."""


class DataError(RockTokensError):
    """Prompts, rollouts or tables that are empty, broken or do not belong together."""


class RunError(RockTokensError):
    """A run directory that is missing, incomplete, or made with other settings."""
