"""What follows from the numbers, in words. Every sentence that a person reads about a result is made here."""
