"""All drafters beside one another: what docs/drafters.md tells."""
