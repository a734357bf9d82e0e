"""Names for values whose types are not in Python: rows of tables (tables.py), objects of JSON, batches of TRL."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""One row of a Parquet table, by the names of its columns; or columns by name, before they become a table."""
Json = dict[str, Any]
"""One object of a JSON or YAML file: a manifest, a section of settings, the facts of a stage, a figure, a reply."""
Batch = dict[str, Any]
"""One batch as TRL and transformers hand it over: tensors, texts and images by name."""
