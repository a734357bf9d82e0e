"""`rocktokens view`: reports served on the loopback address."""
