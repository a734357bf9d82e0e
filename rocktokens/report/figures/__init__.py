"""The figures of the report, one file per stage."""
