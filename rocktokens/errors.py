"""What a user did wrong and what to do about it. The command line prints these without a traceback."""


def printable(text: object, most: int = 200) -> str:
    """A foreign text for a message: cut, and without characters that a terminal obeys."""
    cut = str(text)[:most]
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in cut)


class RockTokensError(ValueError):
    """Base of everything the user can mend."""


class ConfigError(RockTokensError):
    """A setting, flag or pair of models that cannot work; the message names the remedy."""


class DataError(RockTokensError):
    """Prompts, rollouts or tables that are empty, broken or do not belong together."""


class RunError(RockTokensError):
    """A run directory that is missing, incomplete, or made with other settings."""
