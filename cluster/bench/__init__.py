"""The load generator behind ``tandem bench``; it needs neither torch nor Ray."""
