"""The self-contained HTML report: page, rollout viewer, method section."""
