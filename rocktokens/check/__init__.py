"""Does a pair fit, what will a run need, what is wrong with it."""
