"""One file per stage: read artefacts, call the layers below, write artefacts."""
