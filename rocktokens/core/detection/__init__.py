"""From the loss of every occurrence to declared token types, with the numbers that support them."""
