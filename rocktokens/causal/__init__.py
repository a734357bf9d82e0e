"""Whether tokens matter: knock-outs, grafts and their verdicts."""
