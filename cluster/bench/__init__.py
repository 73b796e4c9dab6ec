"""Load generator of ``tandem bench``. It needs neither torch nor Ray."""
