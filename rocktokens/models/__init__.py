"""Student and teacher: loading, checking, their states."""
