"""Which token types stay expensive: reading, tests, tables and what people see of them."""
